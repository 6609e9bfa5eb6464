"""Live demand by labels and values: each set grows and shrinks where its labels are, whatever the others do (PL6)."""

import pytest

from controlplane.core.policies.capability import Capability
from controlplane.core.policy import Demand, Supply
from controlplane.core.snapshot import PoolDemand
from controlplane.live import Live
from springtide.model.enums import State
from springtide.model.pool import PolicySpec
from springtide.model.routing import NeedReport, PoolReport, RouterReport
from tests.controlplane.core.world import FakeNode, World
from tests.controlplane.policies.given import inputs

A, B = "zone=a", "zone=b"


def two_zones(gpus: int = 4, **spec: object) -> World:
    world = World(nodes=0)
    world.nodes["n1"] = FakeNode("n1", gpus, labels={"zone": "a"})
    world.nodes["n2"] = FakeNode("n2", gpus, labels={"zone": "b"})
    world.add_pool("demo", 0, **{"min_workers": 0, "max_workers": 8, "policy": PolicySpec("capability"), **spec})
    world.turn(times=3)
    return world


def ask(world: World, **tasks: int) -> None:
    """a=3: three requests ask for zone=a. They wait, and are not in shims."""
    needs = {f"zone={zone}": count for zone, count in tasks.items() if count}
    world.demand["demo"] = PoolDemand(sum(needs.values()), by_needs=needs)


def where(world: World) -> tuple[int, int]:
    held = [w.intent.node_id for w in world.workers.values() if w.state in (State.STARTING, State.ACTIVE)]
    return held.count("n1"), held.count("n2")


def test_a_label_with_its_value_starts_where_it_is() -> None:
    """PL6: the same key with another value is another set; only `zone=b`'s node gets workers for it."""
    world = two_zones()
    ask(world, b=8)
    world.turn(times=8)
    assert where(world) == (0, 2)
    ask(world, a=3, b=8)
    world.turn(times=8)
    assert where(world) == (1, 2)
    ask(world, a=11, b=8)
    world.turn(times=12)
    assert where(world) == (3, 2)
    ask(world, a=11)
    world.turn(times=30)
    assert where(world) == (3, 0)


def test_equal_counts_do_not_hide_that_the_wrong_ones_are_there() -> None:
    """PL6: one worker is there and one is wanted, with other labels: it is started, then the idle one stops."""
    world = two_zones()
    ask(world, a=1)
    world.turn(times=8)
    assert where(world) == (1, 0)
    ask(world, b=1)
    world.turn(times=2)
    assert where(world)[1] == 1  # at zero for its set: not after the next interval
    world.turn(times=25)
    assert where(world) == (0, 1)


def test_at_the_upper_bound_the_wrong_one_makes_room() -> None:
    """PL6: without room for one more, what no set needs is drained first, and its drain is not cancelled for others."""
    world = two_zones(max_workers=1)
    ask(world, a=1)
    world.turn(times=8)
    ask(world, b=1)
    world.turn(times=40)
    assert where(world) == (0, 1)
    assert "scale_down_cancel" not in world.actions()


def test_a_full_node_does_not_make_others_grow() -> None:
    """PL6: a set whose nodes have no room is not answered with workers elsewhere, time and again."""
    world = two_zones(gpus=1)
    world.add_pool("other", 1, placement={"zone": "b"}, policy=PolicySpec("static"))
    world.turn(times=6)
    ask(world, a=1)
    world.turn(times=8)
    ask(world, a=1, b=3)
    world.turn(times=30)
    assert sum(1 for w in world.workers.values() if w.pool == "demo" and w.state is State.ACTIVE) == 1


def test_the_pools_own_labels_are_offered_too() -> None:
    """PL6, RT7: what routers match are the node's and the pool's labels; so are supplies."""
    world = two_zones(labels={"tier": "gold"})
    world.demand["demo"] = PoolDemand(1, by_needs={"tier=gold": 1})
    world.turn(times=8)
    assert sum(where(world)) == 1


def test_nodes_that_differ_in_what_nobody_asks_for_are_one_supply() -> None:
    """Bounds: host names as labels do not make a supply of every node."""
    world = World(nodes=0)
    for number in range(6):
        world.nodes[f"n{number}"] = FakeNode(f"n{number}", 1, labels={"host": f"h{number}"})
    world.add_pool("demo", 0, min_workers=0, max_workers=6, policy=PolicySpec("capability"))
    world.demand["demo"] = PoolDemand(12, by_needs={"": 10, "host=h3": 2})
    world.turn(times=12)
    held = {w.intent.node_id for w in world.workers.values() if w.state is State.ACTIVE}
    assert "n3" in held
    assert len(held) == 3


def report(**zones: tuple[int, int]) -> RouterReport:
    needs = tuple(NeedReport((("zone", zone),) if zone != "none" else (), *counts) for zone, counts in zones.items())
    return RouterReport((PoolReport("demo", 0, by_needs=needs),))


def test_a_report_becomes_the_cores_demand_and_a_new_set_is_news() -> None:
    """PL6, CP11: the leader looks at once when labels are asked for that nobody asked for before."""
    live = Live(1.0)
    connection = live.router_hello("r1", "s", 0, 0.0)
    assert live.router_report("r1", connection, report(none=(0, 2)), 0.0) == set()
    assert live.router_report("r1", connection, report(none=(0, 2), a=(1, 3)), 1.0) == {"pool/demo"}
    assert live.router_report("r1", connection, report(a=(5, 9)), 2.0) == set()
    [router] = live.view().routers.values()
    assert router.demand["demo"].by_needs == {"zone=a": 14}


@pytest.mark.parametrize(
    ("present", "most", "asked", "wanted"),
    [
        (2, 8, (7, 0), 2),
        (2, 8, (0, 7), 4),  # two of b start; the two of a stop after that
        (2, 3, (0, 7), 3),
        (2, 2, (0, 7), 0),  # no room: both of a make it
        (2, 2, (1, 1), 1),
    ],
)
def test_one_direction_at_a_time(present: int, most: int, asked: tuple[int, int], wanted: int) -> None:
    """PL6, seed 2 §2.08: starts first; where the bound leaves no room, what no set needs goes first."""
    supplies = (Supply("p", frozenset({A}), active=present), Supply("p", frozenset({B})))
    demands = (Demand(frozenset({A}), asked[0]), Demand(frozenset({B}), asked[1]))
    seen = inputs(sum(asked), present, most=most, least=0, supplies=supplies, demands=demands)
    assert Capability().decide(seen).wanted == wanted
