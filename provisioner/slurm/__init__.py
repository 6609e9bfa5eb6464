"""Nodes from SLURM: one job for each node, which runs a node agent. No state of its own: squeue knows every job."""

from collections.abc import Mapping
from typing import Any

from provisioner.context import ProviderContext
from provisioner.core.provider import Provider


def create(config: Mapping[str, Any], context: ProviderContext) -> Provider:
    """`config`: see provisioner.slurm.settings. Raises InvalidArgument, OSError."""
    from provisioner.slurm.provider import SlurmProvider
    from provisioner.slurm.settings import SlurmSettings
    from springtide.config import parse

    return SlurmProvider(parse(SlurmSettings, config, "provider."), context)
