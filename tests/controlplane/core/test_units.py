"""Units of nodes: they go together, and a plan's work grows with the nodes, not with their square."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.core.draft import Draft
from controlplane.core.nodes.saga import follow_provisioners
from springtide.model.enums import NodeState, State
from springtide.model.node import Node, Provision
from springtide.model.provisioning import CapabilitySet
from tests.controlplane.core.node_world import NodeWorld, provider

LEAVING = (NodeState.RELEASING, NodeState.GONE)


class Counted(dict[str, Node]):
    """Counts the records that somebody looks at."""

    visited = 0

    def _count(self, found: Any) -> Iterator[Any]:
        for item in found:
            self.visited += 1
            yield item

    def __iter__(self) -> Iterator[str]:
        return self._count(super().__iter__())

    def __getitem__(self, key: str) -> Node:
        self.visited += 1
        return super().__getitem__(key)

    def values(self) -> Any:
        return self._count(super().values())

    def items(self) -> Any:
        return self._count(super().items())


def draft_of(nodes: int, states: dict[int, NodeState], *, unit: int = 4, provisioners: int = 1) -> Draft:
    """Nodes UP in units, but for those in `states`. Group ids are the same at each provisioner."""
    world = NodeWorld()
    for number in range(nodes):
        group, owner = f"g-{number // provisioners // unit:04}", f"p{number % provisioners}"
        node_id = f"{owner}-n-{number:05}"
        world.node_records[node_id] = Node(
            node_id,
            state=states.get(number, NodeState.UP),
            state_since=world.now,
            provided=Provision(owner, group_id=group, capability_set="std"),
        )
    return Draft(world.snapshot(), world.now)


@pytest.mark.parametrize("states", [{}, {7: NodeState.RELEASING, 1998: NodeState.GONE}], ids=["quiet", "two leave"])
def test_following_units_looks_at_each_node_a_few_times(states: dict[int, NodeState]) -> None:
    """CP9: 2,000 nodes in units of four are some thousand looks in one plan, not four million."""
    draft = draft_of(2000, states)
    draft.nodes = counted = Counted(draft.nodes)
    follow_provisioners(draft)
    assert 2000 <= counted.visited <= 10 * 2000
    followed = {node_id for node_id, node in dict(counted).items() if node.reason == "UNIT_ENDS"}
    assert len(followed) == 3 * len(states)


@pytest.mark.parametrize("seed", range(40))
def test_nodes_of_one_unit_go_together_and_no_other_goes(seed: int) -> None:
    """CP9, PV1: of random units of random states, exactly those of which one leaves are left by the others; units of
    the same name at another provisioner are others."""
    rng = random.Random(seed)
    nodes, unit, owners = 40, rng.choice([2, 3, 4]), rng.choice([1, 2])
    kinds = [NodeState.UP, NodeState.REQUESTED, NodeState.LOST]
    states = {n: rng.choice(LEAVING) if rng.random() < 0.15 else rng.choice(kinds) for n in range(nodes)}
    draft = draft_of(nodes, states, unit=unit, provisioners=owners)
    before = dict(draft.nodes)
    follow_provisioners(draft)

    def key(node: Node) -> tuple[str, str]:
        assert node.provided is not None
        return node.provided.provisioner_id, node.provided.group_id

    units = {key(node) for node in before.values() if node.state in LEAVING}
    for node_id, node in before.items():
        expected = node.state
        if key(node) in units and node.state is NodeState.UP:
            expected = NodeState.RELEASING
        elif key(node) in units and node.state is NodeState.REQUESTED:
            expected = NodeState.GONE
        assert draft.nodes[node_id].state is expected, node_id
    assert not draft.was_full, "one plan was enough"


def test_half_a_unit_is_given_back() -> None:
    """CP12, PV1: the second node of a unit is refused: the first one does not stay behind alone, and the pool is served
    by the next unit."""
    kinds = (CapabilitySet("pair", gpus_per_node=1, max_nodes=4, nodes_per_unit=2),)
    world = NodeWorld(provider(sets=kinds))
    giver = world.providers["p1"]
    world.add_pool(desired=2, min_workers=0)
    world.set_intent("demo", manual_workers=2)
    while not giver.hosts:
        world.turn()
    first, second = sorted(giver.hosts)
    del giver.hosts[second]  # it never came
    giver.refuses = True
    world.turn(times=14)  # more than START_AGAIN_S
    assert world.node_records[second].state is NodeState.GONE
    assert "no capacity now" in next(e.message for e in world.events if e.target == second and e.action == "node_gone")
    giver.refuses = False
    world.turn(times=30)
    assert first not in world.alive()
    assert len(world.alive()) == 2
    assert world.count(State.ACTIVE) == 2
