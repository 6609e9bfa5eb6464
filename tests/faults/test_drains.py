"""Drains and scaling under load, at their edges: deadlines shorter than the streams, turns at every phase, churn.

CP2 CP4 CP6 CP7 CP8 PL10 NA1 RT4 RT9, F1 F2 F3 F4 F21 F25 F35 F41 F45.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import grpc
import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.faults.blows import ENGINE, LIVE, FaultStack, check_outcome, wait_for
from tests.system import load
from tests.system.load import Report, Result
from tests.system.trace import Arrival

ABORT, WAIT, KILL = t.DRAIN_ACTION_ABORT, t.DRAIN_ACTION_WAIT, t.DRAIN_ACTION_KILL


def _drain(stack: FaultStack, worker_id: str) -> None:
    stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id=worker_id), timeout=5)


async def _streams(stack: FaultStack, count: int, tokens: int, blow: "asyncio.Future[None] | None" = None) -> Report:
    def send(arrival: Arrival) -> "asyncio.Task[Result]":
        return asyncio.ensure_future(load.ask(stack.http, "demo", arrival, salt="drain", timeout_s=60))

    report = await load.replay([Arrival(n, 0.005 * n, 20, tokens) for n in range(count)], send)
    for result in report.results:
        check_outcome(result)
    return report


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("action", [ABORT, WAIT, KILL], ids=["abort", "wait", "kill"])
def test_a_deadline_shorter_than_the_streams(stack: FaultStack, action: "t.DrainAction.ValueType") -> None:
    """64 streams of three seconds, a drain of one: cut explicitly or waited for, as the pool says; never in silence."""
    stack.pool(workers=2, drain_timeout_s=1.0, drain_action=action)
    victim = stack.workers("ACTIVE")[0].worker_id

    async def run() -> Report:
        storm = asyncio.ensure_future(_streams(stack, 64, 300))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(_drain, stack, victim)
        return await storm

    report = uvloop.run(run())
    assert len(report.results) == 64
    if action == WAIT:
        assert not report.failed, report.explain()
        assert "drain_overdue" in stack.actions(victim)
    else:
        for result in report.failed:
            assert result.error, result
            assert result.text, f"a stream without a token is retried elsewhere: {result}"
    assert len(report.failed) <= 40, report.explain()
    stack.check_whole(active=2)
    assert "scale_down_complete" in stack.actions(victim)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_turned_back_at_every_phase(stack: FaultStack) -> None:
    """Undrain in UNROUTING and FINISHING keeps engine and streams; in RELEASING it is refused. Cancel in each phase of
    a start leaves nothing behind."""
    stack.pool(workers=1, min_workers=0, initial_workers=1, stop_grace_s=2.0)
    stack.operator.PausePool(cp.PausePoolRequest(pool="demo"), timeout=5)
    worker = stack.workers("ACTIVE")[0]
    engine = stack.engine_process(worker.worker_id)

    def undrain() -> None:
        stack.operator.UndrainWorker(cp.UndrainWorkerRequest(worker_id=worker.worker_id), timeout=5)

    async def run() -> Report:
        storm = asyncio.ensure_future(_streams(stack, 16, 300))
        await asyncio.sleep(0.3)
        for pause in (0.0, 0.02, 0.1, 0.3, 0.6):
            await asyncio.to_thread(_drain, stack, worker.worker_id)
            await asyncio.sleep(pause)
            await asyncio.to_thread(undrain)
            await asyncio.sleep(0.1)
        return await storm

    report = uvloop.run(run())
    assert not report.failed, report.explain()
    stack.check_whole(active=1)
    assert engine.is_running()
    _drain(stack, worker.worker_id)
    phase = wait_for("its release", lambda: stack.by_id()[worker.worker_id].phase in (9, 11), 10, 0.005)
    assert phase
    with pytest.raises(grpc.RpcError) as refusal:
        undrain()
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    stack.check_whole(active=0)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_cancelled_in_each_phase_of_a_start(stack: FaultStack) -> None:
    slow = ("--startup-s", "0.6", "--decode-base-ms", "500", "--max-num-seqs", "64")
    stack.pool(workers=0, wait=False, min_workers=0, initial_workers=1, engine_args=slow, stop_grace_s=2.0)
    stack.operator.PausePool(cp.PausePoolRequest(pool="demo"), timeout=5)
    seen = []
    for phase in (t.WORKER_PHASE_REQUESTED, t.WORKER_PHASE_BOOTING, t.WORKER_PHASE_LOADING, t.WORKER_PHASE_WARMING):
        starting = wait_for("a start", _starting_at(stack, phase), 15, 0.005)[0]
        seen.append(starting.phase)
        stack.operator.CancelWorker(cp.CancelWorkerRequest(worker_id=starting.worker_id), timeout=5)
        stack.check_whole(active=0)
        assert not [e for e in stack.events() if e.action == "worker_failed"]
        wait_for("a free slice", partial(_slice_is_free, stack, starting.worker_id), 15)
        stack.operator.ActivateWorker(cp.ActivateWorkerRequest(worker_id=starting.worker_id), timeout=5)
    assert len(set(seen)) >= 3, seen
    # Cordoned while it starts: it finishes its start, nothing new comes there.
    stack.operator.CordonNode(cp.CordonNodeRequest(node_id="node-a"), timeout=5)
    stack.wait_workers("ACTIVE", 1)
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=2), timeout=5)
    wait_for("the reason", lambda: "cordoned" in str(stack.status().pools[0].status.conditions), 10)
    stack.operator.UncordonNode(cp.UncordonNodeRequest(node_id="node-a"), timeout=5)
    stack.check_whole(active=2)


def _slice_is_free(stack: FaultStack, worker_id: str) -> bool:
    return not stack.by_id()[worker_id].gpu_ids


def _starting_at(stack: FaultStack, phase: int) -> Callable[[], list[t.Worker]]:
    return lambda: [w for w in stack.workers("STARTING") if w.phase >= phase]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_churn(stack: FaultStack) -> None:
    """A new target every 200 ms for twelve seconds, under load: bounds, disjoint GPUs, one engine each, always."""
    rng = random.Random(7)
    stack.pool(workers=1, stop_grace_s=2.0, drain_timeout_s=10.0)
    wrong: list[str] = []

    def churn() -> None:
        end = time.monotonic() + 12
        while time.monotonic() < end:
            stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=rng.randint(1, 4)), timeout=5)
            live = stack.workers(*LIVE)
            held = Counter(gpu for w in stack.workers() for gpu in w.gpu_ids)
            if max(held.values(), default=0) > 1:
                wrong.append(f"GPUs given twice: {held}")
            if len([w for w in live if w.state != t.WORKER_STATE_DRAINING]) > 4:
                wrong.append(f"above the bound: {live}")
            if len(stack.engines()) > 4:
                wrong.append(f"{len(stack.engines())} engines on 4 GPUs")
            time.sleep(0.2)

    async def run() -> Report:
        arrivals = [Arrival(n, n * 0.1, 20, 60) for n in range(120)]

        def send(arrival: Arrival) -> "asyncio.Task[Result]":
            return asyncio.ensure_future(load.ask(stack.http, "demo", arrival, salt="churn", timeout_s=60))

        report, _ = await asyncio.gather(load.replay(arrivals, send), asyncio.to_thread(churn))
        return report

    report = uvloop.run(run())
    assert not wrong, wrong[:3]
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=2), timeout=5)
    stack.check_whole(active=2, timeout_s=60)
    assert not [e for e in stack.events() if e.action in ("worker_failed", "worker_lost")]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_specs_that_change_under_load_and_pools_that_go(stack: FaultStack) -> None:
    stack.pool(workers=1)
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=3), timeout=5)
    stack.check_whole(active=3)
    with pytest.raises(grpc.RpcError) as refusal:
        stack.pool(tensor_parallel_size=2, wait=False)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.RpcError):  # while workers live, and without the word to drain them
        stack.operator.DeletePool(cp.DeletePoolRequest(name="demo"), timeout=5)

    async def run() -> Report:
        storm = asyncio.ensure_future(_streams(stack, 24, 200))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(stack.pool, most=2, wait=False, min_workers=1, engine_args=(*ENGINE, "--seed", "1"))
        return await storm

    report = uvloop.run(run())
    assert not report.failed, report.explain()
    stack.check_whole(active=2)

    async def delete() -> Report:
        storm = asyncio.ensure_future(_streams(stack, 24, 200))
        await asyncio.sleep(0.7)
        await asyncio.to_thread(stack.operator.DeletePool, cp.DeletePoolRequest(name="demo", drain=True), timeout=5)
        return await storm

    report = uvloop.run(delete())
    assert not report.failed, report.explain()
    wait_for("the pool gone", lambda: not stack.status().pools, 30)
    assert stack.engines() == []
    assert stack.ask().status == 404
