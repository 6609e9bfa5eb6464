"""Provider `static`: nodes whose agents are simply there, started and stopped by somebody else.

    [[provider.sets]]
    name = "rack1"
    nodes = ["host-1", "host-2"]      # the node ids of their agents
    gpus_per_node = 8

It tells the control plane what these nodes are like and who owns them. It starts and stops nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from provisioner.context import ProviderContext
from provisioner.core.provider import CapabilitySet, GroupOrder, Phase, ProvidedNode, Refused
from springtide import config
from springtide.config import setting
from springtide.errors import InvalidArgument
from springtide.wire.values import identifier


@dataclass(frozen=True)
class StaticSet:
    """One [[provider.sets]]."""

    name: str = setting(doc="Name of the capability set.")
    nodes: tuple[str, ...] = setting((), doc="Node ids, as their agents say them.")
    gpus_per_node: int = setting(0, doc="GPUs of each.", minimum=0)
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels of the nodes.")
    resources: Mapping[str, int] = setting(default_factory=dict, doc="Countable units of each node.")


@dataclass(frozen=True)
class StaticSettings:
    """The table [provider]."""

    sets: tuple[StaticSet, ...] = setting((), doc="Kinds of nodes.")


def create(plain: Mapping[str, Any], context: ProviderContext) -> "Static":
    """Raises InvalidArgument for a node that is named twice."""
    settings = config.parse(StaticSettings, plain, "provider.")
    nodes = [identifier(node_id, "provider.sets.nodes") for found in settings.sets for node_id in found.nodes]
    doubled = sorted({node_id for node_id in nodes if nodes.count(node_id) > 1})
    if doubled:
        raise InvalidArgument(
            field="provider.sets.nodes", value=doubled[0], problem="is named twice", remedy="Name each node once."
        )
    return Static(settings)


class Static:
    def __init__(self, settings: StaticSettings) -> None:
        self._sets = settings.sets

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        return [
            CapabilitySet(
                name=found.name,
                labels=found.labels,
                gpus_per_node=found.gpus_per_node,
                resources=found.resources,
                max_nodes=len(found.nodes),
                available_nodes=0,
                keep_nodes=len(found.nodes),
            )
            for found in self._sets
        ]

    async def start(self, order: GroupOrder) -> None:
        known = {node_id for found in self._sets for node_id in found.nodes}
        if not known.issuperset(order.node_ids):
            raise Refused("WORKER_GROUP_TOO_MUCH", "static nodes are started by somebody else; no other can be had")

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        raise Refused("WORKER_GROUP_ID_NOT_FOUND", "static nodes are stopped by somebody else")

    async def list(self) -> Sequence[ProvidedNode]:
        return [
            ProvidedNode(node_id, node_id, found.name, Phase.RUNNING) for found in self._sets for node_id in found.nodes
        ]

    async def close(self) -> None:
        """There is nothing to let go of."""
