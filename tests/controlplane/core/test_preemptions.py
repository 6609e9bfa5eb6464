"""A preemption is told once, whoever speaks of it first: the node's agent or its provisioner."""

from collections.abc import Callable

import pytest

from springtide.model.enums import NodeState, State
from springtide.model.provisioning import ProvidedPhase
from tests.controlplane.core.node_world import NodeWorld, provider

Order = Callable[[NodeWorld, str], None]


def agent_notices(world: NodeWorld, node_id: str) -> None:
    """Its host warned it: it says that it stops, and not why."""
    node = world.nodes[node_id]
    node.stopping, node.stop_deadline_at = True, world.now + 6.0


def agent_leaves(world: NodeWorld, node_id: str) -> None:
    """It has drained."""
    node = world.nodes[node_id]
    node.engines.clear()
    node.goodbye = True


def provider_takes_it(world: NodeWorld, node_id: str) -> None:
    host = world.providers["p1"].hosts[node_id]
    host.phase, host.since, host.reason = ProvidedPhase.ENDING, world.now, "PREEMPTED"


def it_has_ended(world: NodeWorld, node_id: str) -> None:
    host = world.providers["p1"].hosts[node_id]
    host.phase, host.since, host.reason = ProvidedPhase.ENDED, world.now, "PREEMPTED"


ORDERS: dict[str, tuple[Order, ...]] = {
    "the provisioner alone": (provider_takes_it, it_has_ended),
    "the provisioner first": (provider_takes_it, agent_notices, agent_leaves, it_has_ended),
    "the agent first": (agent_notices, provider_takes_it, agent_leaves, it_has_ended),
    "the agent, and the end": (agent_notices, it_has_ended),
    "the provisioner after the goodbye": (agent_notices, agent_leaves, it_has_ended),
}


def told(world: NodeWorld, node_id: str) -> list[tuple[str, str]]:
    return [(event.action, event.reason) for event in world.events if event.target == node_id]


@pytest.mark.parametrize("steps", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("apart_s", [0.0, 0.6])
def test_it_is_told_once_in_each_order(steps: tuple[Order, ...], apart_s: float) -> None:
    """NA10, PV4, rule 11: the event, and with it the metric of events, is there once; the pool comes back."""
    world = NodeWorld(provider())
    world.add_pool(desired=1, min_workers=0, drain_timeout_s=3.0)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=10)
    (node_id,) = world.records(NodeState.UP)
    for step in steps:
        step(world, node_id)
        world.turn(seconds=apart_s)
    world.turn(times=30)
    said = told(world, node_id)
    assert [entry for entry in said if entry[0] == "node_preempted"] == [("node_preempted", "PREEMPTED")], said
    assert world.node_records[node_id].state is NodeState.GONE
    assert said.count(("node_gone", world.node_records[node_id].reason)) == 1
    assert world.count(State.ACTIVE) == 1


def test_one_that_was_told_is_not_told_by_the_next_leader() -> None:
    """CP10: that it was told is in the record."""
    world = NodeWorld(provider())
    world.add_pool(desired=1, min_workers=0)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=10)
    (node_id,) = world.records(NodeState.UP)
    agent_notices(world, node_id)
    provider_takes_it(world, node_id)
    world.turn()
    world.live_nodes.clear()
    world.heard.clear()
    world.providers["p1"].restart()
    world.turn(times=20)
    assert [action for action, _ in told(world, node_id)].count("node_preempted") == 1


def test_a_node_that_is_preempted_before_its_agent_came_says_so() -> None:
    """CP13, PV4: it is given up, and why is told."""
    world = NodeWorld(provider(never_registers=True))
    world.add_pool(desired=1, min_workers=0)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=6)
    (node_id,) = world.records(NodeState.REQUESTED)
    provider_takes_it(world, node_id)
    world.turn(times=3)
    said = [action for action, _ in told(world, node_id)]
    assert said.count("node_preempted") == 1
    assert said.count("node_gone") == 1


def test_one_that_is_taken_back_and_comes_again_is_another_one() -> None:
    """NA10: a notice of an end that is put off, and a later one."""
    world = NodeWorld(provider())
    world.add_pool(desired=1, min_workers=0, drain_timeout_s=1.0)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=10)
    (node_id,) = world.records(NodeState.UP)
    host = world.providers["p1"].hosts[node_id]
    for _ in range(2):
        host.ends_at, host.reason = world.now + 15.0, "PREEMPTED"
        world.turn(seconds=0.2)
        assert world.node_records[node_id].state is NodeState.RELEASING
        host.ends_at, host.reason = None, ""
        world.turn(seconds=0.2, times=3)
        assert world.node_records[node_id].state is NodeState.UP
    assert [action for action, _ in told(world, node_id)].count("node_preempted") == 2
