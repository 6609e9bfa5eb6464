"""The capability set of a provider that has one, from its settings. Pure."""

from collections.abc import Mapping
from typing import Protocol

from provisioner.core.provider import CapabilitySet


class OneSet(Protocol):
    """What the settings of such a provider have in common; in the words of their documentation."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def gpus_per_node(self) -> int: ...
    @property
    def resources(self) -> Mapping[str, int]: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def spot(self) -> bool: ...
    @property
    def cost_per_hour(self) -> float: ...


def capability_set(
    s: OneSet, *, keep_nodes: int, gpus_per_node: int | None = None, max_nodes: int | None = None
) -> CapabilitySet:
    """`gpus_per_node`, `max_nodes`: in place of what the settings say."""
    return CapabilitySet(
        name=s.name,
        labels=dict(s.labels),
        gpus_per_node=s.gpus_per_node if gpus_per_node is None else gpus_per_node,
        resources=dict(s.resources),
        max_nodes=s.max_nodes if max_nodes is None else max_nodes,
        spot=s.spot,
        cost_per_hour=s.cost_per_hour,
        keep_nodes=keep_nodes,
    )
