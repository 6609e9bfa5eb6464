"""Nodes from Amazon ECS: one task for each node, whose container runs a node agent. ECS knows every task."""

from collections.abc import Mapping
from typing import Any

from provisioner.context import ProviderContext
from provisioner.core.provider import Provider


def create(config: Mapping[str, Any], context: ProviderContext) -> Provider:
    """`config`: see provisioner.ecs.settings. Raises InvalidArgument, ImportError without boto3."""
    import boto3
    import botocore.config

    from provisioner.ecs.provider import EcsProvider
    from provisioner.ecs.settings import EcsSettings
    from springtide.config import parse

    settings = parse(EcsSettings, config, "provider.")
    settings.check()
    client = boto3.client(
        "ecs",
        region_name=settings.region or None,
        endpoint_url=settings.endpoint_url or None,
        # One attempt: an outcome that is not known is looked up before anything is repeated.
        config=botocore.config.Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"total_max_attempts": 1},
        ),
    )
    return EcsProvider(settings, context, client)
