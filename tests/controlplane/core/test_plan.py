"""The waist itself: pure, repeatable, bounded, and it says when to look again."""

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core import policies
from controlplane.core.plan import plan
from controlplane.core.policies.static import Static
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.snapshot import Plan, PoolDemand, Put
from springtide.model.enums import DecisionResult, Phase, ReportedPhase, State
from springtide.model.pool import PolicySpec
from springtide.model.worker import Worker
from tests.controlplane.core.world import World


def running(desired: int = 1, gpus: int = 4, **spec: Any) -> World:
    world = World(gpus=gpus)
    world.add_pool(desired=desired, **spec)
    world.set_intent("demo", manual_workers=desired)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == desired
    return world


def workers_in(made: Plan) -> list[Worker]:
    return [write.record for write in made.writes if isinstance(write, Put) and isinstance(write.record, Worker)]


def test_the_same_snapshot_gives_the_same_plan_and_is_left_alone() -> None:
    """SM1: pure; even the trace ids follow from the records."""
    world = World(nodes=2)
    world.add_pool(desired=3)
    world.heartbeats()
    snapshot = world.snapshot()
    before = copy.deepcopy(snapshot)
    first, second = plan(snapshot, world.now), plan(snapshot, world.now)
    assert first == second
    assert snapshot == before
    traces = {worker.intent.traceparent for worker in workers_in(first)}
    assert len(traces) == 3
    assert all(len(trace) == 55 for trace in traces)


def test_a_plan_at_rest_writes_nothing() -> None:
    """Level-triggered: nothing new, nothing written, a wake-up at most one monitoring interval away."""
    world = running()
    world.turn()
    made = plan(world.snapshot(), world.now + 0.01)
    assert (made.writes, made.events, made.decisions) == ((), (), ())
    assert made.wake_at is not None
    assert world.now < made.wake_at <= world.now + 0.01 + world.timing.monitoring_interval_s


def test_large_changes_come_in_bounded_batches() -> None:
    """At most 100 operations a commit; the rest at once in the next ones."""
    world = World(nodes=8, gpus=32)
    world.add_pool(desired=250, max_workers=256)
    world.heartbeats()
    first = world.plan_once()
    assert 60 <= len(first.writes) + len(first.events) + len(first.decisions) <= 100
    assert first.wake_at == world.now
    world.settle()
    assert world.count(State.STARTING) == 250
    world.now += 1
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 250
    world.set_intent("demo", deleting=True)
    world.turn(times=6)
    assert not world.workers
    assert not world.pools


def test_timeline_of_a_scale_up() -> None:
    """Timeline vectors 5.3: start at 10.5 with a delay of 10 gives complete at 20.5, routable after it and not
    before."""
    world = World()
    world.add_pool(min_workers=0, desired=0)
    world.nodes["n1"].start_s = 10.0
    world.now = 10.0
    world.turn(0.5)
    world.set_intent("demo", manual_workers=1)
    world.settle()
    while world.now < 20.5:
        world.heartbeats()
        world.settle()
        assert world.routed() == []
        world.now += 0.5
    world.heartbeats()
    world.settle()
    assert world.routed() == ["demo-1"]
    log = [(e.at, e.action, e.target, e.status) for e in world.events if e.target == "demo-1"]
    assert log == [
        (10.5, "scale_up_start", "demo-1", "scaling_up"),
        (20.5, "scale_up_complete", "demo-1", "active"),
    ]


def test_from_zero_in_one_plan() -> None:
    """Rule 12, F37: the first waiting or refused request starts a worker, whatever window or cooldown says."""
    for demand in (PoolDemand(1), PoolDemand(0, rejected=1)):
        world = World()
        world.add_pool(min_workers=0, desired=0)
        world.turn(times=2)
        assert world.workers == {}
        world.set_intent("demo", last_scale_up_at=world.now, last_scale_down_at=world.now)
        world.demand["demo"] = demand
        world.evaluated_at["demo"] = world.now
        world.heartbeats()
        world.settle()
        assert world.states() == {"demo-1": "STARTING"}
        assert world.decisions[-1].reason == "FROM_ZERO"
        world.turn(times=20)
        assert world.count(State.STARTING, State.ACTIVE) == 1, "one request asks for one worker"


def test_start_is_kept_while_requests_wait_for_it() -> None:
    """F37: scaled from zero, the only start is not taken while it loads."""
    world = World()
    quick = {"min_stable_period": 0, "monitoring_interval": 1, "scale_down_cooldown": 0}
    world.add_pool(min_workers=0, desired=0, policy=PolicySpec("load_ratio", quick))
    world.turn(times=2)
    world.demand["demo"] = PoolDemand(1)
    world.nodes["n1"].start_s = 30.0
    world.turn(times=25)
    assert world.states() == {"demo-1": "STARTING"}


class Faulty(Static):
    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        raise RuntimeError("division by cucumber")


def test_a_name_that_means_another_policy_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PL13: what is kept of a policy is never used for another one of the same name and settings."""
    one, two = Faulty(), Faulty()
    monkeypatch.setattr(policies, "REGISTRY", {**policies.REGISTRY, "other": lambda raw, low, high: one})
    assert [policies.make_policy(PolicySpec("other"), 1, 2) for _ in range(2)] == [one, one]
    monkeypatch.setattr(policies, "REGISTRY", {**policies.REGISTRY, "other": lambda raw, low, high: two})
    assert [policies.make_policy(PolicySpec("other"), 1, 2) for _ in range(2)] == [two, two]


def test_a_policy_that_raises_holds_its_pool_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """PL13: the decision says why; others go on."""
    monkeypatch.setattr(policies, "REGISTRY", {**policies.REGISTRY, "faulty": lambda raw, low, high: Faulty()})
    world = World()
    world.add_pool("bad", policy=PolicySpec("faulty"))
    world.add_pool("demo")
    world.turn(times=8)
    assert world.count(State.ACTIVE, pool="bad") == world.count(State.ACTIVE, pool="demo") == 1
    (held,) = [decision for decision in world.decisions if decision.reason == "POLICY_FAILED"][-1:]
    assert held.result is DecisionResult.HOLD
    assert "division by cucumber" in held.message
    world.add_pool("gone", policy=PolicySpec("no_such_policy"))
    world.turn(times=8)
    assert world.count(State.ACTIVE, pool="gone") == 1
    assert any(d.reason == "POLICY_INVALID" and d.pool == "gone" for d in world.decisions)


def test_old_records_are_forgotten_and_ids_not_used_again() -> None:
    """Rule 10, 5.3: histories are bounded; a number is never given twice."""
    world = running(2, min_workers=1)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=5)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "ACTIVE"}
    world.now += world.timing.inactive_retention_s
    world.turn(times=2)
    assert set(world.workers) == {"demo-2"}
    world.set_intent("demo", manual_workers=2)
    world.turn(times=6)
    assert set(world.workers) == {"demo-2", "demo-3"}


def test_wake_ups_name_the_next_deadline() -> None:
    """Nothing polls: a deadline that comes before the next look is the wake-up."""
    world = World()
    world.add_pool(start_timeout_s=0.25)
    world.nodes["n1"].never_ready = True
    world.heartbeats()
    world.settle()
    assert world.plans[-1].wake_at == pytest.approx(world.now + 0.25)
    held = running()
    held.set_intent("demo", hold_until=held.now + 0.125)
    held.settle()
    assert held.plans[-1].wake_at == pytest.approx(held.now + 0.125)


LIVE = [phase for phase in ReportedPhase if phase not in (ReportedPhase.STOPPED, ReportedPhase.FAILED)]


def at_places() -> list[World]:
    """One worker ACTIVE, STARTING, DRAINING, INACTIVE with its slice held."""
    active = running()
    starting = World()
    starting.add_pool()
    starting.turn(times=3)
    draining = running(min_workers=0)
    draining.engine("demo-1").in_flight = 2
    draining.turn()
    draining.set_intent("demo", manual_workers=0)
    draining.turn(times=2)
    stopping = World()
    stopping.add_pool(start_timeout_s=3.0, min_workers=0, desired=1)
    stopping.set_intent("demo", manual_workers=1)
    stopping.nodes["n1"].never_ready = True
    stopping.turn(times=4)
    stopping.set_intent("demo", manual_workers=0)
    worlds = [active, starting, draining, stopping]
    states = [State.ACTIVE, State.STARTING, State.DRAINING, State.INACTIVE]
    assert [world.workers["demo-1"].state for world in worlds] == states
    assert worlds[3].workers["demo-1"].intent.gpu_ids
    return worlds


PLACES = at_places()


@settings(max_examples=60, deadline=None)
@given(
    world=st.sampled_from(PLACES),
    phase=st.sampled_from(LIVE),
    older=st.sampled_from(["incarnation", "generation"]),
    by=st.integers(1, 5),
)
def test_older_reports_move_nothing(world: World, phase: ReportedPhase, older: str, by: int) -> None:
    """CP12, F15: a report of an older incarnation or generation never changes a worker's state."""
    worker = world.workers["demo-1"]
    live = world.live_nodes["n1"]
    report = dataclasses.replace(live.reports["demo-1"], phase=phase, generation=worker.intent.generation, in_flight=0)
    if older == "incarnation":
        report = dataclasses.replace(report, incarnation=worker.observed.incarnation - by)
    else:
        report = dataclasses.replace(report, generation=worker.intent.generation - by)
    snapshot = world.snapshot()
    nodes = {"n1": dataclasses.replace(live, reports={"demo-1": report}, last_heard_at=world.now)}
    snapshot = dataclasses.replace(snapshot, live=dataclasses.replace(snapshot.live, nodes=nodes))
    for changed in workers_in(plan(snapshot, world.now)):
        assert (changed.intent.state, changed.intent.phase) == (worker.intent.state, worker.intent.phase)


@pytest.mark.parametrize("world", PLACES, ids=lambda world: str(world.workers["demo-1"].state))
@pytest.mark.parametrize("phase", [ReportedPhase.STOPPED, ReportedPhase.FAILED])
def test_an_end_is_always_learned(world: World, phase: ReportedPhase) -> None:
    """CP12, NA11: of the present incarnation, also when the node has not acted on the last order."""
    worker = world.workers["demo-1"]
    live = world.live_nodes["n1"]
    report = dataclasses.replace(
        live.reports["demo-1"], phase=phase, generation=worker.intent.generation - 1, incarnation=1 << 50
    )
    snapshot = world.snapshot()
    nodes = {"n1": dataclasses.replace(live, reports={"demo-1": report}, last_heard_at=world.now)}
    snapshot = dataclasses.replace(snapshot, live=dataclasses.replace(snapshot.live, nodes=nodes))
    (ended,) = [
        w.record for w in plan(snapshot, world.now).writes if isinstance(w, Put) and isinstance(w.record, Worker)
    ]
    assert isinstance(ended, Worker)
    if ended.state is State.STARTING:
        assert ended.intent.generation > worker.intent.generation, "it is started anew at once"
    else:
        assert ended.state is State.INACTIVE
        assert ended.intent.phase in (Phase.STOPPED, Phase.FAILED)
        assert not ended.intent.gpu_ids


def test_a_node_that_is_ahead_of_the_records_is_caught_up_with() -> None:
    """CP10: a store that was restored from a backup has older generations than its agents, which would refuse every
    order."""
    world = running(min_workers=0)
    world.engine("demo-1").generation = 9
    world.turn(times=2)
    assert world.workers["demo-1"].intent.generation == 10
    assert world.engine("demo-1").generation == 10
    world.set_intent("demo", manual_workers=0)
    world.turn(times=5)
    assert world.states() == {"demo-1": "INACTIVE"}
    assert not world.workers["demo-1"].intent.gpu_ids
