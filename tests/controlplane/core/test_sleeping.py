"""Sleeping workers in the pure core: drains that end asleep, wakes before starts, time-outs, spares, loans, weights."""

import dataclasses
from typing import Any

import pytest

from controlplane.core import orders
from controlplane.core.desired import desired_workers
from controlplane.core.worker import Cause, IllegalEdge, can, order_of, step
from springtide.errors import FailedPrecondition, InvalidArgument, Unimplemented
from springtide.model.enums import Admission, Phase, ReportedPhase, ScaleDown, State, Want
from springtide.model.worker import Worker, WorkerIntent
from tests.controlplane.core.world import World

SLICE: dict[str, Any] = {"node_id": "n1", "gpu_ids": ("0",), "deadline": 900.0}


def world_of(active: int, *, gpus: int = 4, nodes: int = 1, **spec: Any) -> World:
    world = World(gpus=gpus, nodes=nodes)
    fields = {"min_workers": 0, "scale_down": ScaleDown.SLEEP, **spec}
    world.add_pool(desired=active, **fields)
    world.set_intent("demo", manual_workers=active)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == active
    return world


def scale(world: World, workers: int, pool: str = "demo", times: int = 8) -> None:
    world.set_intent(pool, manual_workers=workers)
    world.turn(times=times)


def place(world: World, worker_id: str = "demo-1") -> tuple[State, Phase | None]:
    intent = world.workers[worker_id].intent
    return intent.state, intent.phase


ASLEEP = (State.INACTIVE, Phase.SLEEPING)


def test_edges_of_sleep() -> None:
    """CP1: asleep only on the order to sleep; the slice is kept; a sleeper is retired, woken or lost, never started."""
    new = Worker("demo-1", "demo", WorkerIntent())
    active = step(step(new, Cause.START, 1.0, **SLICE), Cause.READY, 2.0)
    draining = step(active, Cause.DRAIN, 3.0, sleep_level=1)
    assert order_of(draining.intent).want is Want.DRAIN
    releasing = step(step(draining, Cause.UNROUTED, 4.0), Cause.RELEASE, 5.0)
    assert order_of(releasing.intent).want is Want.SLEEP
    asleep = step(releasing, Cause.SLEPT, 6.0)
    assert (asleep.intent.gpu_ids, asleep.asleep) == (("0",), True)
    assert asleep.intent.generation == releasing.intent.generation  # the order is the same
    for cause in (Cause.START, Cause.DRAIN, Cause.FREE, Cause.READY):
        assert not can(asleep, cause)
    woken = step(asleep, Cause.WAKE, 7.0)
    assert order_of(woken.intent).want is Want.RUN
    assert not can(woken, Cause.SLEPT)  # an old word of the node
    assert step(woken, Cause.DOZE, 8.0).asleep
    stopping = step(step(step(active, Cause.DRAIN, 3.0), Cause.UNROUTED, 4.0), Cause.RELEASE, 5.0)
    assert order_of(stopping.intent).want is Want.STOP
    with pytest.raises(IllegalEdge, match="not to sleep"):
        step(stopping, Cause.SLEPT, 6.0)
    assert order_of(step(releasing, Cause.ESCALATE, 6.0).intent).want is Want.STOP


def test_a_worker_taken_out_sleeps_and_is_woken_before_any_start() -> None:
    """CP4 (rule 3), NA8: memory released, process kept, slice held; the wake keeps engine and incarnation."""
    world = world_of(2)
    incarnation = world.engine("demo-2").incarnation
    scale(world, 1)
    asleep = [worker_id for worker_id in ("demo-1", "demo-2") if place(world, worker_id) == ASLEEP]
    assert len(asleep) == 1
    worker = world.workers[asleep[0]]
    assert (worker.observed.freed_bytes, len(worker.intent.gpu_ids)) == (1 << 30, 1)
    assert "scale_down_complete" in world.actions(asleep[0])
    scale(world, 2)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "ACTIVE"}
    assert world.engine("demo-2").incarnation == incarnation
    assert world.pools["demo"].intent.next_worker_number == 3
    scale(world, 0)
    assert [place(world, worker_id) for worker_id in ("demo-1", "demo-2")] == [ASLEEP, ASLEEP]
    scale(world, 3)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "ACTIVE", "demo-3": "ACTIVE"}


def test_stop_is_the_default() -> None:
    world = world_of(1, scale_down=ScaleDown.STOP)
    scale(world, 0)
    assert place(world) == (State.INACTIVE, Phase.STOPPED)


def test_a_sleeper_is_stopped_after_its_time() -> None:
    world = world_of(1, scale_down=ScaleDown.SLEEP_THEN_STOP, sleep_stop_after_s=100.0)
    scale(world, 0)
    assert place(world) == ASLEEP
    slept_at = world.workers["demo-1"].intent.phase_since
    plan = world.plan_once()
    assert plan.wake_at is not None
    assert plan.wake_at <= slept_at + 100.0
    world.turn(seconds=20.0, times=8)
    assert place(world) == (State.INACTIVE, Phase.STOPPED)
    assert world.workers["demo-1"].intent.reason == "SLEPT_LONG"
    assert world.free("n1") == ("0", "1", "2", "3")


@pytest.mark.parametrize("cause", ["deletion", "node", "setting", "launch"])
def test_what_ends_a_sleep(cause: str) -> None:
    """A pool's deletion, its node's end, `stop` instead of `sleep`, another launch: the sleeper is stopped."""
    world = world_of(1)
    scale(world, 0)
    assert place(world) == ASLEEP
    spec = world.pools["demo"].spec
    if cause == "deletion":
        world.apply(orders.delete_pool(world.snapshot(), "demo", world.now))
    elif cause == "node":
        world.nodes["n1"].stopping = True
    elif cause == "setting":
        changed = dataclasses.replace(spec, scale_down=ScaleDown.STOP)
        world.apply(orders.apply_pool(world.snapshot(), changed, world.now))
    else:
        changed = dataclasses.replace(spec, engine_args=("--seed", "1"))
        world.apply(orders.apply_pool(world.snapshot(), changed, world.now))
    world.turn(times=4)
    if cause == "deletion":
        assert not world.pools
        assert not world.workers
    else:
        assert place(world) == (State.INACTIVE, Phase.STOPPED)
    assert world.engine_phase("demo-1") is ReportedPhase.STOPPED


def test_a_release_that_frees_nothing_is_a_stop_with_a_reason() -> None:
    """NA8."""
    world = world_of(1)
    world.nodes["n1"].sleeps = False
    scale(world, 0)
    assert place(world) == (State.INACTIVE, Phase.STOPPED)
    assert world.workers["demo-1"].intent.reason == "RELEASE_FREED_NOTHING"
    assert world.workers["demo-1"].intent.gpu_ids == ()


def test_an_engine_that_cannot_sleep_is_stopped_and_the_pool_says_so() -> None:
    """NA9: known before it is tried."""
    world = World(gpus=4)
    world.nodes["n1"].missing_verbs = {"release": "--enable-sleep-mode", "update_weights": "VLLM_SERVER_DEV_MODE=1"}
    world.add_pool(min_workers=1, scale_down=ScaleDown.SLEEP)
    world.turn(times=6)
    (condition,) = world.pools["demo"].intent.conditions
    assert condition.startswith("CANNOT_SLEEP")
    assert "--enable-sleep-mode" in condition
    with pytest.raises(Unimplemented, match="--enable-sleep-mode"):
        orders.sleep_worker(world.snapshot(), "demo-1", world.now)
    with pytest.raises(Unimplemented, match="VLLM_SERVER_DEV_MODE=1"):
        orders.set_weights(world.snapshot(), "demo", world.now, version="v1", source="/w")
    world.set_intent("demo", manual_workers=1)
    world.apply(orders.drain_worker(world.snapshot(), "demo-1", world.now))
    world.turn(times=6)
    assert place(world) == (State.INACTIVE, Phase.STOPPED)


def test_a_sleep_that_takes_too_long_becomes_a_kill() -> None:
    world = world_of(1)
    world.engine("demo-1").phase = ReportedPhase.READY
    scale(world, 0, times=2)
    engine = world.engine("demo-1")
    for _ in range(60):
        if engine.phase is ReportedPhase.SLEEPING:
            engine.phase = ReportedPhase.DRAINING  # it never gets there
        world.heartbeats()
        if engine.phase is ReportedPhase.SLEEPING:
            engine.phase = ReportedPhase.DRAINING
            world.hear(world.nodes["n1"])
        world.settle()
        world.now += 5.0
    assert place(world) == (State.INACTIVE, Phase.STOPPED)
    assert "release_overdue" in world.actions("demo-1")


def test_a_crash_in_its_sleep_is_noticed_and_holds_no_place() -> None:
    """F5: the slice is free; the pool starts another when it needs one, at once."""
    world = world_of(1)
    scale(world, 0)
    world.nodes["n1"].crash("demo-1")
    world.turn(times=2)
    assert place(world) == (State.INACTIVE, Phase.FAILED)
    assert world.workers["demo-1"].intent.reason == "ENGINE_KILLED"
    assert world.free("n1") == ("0", "1", "2", "3")
    scale(world, 1)
    assert world.count(State.ACTIVE) == 1


def test_a_wake_that_is_not_wanted_any_more_sleeps_again() -> None:
    world = world_of(1)
    scale(world, 0)
    world.set_intent("demo", manual_workers=1)
    world.settle()
    assert world.workers["demo-1"].intent.waking
    world.set_intent("demo", manual_workers=0)
    world.settle()
    assert place(world) == ASLEEP
    world.turn(times=4)
    assert place(world) == ASLEEP
    assert world.engine_phase("demo-1") is ReportedPhase.SLEEPING


def test_a_silent_node_does_not_lose_its_sleepers() -> None:
    """F13: it serves nobody; when the node is back, it is as asleep as before."""
    world = world_of(1)
    scale(world, 0)
    world.nodes["n1"].reachable = False
    world.turn(seconds=5.0, times=30)
    assert place(world) == ASLEEP
    world.set_intent("demo", manual_workers=1)
    world.turn()
    assert place(world) == ASLEEP  # nobody there to wake it
    world.nodes["n1"].reachable = True
    world.turn(times=6)
    assert place(world) == (State.ACTIVE, None)


def test_a_pool_goes_although_its_sleepers_node_is_lost() -> None:
    """Nobody can stop it there; when the node comes back, an engine without a record is stopped."""
    world = world_of(1)
    scale(world, 0)
    world.nodes["n1"].reachable = False
    world.turn(seconds=5.0, times=8)
    world.apply(orders.delete_pool(world.snapshot(), "demo", world.now))
    world.turn(times=3)
    assert not world.pools
    world.nodes["n1"].reachable = True
    world.turn(times=4)
    assert world.engine_phase("demo-1") is ReportedPhase.STOPPED


def test_what_slept_for_long_is_not_forgotten_when_its_agent_is_started_again() -> None:
    """F13: its retention begins when it is lost, not when it fell asleep."""
    world = world_of(1)
    scale(world, 0)
    world.turn(seconds=world.timing.inactive_retention_s / 2, times=3)
    world.nodes["n1"].goodbye = True
    world.turn()
    assert place(world)[1] is Phase.LOST
    world.nodes["n1"].goodbye = False
    world.turn(times=2)
    assert place(world) == ASLEEP
    assert world.engine_phase("demo-1") is ReportedPhase.SLEEPING


def test_operators_put_to_sleep_and_wake() -> None:
    """NA8: repeated calls are no-ops; the loop does not wake what an operator put to sleep."""
    world = world_of(2, scale_down=ScaleDown.STOP)
    world.set_intent("demo", manual_workers=None, desired_workers=2)
    world.apply(orders.sleep_worker(world.snapshot(), "demo-1", world.now))
    world.turn(times=6)
    assert place(world) == ASLEEP
    assert not orders.sleep_worker(world.snapshot(), "demo-1", world.now).writes
    world.apply(orders.activate_worker(world.snapshot(), "demo-1", world.now))
    world.turn(times=6)
    assert place(world) == (State.ACTIVE, None)
    with pytest.raises(FailedPrecondition):
        orders.sleep_worker(world.snapshot(), "demo-1", world.now) and orders.lend_worker(
            world.snapshot(), "demo-1", world.now, to="a job"
        )


# ------------------------------------------------------------------ spares


def test_spares_are_kept_asleep_and_serve_at_once() -> None:
    """Beside what scaling wants: started, put to sleep, woken for demand, and another takes the place."""
    world = world_of(1, scale_down=ScaleDown.STOP, spares=1)
    world.turn(times=4)
    assert (place(world, "demo-1"), place(world, "demo-2")) == ((State.ACTIVE, None), ASLEEP)
    assert "spare_ready" in world.actions("demo-2")
    assert world.pools["demo"].intent.desired_workers == 1
    world.set_intent("demo", manual_workers=2)
    world.turn()
    assert world.workers["demo-2"].intent.waking
    world.turn(times=8)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "ACTIVE", "demo-3": "INACTIVE"}
    assert place(world, "demo-3") == ASLEEP
    scale(world, 1)
    assert world.count(State.ACTIVE) == 1
    assert sum(worker.asleep for worker in world.workers.values()) == 1  # what is taken out is stopped


def test_a_coming_spare_serves_when_it_is_needed() -> None:
    world = world_of(1, gpus=2, scale_down=ScaleDown.STOP, spares=0)
    world.nodes["n1"].start_s = 20.0
    spec = dataclasses.replace(world.pools["demo"].spec, spares=1)
    world.apply(orders.apply_pool(world.snapshot(), spec, world.now))
    world.turn(times=3)
    assert world.workers["demo-2"].intent.spare
    world.set_intent("demo", manual_workers=2)
    world.turn(times=25)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "ACTIVE"}
    assert any(text.startswith("CANNOT_KEEP_SPARES") for text in world.pools["demo"].intent.conditions)


def test_a_spare_that_cannot_start_does_not_start_others() -> None:
    world = world_of(1, scale_down=ScaleDown.STOP)
    world.nodes["n1"].fail_starts = True
    spec = dataclasses.replace(world.pools["demo"].spec, spares=2, max_start_attempts=2)
    world.apply(orders.apply_pool(world.snapshot(), spec, world.now))
    world.turn(times=20)
    assert len(world.workers) <= 3
    assert world.count(State.ACTIVE) == 1


# ------------------------------------------------------------------ loans


def lending() -> World:
    """A pool asleep on the node's only GPU, and another that borrows it."""
    world = world_of(1, gpus=1, lend_gpus=True)
    scale(world, 0)
    world.add_pool("other", desired=1, min_workers=1)
    world.turn(times=6)
    return world


def test_gpus_of_a_sleeper_are_lent_to_another_pool_and_claimed_back() -> None:
    """RL8, CP2: the borrower drains and stops before the owner wakes; never two that are awake on one GPU."""
    world = lending()
    assert place(world, "other-1") == (State.ACTIVE, None)
    assert world.workers["other-1"].intent.gpu_ids == world.workers["demo-1"].intent.gpu_ids
    world.engine("other-1").in_flight = 1
    world.set_intent("demo", manual_workers=1)
    world.turn(times=4)
    assert place(world, "other-1")[0] is State.DRAINING
    assert world.workers["other-1"].intent.reason == "GPU_RECLAIMED"
    assert world.engine_phase("demo-1") is ReportedPhase.SLEEPING
    world.engine("other-1").in_flight = 0
    world.turn(times=8)
    assert place(world, "demo-1") == (State.ACTIVE, None)
    assert world.workers["other-1"].intent.phase in (Phase.STOPPED, Phase.FAILED)
    (condition,) = world.pools["other"].intent.conditions
    assert condition.startswith("CANNOT_PLACE")


def test_a_borrower_is_stopped_and_not_put_to_sleep() -> None:
    world = lending()
    spec = dataclasses.replace(world.pools["other"].spec, scale_down=ScaleDown.SLEEP, min_workers=0)
    world.apply(orders.apply_pool(world.snapshot(), spec, world.now))
    scale(world, 0, "other")
    assert place(world, "other-1") == (State.INACTIVE, Phase.STOPPED)
    assert "borrowed" in world.events_text("other-1") or place(world, "demo-1") == ASLEEP


def test_nothing_is_lent_without_the_setting_and_free_gpus_go_first() -> None:
    world = world_of(1, gpus=1)
    scale(world, 0)
    world.add_pool("other", desired=1, min_workers=1)
    world.turn(times=4)
    assert world.count(State.ACTIVE, pool="other") == 0
    roomy = world_of(1, gpus=2, lend_gpus=True)
    scale(roomy, 0)
    roomy.add_pool("other", desired=1, min_workers=1)
    roomy.turn(times=6)
    assert roomy.workers["other-1"].intent.gpu_ids != roomy.workers["demo-1"].intent.gpu_ids


def out_of_sight(world: World) -> None:
    """The agent says goodbye and leaves its engines, so that both are LOST; then it is there again."""
    world.nodes["n1"].goodbye = True
    world.turn(times=2)
    assert {worker.intent.phase for worker in world.workers.values()} == {Phase.LOST}
    world.nodes["n1"].goodbye = False


def test_a_lender_that_was_lost_sleeps_on_beside_its_borrower() -> None:
    """F13, RL8, CP2: it is not adopted as one that serves, which its node could never do while the GPU is lent.
    (Swarm, seed 9024.)"""
    world = lending()
    out_of_sight(world)
    world.engine("demo-1").phase = ReportedPhase.ADOPTING  # its agent was started again, too
    world.turn()
    assert place(world)[1] is Phase.LOST
    world.engine("demo-1").phase = ReportedPhase.SLEEPING
    world.turn(times=4)
    assert place(world) == ASLEEP
    assert place(world, "other-1") == (State.ACTIVE, None)
    assert "sleeper_back" in world.actions("demo-1")


def test_a_lender_that_was_lost_claims_its_gpus_when_it_is_wanted() -> None:
    """F13, RL8: woken as any sleeper is; the borrower, lost as well, is not adopted on what is claimed."""
    world = lending()
    out_of_sight(world)
    world.set_intent("demo", manual_workers=1)
    incarnation = world.engine("demo-1").incarnation
    world.turn(times=8)
    assert place(world) == (State.ACTIVE, None)
    assert world.engine("demo-1").incarnation == incarnation
    assert world.workers["other-1"].state is State.INACTIVE
    assert not any(action == "worker_failed" for action in world.actions("demo-1"))


def test_a_lender_is_stopped_in_its_sleep_and_its_borrower_serves_on() -> None:
    """RL8: the GPU is free when both are gone, and not before. (Swarm, seed 5042.)"""
    world = lending()
    spec = dataclasses.replace(world.pools["demo"].spec, scale_down=ScaleDown.STOP)
    world.apply(orders.apply_pool(world.snapshot(), spec, world.now))
    world.turn(times=4)
    assert place(world) == (State.INACTIVE, Phase.STOPPED)
    assert place(world, "other-1") == (State.ACTIVE, None)
    assert world.free("n1") == ()
    world.set_intent("demo", manual_workers=1)
    world.turn(times=3)
    assert place(world, "other-1") == (State.ACTIVE, None), "what was stopped claims nothing"
    spec = dataclasses.replace(world.pools["other"].spec, min_workers=0)
    world.apply(orders.apply_pool(world.snapshot(), spec, world.now))
    scale(world, 0, "other")
    world.turn(times=4)
    assert place(world) == (State.ACTIVE, None)


def test_a_loan_to_a_job_outside() -> None:
    """RL8: neither woken nor given to anybody, not even after its engine's end, until it is claimed back."""
    world = world_of(1, gpus=1, lend_gpus=True)
    with pytest.raises(FailedPrecondition, match="only a sleeping worker"):
        orders.lend_worker(world.snapshot(), "demo-1", world.now, to="train")
    scale(world, 0)
    with pytest.raises(InvalidArgument, match="names nobody"):
        orders.lend_worker(world.snapshot(), "demo-1", world.now, to=" ")
    world.apply(orders.lend_worker(world.snapshot(), "demo-1", world.now, to="train"))
    assert not orders.lend_worker(world.snapshot(), "demo-1", world.now, to="train").writes
    world.add_pool("other", desired=1, min_workers=1)
    scale(world, 1, times=4)
    assert place(world) == ASLEEP
    assert world.count(State.ACTIVE, State.STARTING, pool="other") == 0
    with pytest.raises(FailedPrecondition, match="lent to train"):
        orders.activate_worker(world.snapshot(), "demo-1", world.now)
    world.nodes["n1"].crash("demo-1")
    world.turn(times=3)
    assert place(world) == (State.INACTIVE, Phase.FAILED)
    assert world.workers["demo-1"].intent.gpu_ids == ("0",)
    assert world.count(State.ACTIVE, State.STARTING, pool="other") == 0
    world.apply(orders.reclaim_worker(world.snapshot(), "demo-1", world.now))
    world.turn(times=6)
    assert world.count(State.ACTIVE) + world.count(State.ACTIVE, pool="other") == 1


# ------------------------------------------------------------------ weights


def weights(world: World, version: str, *, barrier: bool = False) -> None:
    plan = orders.set_weights(
        world.snapshot(), "demo", world.now, version=version, source=f"/w/{version}", barrier=barrier
    )
    world.apply(plan)


def test_one_worker_after_the_other_changes_weights() -> None:
    """RL4, CP19: the pool keeps serving; each is closed, updated and opened."""
    world = world_of(3)
    weights(world, "v1")
    least = 3
    for _ in range(20):
        world.turn()
        least = min(least, len(world.routed()))
        assert sum(w.intent.admission is Admission.PAUSED for w in world.workers.values()) <= 1
    assert least == 2
    assert {w.observed.weight_version for w in world.workers.values()} == {"v1"}
    assert len(world.routed()) == 3
    assert world.actions("demo-1").count("weights_complete") == 1


def test_a_barrier_lets_nobody_serve_old_weights() -> None:
    """CP19: from the order on."""
    world = world_of(3)
    weights(world, "v1", barrier=True)
    world.settle()
    assert world.routed() == []
    world.turn(times=4)
    assert len(world.routed()) == 3


def test_more_at_a_time_when_told_so_but_never_all() -> None:
    world = world_of(3, max_weight_updates=8)
    weights(world, "v1")
    world.settle()
    assert len(world.routed()) == 1
    single = world_of(1)
    weights(single, "v1")
    single.turn(times=4)
    assert single.workers["demo-1"].observed.weight_version == "v1"


def test_a_new_worker_joins_only_with_the_current_version() -> None:
    """CP19: one that starts is told of the change, one that sleeps learns it when it wakes."""
    world = world_of(1)
    weights(world, "v1")
    world.turn(times=4)
    world.set_intent("demo", manual_workers=2)
    world.turn(times=2)
    weights(world, "v2")
    world.turn(times=12)
    assert {w.observed.weight_version for w in world.workers.values()} == {"v2"}
    assert world.count(State.ACTIVE) == 2
    scale(world, 1)
    weights(world, "v3")
    world.turn(times=6)
    scale(world, 2)
    assert {w.observed.weight_version for w in world.workers.values() if w.state is State.ACTIVE} == {"v3"}


def test_what_runs_is_cut_at_the_drain_timeout_and_a_worker_that_never_gets_there_is_replaced() -> None:
    world = world_of(1, drain_timeout_s=10.0, start_timeout_s=60.0)
    world.engine("demo-1").in_flight = 1
    weights(world, "v1")
    world.turn(times=5)
    (order,) = desired_workers(world.snapshot(), "n1")
    assert (order.want, order.paused, order.abort_in_flight) == (Want.RUN, True, False)
    assert (order.weight_version, order.weight_source) == ("v1", "/w/v1")
    for _ in range(8):
        world.engine("demo-1").in_flight = 1
        world.turn(seconds=2.0)
    (order,) = desired_workers(world.snapshot(), "n1")
    assert order.abort_in_flight
    for _ in range(40):
        engine = world.nodes["n1"].engines["demo-1"]
        if engine.weight_version:
            break
        if engine.phase is ReportedPhase.PAUSED:
            engine.in_flight = 1  # it hangs
        world.turn(seconds=2.0)
    assert "WEIGHTS_TIMEOUT" in [event.reason for event in world.events if event.target == "demo-1"]
    world.turn(times=8)
    assert world.workers["demo-1"].observed.weight_version == "v1"


def test_weights_are_checked() -> None:
    world = world_of(1)
    for version, source in (("", "/w"), ("v1", ""), ("v1", "/w\n"), (" v1", "/w")):
        with pytest.raises(InvalidArgument):
            orders.set_weights(world.snapshot(), "demo", world.now, version=version, source=source)
    weights(world, "v1")
    assert not orders.set_weights(world.snapshot(), "demo", world.now, version="v1", source="/w/v1").writes


def test_an_operators_pause_is_kept_while_weights_change() -> None:
    """NA9: recorded, so that no process's end undoes it."""
    world = world_of(2)
    world.apply(orders.pause_worker(world.snapshot(), "demo-1", world.now))
    weights(world, "v1")
    world.turn(times=12)
    assert {w.observed.weight_version for w in world.workers.values()} == {"v1"}
    assert world.routed() == ["demo-2"]
    world.apply(orders.resume_worker(world.snapshot(), "demo-1", world.now))
    assert world.routed() == ["demo-1", "demo-2"]
