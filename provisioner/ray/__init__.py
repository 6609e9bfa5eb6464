"""Nodes from a Ray cluster: each Ray node that joins gets one agent, in a detached actor that is pinned to it."""

from collections.abc import Mapping
from typing import Any

from provisioner.context import ProviderContext
from provisioner.core.provider import Provider
from springtide.errors import FailedPrecondition


def create(config: Mapping[str, Any], context: ProviderContext) -> Provider:
    """`config`: see provisioner.ray.settings. Raises InvalidArgument, and FailedPrecondition without Ray."""
    from provisioner.ray.settings import RaySettings
    from springtide.config import parse

    settings = parse(RaySettings, config, "provider.")
    try:
        from provisioner.ray.provider import RayProvider
    except ImportError as error:
        raise FailedPrecondition(
            f"Ray cannot be imported: {error}.",
            reason="NOT_INSTALLED",
            field="kind",
            value="ray",
            remedy="Install it where the provisioner runs: pip install 'springtide[ray]'.",
        ) from None
    return RayProvider(settings, context)
