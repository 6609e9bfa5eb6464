"""Drains: removal in order, deadlines and their actions, cancelling (CP7, CP8, F1, F2, F45)."""

import dataclasses
from typing import Any

import pytest

from controlplane.core import orders
from controlplane.core.desired import desired_workers
from controlplane.core.snapshot import PoolDemand
from springtide.errors import FailedPrecondition
from springtide.model.enums import DrainAction, Phase, ReportedPhase, State, Want
from tests.controlplane.core.world import World


def pool_of(active: int, **spec: Any) -> World:
    world = World(gpus=8)
    world.add_pool(desired=active, min_workers=0, **spec)
    world.set_intent("demo", manual_workers=active)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == active
    return world


def order_drain(world: World, worker_id: str = "demo-1", **args: Any) -> None:
    world.set_intent("demo", manual_workers=world.count(State.ACTIVE) - 1)
    world.apply(orders.drain_worker(world.snapshot(), worker_id, world.now, **args))


def report(world: World, worker_id: str = "demo-1") -> None:
    """The node obeys and reports, routers acknowledge, without a plan."""
    node = world.nodes["n1"]
    node.obey(desired_workers(world.snapshot(), "n1"), world.now)
    world.hear(node)
    if world.routers_ack:
        world.routers = {key: dataclasses.replace(r, acked_revision=world.revision) for key, r in world.routers.items()}


def keep_heard(world: World) -> None:
    """The node is heard, with nothing new."""
    world.live_nodes["n1"] = dataclasses.replace(world.live_nodes["n1"], last_heard_at=world.now)


def phase(world: World, worker_id: str = "demo-1") -> Phase | None:
    return world.workers[worker_id].intent.phase


def test_removal_order() -> None:
    """F1, F2, F4, RT9: out of the table, acknowledged and refused, in-flight zero, stopped, slice free: in this
    order."""
    world = pool_of(2)
    world.engine("demo-1").in_flight = 2
    world.routers_ack = False
    world.turn()
    order_drain(world)
    assert world.routed() == ["demo-2"]
    ordered_at = world.revision
    world.settle()
    assert (phase(world), world.workers["demo-1"].intent.unrouted_revision) == (Phase.UNROUTING, ordered_at)
    report(world)
    world.settle()
    assert phase(world) is Phase.UNROUTING, "the shim refuses, but a router has not acknowledged"
    world.routers = {"r0": dataclasses.replace(world.routers["r0"], acked_revision=ordered_at)}
    world.settle()
    assert phase(world) is Phase.FINISHING
    world.engine("demo-1").in_flight = 0
    report(world)
    world.settle()
    assert phase(world) is Phase.RELEASING
    assert world.workers["demo-1"].intent.gpu_ids
    (wanted,) = [w for w in desired_workers(world.snapshot(), "n1") if w.worker_id == "demo-1"]
    assert (wanted.want, wanted.kill) == (Want.STOP, False)
    world.turn(times=2)
    worker = world.workers["demo-1"]
    assert (worker.state, phase(world), worker.intent.gpu_ids) == (State.INACTIVE, Phase.STOPPED, ())
    mine = [(e.action, e.status) for e in world.events if e.target == "demo-1"][2:]
    assert mine == [("scale_down_start", "draining"), ("scale_down_complete", "scaling_down")]
    assert len({e.trace_id for e in world.events if e.target == "demo-1"}) == 2, (
        "one trace for the start, one for the drain"
    )


def test_routers_are_waited_for_only_so_long() -> None:
    """Rule 4: a bound passes in place of an acknowledgement; the shim's refusal is what safety rests on."""
    world = pool_of(1)
    world.routers_ack = False
    world.turn()
    order_drain(world)
    world.settle()
    report(world)
    world.now += 1.9
    world.settle()
    assert phase(world) is Phase.UNROUTING
    world.now += 0.2
    world.settle()
    assert phase(world) is Phase.RELEASING


def test_a_shim_that_does_not_refuse_yet_keeps_it_unrouting() -> None:
    """Rule 4: FINISHING needs the node's word for this very order."""
    world = pool_of(1)
    order_drain(world)
    world.routers_ack = True
    world.hear(world.nodes["n1"])
    world.now += 3.0
    world.settle()
    assert phase(world) is Phase.UNROUTING
    world.engine("demo-1").phase = ReportedPhase.DRAINING  # but of an older generation
    world.hear(world.nodes["n1"])
    world.settle()
    assert phase(world) is Phase.UNROUTING


def test_idle_worker_without_routers_is_gone_at_once() -> None:
    """Timeline vectors 5.3: start and complete of an idle instance at the same instant."""
    world = World(gpus=2, routers=0)
    world.add_pool(min_workers=0, desired=1)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=6)
    at = world.now
    order_drain(world)
    for _ in range(4):
        world.settle()
        report(world)
        world.nodes["n1"].live_on(world.now)
        world.hear(world.nodes["n1"])
    world.settle()
    assert world.states() == {"demo-1": "INACTIVE"}
    drained = [(e.at, e.action) for e in world.events if e.action.startswith("scale_down")]
    assert drained == [(at, "scale_down_start"), (at, "scale_down_complete")]


@pytest.mark.parametrize(
    ("action", "phases", "events"),
    [
        (DrainAction.ABORT, (Phase.FINISHING, Phase.RELEASING), ["drain_aborted"]),
        (DrainAction.KILL, (Phase.RELEASING, Phase.RELEASING), []),
        (DrainAction.WAIT, (Phase.FINISHING, Phase.FINISHING), ["drain_overdue"]),
    ],
)
def test_deadline(action: DrainAction, phases: tuple[Phase, Phase], events: list[str]) -> None:
    """CP7: what is left is cut with an explicit error, killed, or waited for; never INACTIVE with requests
    unreported."""
    world = pool_of(1, drain_action=action, drain_timeout_s=30.0)
    engine = world.engine("demo-1")
    engine.in_flight = engine.stuck = 5
    world.turn()
    order_drain(world)
    world.turn(times=29)
    assert phase(world) is Phase.FINISHING
    world.now += 2.0
    world.settle()
    assert phase(world) is phases[0]
    worker = world.workers["demo-1"]
    assert worker.intent.abort_in_flight == (action is DrainAction.ABORT)
    assert worker.intent.kill == (action is DrainAction.KILL)
    if action is not DrainAction.WAIT:
        assert "5 requests running" in worker.intent.message
    report(world)
    world.settle()
    assert phase(world) is phases[1]
    told = [e.action for e in world.events if e.action in ("drain_aborted", "drain_overdue")]
    assert told == events
    if action is DrainAction.WAIT:
        world.now += 500.0
        report(world)
        world.settle()
        assert [e.action for e in world.events].count("drain_overdue") == 1
        engine.in_flight = engine.stuck = 0
        report(world)
        world.settle()
        assert phase(world) is Phase.RELEASING


def test_an_abort_that_is_not_answered_ends_after_five_seconds() -> None:
    """CP7: abort, then RELEASING when zero or after 5 s more."""
    world = pool_of(1, drain_timeout_s=10.0)
    engine = world.engine("demo-1")
    engine.in_flight = 3
    world.turn()
    order_drain(world)
    world.settle()
    report(world)
    world.now += 10.5
    keep_heard(world)
    world.settle()
    assert (phase(world), world.workers["demo-1"].intent.abort_in_flight) == (Phase.FINISHING, True)
    assert world.plans[-1].wake_at is not None
    world.now += 5.0
    keep_heard(world)
    world.settle()
    assert phase(world) is Phase.RELEASING


def test_stop_that_takes_too_long_is_forced() -> None:
    """F34: RELEASING is bounded: grace, slack, then without grace."""
    world = pool_of(1, stop_grace_s=5.0)
    order_drain(world)
    world.settle()
    report(world)
    world.settle()
    assert phase(world) is Phase.RELEASING
    generation = world.workers["demo-1"].intent.generation
    world.now += 35.5
    keep_heard(world)
    world.settle()
    worker = world.workers["demo-1"]
    assert (worker.intent.kill, worker.intent.generation) == (True, generation + 1)
    assert "release_overdue" in world.actions("demo-1")


def test_undrain_until_releasing() -> None:
    """CP8: back to ACTIVE with a new generation; refused from RELEASING on."""
    world = pool_of(1)
    world.engine("demo-1").in_flight = 1
    world.turn()
    order_drain(world)
    world.turn(times=2)
    assert phase(world) is Phase.FINISHING
    generation = world.workers["demo-1"].intent.generation
    world.apply(orders.undrain_worker(world.snapshot(), "demo-1", world.now))
    assert world.states() == {"demo-1": "ACTIVE"}
    assert world.workers["demo-1"].intent.generation == generation + 1
    assert "drain_cancelled" in world.actions("demo-1")
    world.turn(times=3)
    assert world.states() == {"demo-1": "ACTIVE"}, "the loop does not undo it"
    assert world.engine("demo-1").phase is ReportedPhase.READY
    world.engine("demo-1").in_flight = 0
    world.turn()
    order_drain(world)
    world.turn()
    with pytest.raises(FailedPrecondition, match="RELEASING"):
        orders.undrain_worker(world.snapshot(), "demo-1", world.now)


def test_growing_cancels_a_drain_first() -> None:
    """Rule 3, scale-up order: a drain is cancelled before anything is started."""
    world = pool_of(2)
    for engine in world.nodes["n1"].engines.values():
        engine.in_flight = 2
    world.turn()
    world.set_intent("demo", manual_workers=1)
    world.turn(times=2)
    assert world.count(State.DRAINING) == 1
    world.set_intent("demo", manual_workers=2)
    world.turn()
    assert world.count(State.ACTIVE) == 2
    assert set(world.workers) == {"demo-1", "demo-2"}


def test_crash_while_draining_is_not_replaced() -> None:
    """CP7, F45."""
    world = pool_of(2)
    world.engine("demo-2").in_flight = 3
    world.turn()
    order_drain(world, "demo-2")
    world.turn()
    world.nodes["n1"].crash("demo-2")
    world.turn(times=5)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "INACTIVE"}
    assert phase(world, "demo-2") is Phase.FAILED


def test_one_that_crashed_twice_the_second_time_in_its_drain_holds_no_place() -> None:
    """CP7, F18, F45: it is no failed start with attempts left that never come; the pool starts again (seed 759)."""
    world = pool_of(1)
    world.nodes["n1"].crash("demo-1")
    world.turn(times=6)
    assert world.workers["demo-1"].intent.attempts == 1
    world.engine("demo-1").in_flight = 3
    world.set_intent("demo", manual_workers=0)
    world.turn()
    assert world.count(State.DRAINING) == 1
    world.nodes["n1"].crash("demo-1")
    world.turn(times=2)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 1


def test_victims() -> None:
    """F20, F21, PL10: overdue and failed starts, starts, SUSPECT, then least in-flight; ties by id."""
    world = pool_of(3)
    for worker_id, load in (("demo-1", 3), ("demo-2", 1), ("demo-3", 1)):
        world.engine(worker_id).in_flight = load
    world.set_intent("demo", manual_workers=4)
    world.nodes["n1"].never_ready = True
    world.turn(times=2)
    assert world.workers["demo-4"].state is State.STARTING
    order: list[str] = []
    for count in (3, 2, 1):
        if count == 2:
            world.engine("demo-3").probe_failures = 3
            world.turn()
        world.set_intent("demo", manual_workers=count)
        before = dict(world.states())
        world.turn()
        order += [
            w for w, state in world.states().items() if before[w] in ("ACTIVE", "STARTING") and state != before[w]
        ]
    assert order == ["demo-4", "demo-3", "demo-2"]


def test_last_that_can_serve_what_waits_stays() -> None:
    """Rule 3, F37: neither the last server nor a start without any server is taken while requests wait."""
    world = pool_of(1)
    world.demand["demo"] = PoolDemand(2)
    world.turn()
    world.set_intent("demo", manual_workers=0)
    world.turn(times=3)
    assert world.states() == {"demo-1": "ACTIVE"}
    world.demand["demo"] = PoolDemand(0)
    world.turn(times=4)
    assert world.states() == {"demo-1": "INACTIVE"}
    world.demand["demo"] = PoolDemand(2)
    world.nodes["n1"].never_ready = True
    world.set_intent("demo", manual_workers=1)
    world.turn(times=2)
    world.set_intent("demo", manual_workers=0)
    world.turn(times=2)
    assert world.states() == {"demo-1": "STARTING"}
