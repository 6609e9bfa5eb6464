"""Starts: phases, activation, deadlines, failures and their back-off (CP13, CP14, F19, F20, F45)."""

import itertools

import pytest

from controlplane.core import orders
from controlplane.core.snapshot import PoolDemand, Timing
from springtide.model.enums import DecisionResult, Phase, ReportedPhase, State
from springtide.model.pool import PolicySpec
from tests.controlplane.core.world import World


def test_from_request_to_routed() -> None:
    """CP1, CP2, NA7: each phase in turn; only ACTIVE is routed; one trace for the whole start."""
    world = World()
    world.add_pool()
    seen: list[tuple[str, str | None]] = []
    for _ in range(7):
        world.turn()
        worker = world.workers["demo-1"]
        seen.append((worker.state, worker.intent.phase))
        assert bool(world.routed()) == (worker.state is State.ACTIVE)
    phases = [phase for state, phase in dict.fromkeys(seen) if state is State.STARTING]
    assert phases == [Phase.REQUESTED, Phase.LOADING, Phase.WARMING]
    assert seen[-1] == (State.ACTIVE, None)
    assert [(e.action, e.status) for e in world.events if e.target == "demo-1"] == [
        ("scale_up_start", "scaling_up"),
        ("scale_up_complete", "active"),
    ]
    traces = {e.trace_id for e in world.events if e.target == "demo-1"}
    assert len(traces) == 1
    assert len(traces.pop()) == 32
    assert world.decisions[0].trace_id == world.events[-1].trace_id
    assert world.workers["demo-1"].intent.generation == 1


def test_stale_weights_are_not_activated() -> None:
    """CP19: READY with another weight version stays STARTING."""
    world = World()
    world.add_pool()
    world.set_intent("demo", weight_version="v2")
    world.turn(times=8)
    assert world.states() == {"demo-1": "STARTING"}


def test_start_timeout_frees_the_slice_only_when_the_node_says_so() -> None:
    """CP13, F34: INACTIVE/FAILED with STOP sent; the slice is free when the node reports STOPPED, then comes the
    retry."""
    world = World()
    world.add_pool(start_timeout_s=10.0)
    world.nodes["n1"].never_ready = True
    world.turn(times=10)
    assert world.states() == {"demo-1": "STARTING"}
    world.nodes["n1"].reachable = True
    world.heartbeats()
    world.settle()
    worker = world.workers["demo-1"]
    assert (worker.state, worker.intent.phase, worker.intent.reason) == (State.INACTIVE, Phase.FAILED, "START_TIMEOUT")
    assert list(worker.intent.gpu_ids) == ["0"]
    assert worker.intent.attempts == 1
    world.now += 0.5
    world.turn()
    assert not world.workers["demo-1"].intent.gpu_ids
    world.nodes["n1"].never_ready = False
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE"}


def test_a_start_that_does_not_stop_does_not_hold_the_place_for_ever() -> None:
    """Rule 1, F20: its slice stays reserved, another worker takes its place after the grace and some slack."""
    world = World(gpus=2)
    world.add_pool(start_timeout_s=5.0, stop_grace_s=5.0)
    world.nodes["n1"].never_ready = world.nodes["n1"].never_stops = True
    world.turn(times=30)
    assert world.states() == {"demo-1": "INACTIVE"}
    world.nodes["n1"].never_ready = False
    world.turn(times=20)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "ACTIVE"}
    assert list(world.workers["demo-1"].intent.gpu_ids) == ["0"]
    world.nodes["n1"].never_stops = False
    world.turn(times=3)
    assert not world.workers["demo-1"].intent.gpu_ids


def test_failed_starts_back_off_and_end() -> None:
    """CP14, F45: 1, 2, 4, 8 s on the same record, five attempts in all, then reported and left."""
    world = World(gpus=8)
    world.add_pool(max_start_attempts=5)
    world.nodes["n1"].fail_starts = True
    for _ in range(400):
        world.turn(0.1)
    starts = [event.at for event in world.events if event.action == "scale_up_start"]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert [round(gap) for gap in gaps] == [1, 2, 4, 8]
    assert set(world.workers) == {"demo-1"}, "back-off is not dodged by another record"
    assert world.pools["demo"].intent.conditions[0].startswith("START_ATTEMPTS_EXHAUSTED: demo-1 (ENGINE_EXITED)")
    replaced = [decision for decision in world.decisions if decision.result is DecisionResult.REPLACE]
    assert [decision.reason for decision in replaced] == ["ENGINE_EXITED"] * 4


def test_failed_start_gives_the_cooldown_back() -> None:
    """CP14, seed 0: a cooldown is stamped on success only."""
    world = World(gpus=8)
    world.add_pool(min_workers=0, max_start_attempts=1)
    world.turn(times=3)
    world.demand["demo"] = PoolDemand(3)
    world.nodes["n1"].fail_starts = True
    world.heartbeats()
    world.settle()
    assert world.pools["demo"].intent.last_scale_up_at == world.now
    world.turn(times=3)
    assert world.pools["demo"].intent.last_scale_up_at is None


def test_policy_grows_past_one_that_cannot_start() -> None:
    """Rule 1: one worker whose attempts ran out does not hold down a pool under load."""
    world = World(nodes=1, gpus=8)
    settings = {"min_stable_period": 0, "scale_up_cooldown": 0, "monitoring_interval": 1}
    world.add_pool(max_start_attempts=1, policy=PolicySpec("load_ratio", settings))
    world.turn(times=6)
    world.engine("demo-1").in_flight = 8
    world.nodes["n1"].fail_starts = True
    while "demo-2" not in world.workers or world.workers["demo-2"].intent.phase is not Phase.FAILED:
        world.turn(0.25)
    world.nodes["n1"].fail_starts = False
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "INACTIVE", "demo-3": "ACTIVE"}


def test_crash_is_replaced_at_once_and_a_crash_loop_backs_off() -> None:
    """F45, F18: the first retry is immediate, on the same record, with a REPLACE decision; soon after, it waits."""
    world = World()
    world.add_pool()
    world.turn(times=6)
    first = world.workers["demo-1"].observed.incarnation
    world.nodes["n1"].crash("demo-1")
    world.heartbeats()
    world.settle()
    assert world.workers["demo-1"].state is State.STARTING
    assert world.decisions[-1].result is DecisionResult.REPLACE or any(
        decision.result is DecisionResult.REPLACE and decision.reason == "ENGINE_KILLED" for decision in world.decisions
    )
    world.now += 1
    world.turn(times=5)
    assert world.workers["demo-1"].observed.incarnation > first
    assert world.routed() == ["demo-1"]
    for _ in range(3):
        world.nodes["n1"].crash("demo-1")
        world.turn(times=8)
    assert world.workers["demo-1"].intent.attempts == 4
    assert any(c.startswith("CRASH_LOOP: ") and "demo-1 (4 times" in c for c in world.pools["demo"].intent.conditions)
    world.turn(times=80)
    assert world.workers["demo-1"].intent.attempts == 0
    assert world.pools["demo"].intent.conditions == ()


def test_a_crash_loop_ends_when_its_attempts_do() -> None:
    """F45, DESIGN rule 2: an engine that becomes ready and dies soon after, again and again, is reported and left; an
    operator starts it again."""
    world = World()
    world.add_pool(max_start_attempts=4)
    world.turn(times=6)
    for _ in range(4):
        world.nodes["n1"].crash("demo-1")
        world.turn(times=12)
    worker = world.workers["demo-1"]
    assert (worker.state, worker.intent.attempts, worker.intent.next_attempt_at) == (State.INACTIVE, 4, None)
    codes = [condition.partition(":")[0] for condition in world.pools["demo"].intent.conditions]
    assert codes == ["START_ATTEMPTS_EXHAUSTED", "CRASH_LOOP"]
    starts = world.actions("demo-1").count("scale_up_start")
    world.turn(times=300)
    assert world.actions("demo-1").count("scale_up_start") == starts
    world.apply(orders.activate_worker(world.snapshot(), "demo-1", world.now))
    world.turn(times=8)
    assert world.routed() == ["demo-1"]
    assert world.pools["demo"].intent.conditions == ()


def test_cannot_place_is_said_and_heals() -> None:
    """NA14, SM10: too few GPUs is a condition with a reason per node; it goes when room appears."""
    world = World(gpus=1)
    world.add_pool(min_workers=2)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 1
    assert world.pools["demo"].intent.conditions == ("CANNOT_PLACE: n1: 0 of its 1 GPUs are free, 1 are needed",)
    quiet = world.revision
    for _ in range(3):
        world.turn(0.1)
    assert world.revision == quiet, "a standing condition is not written again"
    world.nodes["n1"].gpus = 2
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 2
    assert not world.pools["demo"].intent.conditions


def test_wait_for_room_is_given_up_when_nobody_asks_any_more() -> None:
    """A scale-up that found no room is not started later when the load has gone."""
    world = World(gpus=1)
    settings = {"min_stable_period": 0, "monitoring_interval": 1, "scale_up_cooldown": 0}
    world.add_pool(policy=PolicySpec("load_ratio", settings))
    world.turn(times=6)
    world.engine("demo-1").in_flight = 8
    world.turn(times=3)
    assert world.pools["demo"].intent.desired_workers == 2
    assert world.decisions[-1].reason == "CANNOT_PLACE"
    world.engine("demo-1").in_flight = 5
    world.turn(times=3)
    assert world.pools["demo"].intent.desired_workers == 1


def test_retry_prefers_another_node() -> None:
    """NA5: one bad node does not eat all attempts."""
    world = World(nodes=2, gpus=2)
    world.add_pool()
    world.nodes["n1"].fail_starts = True
    world.turn(times=8)
    assert world.workers["demo-1"].intent.node_id == "n2"
    assert world.states() == {"demo-1": "ACTIVE"}


@pytest.mark.parametrize("phase", [ReportedPhase.READY, ReportedPhase.FAILED])
def test_reports_of_the_engine_before_are_fenced(phase: ReportedPhase) -> None:
    """F15, F18: what the last engine's report says neither activates nor fails the next start."""
    world = World()
    world.add_pool()
    world.turn(times=6)
    old = world.engine("demo-1")
    world.nodes["n1"].crash("demo-1")
    world.turn()
    assert world.workers["demo-1"].state is State.STARTING
    old.phase, old.generation = phase, 1
    world.nodes["n1"].engines["demo-1"] = old
    world.hear(world.nodes["n1"])
    world.settle()
    assert world.workers["demo-1"].state is State.STARTING
    assert world.workers["demo-1"].intent.attempts == 1


def test_restart_of_the_agent_with_an_empty_ledger() -> None:
    """CP10: a node that reports without a worker does not have it."""
    world = World(timing=Timing())
    world.add_pool()
    world.turn(times=8)
    world.nodes["n1"].engines.clear()
    world.hear(world.nodes["n1"])
    world.settle()
    assert world.workers["demo-1"].state is State.STARTING
    assert any(event.reason == "NOT_ON_NODE" for event in world.events)
    world.now += 1
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE"}


def test_a_pool_that_is_deleted_and_made_again_at_once() -> None:
    """F15: what a node still says of the old pool's worker is not about the new one's: nothing fails."""
    world = World()
    world.add_pool()
    world.turn(times=6)
    spec = world.pools["demo"].spec
    world.apply(orders.delete_pool(world.snapshot(), "demo", world.now, drain_workers=True))
    world.turn(times=4)
    assert "demo" not in world.pools
    world.apply(orders.apply_pool(world.snapshot(), spec, world.now))
    world.turn(0.01)
    world.turn(times=6)
    assert world.states() == {"demo-2": "ACTIVE"}
    assert "worker_failed" not in world.actions()
