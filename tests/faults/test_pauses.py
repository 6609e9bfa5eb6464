"""Processes that stand still (SIGSTOP) and go on, under load.

CP12 CP20 CP22 RT5 RT11 SM8, F13 F14 F15 F32. A stream survives or ends explicitly; counters return to zero; nothing is
started twice; what stands still for good is replaced.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from tests.faults.blows import FaultStack, check_outcome, wait_for
from tests.system import load
from tests.system.load import Report, Result
from tests.system.trace import Arrival


def _storm(stack: FaultStack, blow: Callable[[], None], *, seconds: float, timeout_s: float = 40.0) -> Report:
    """Ten requests a second, and the blow after one second."""

    async def run() -> Report:
        arrivals = [Arrival(n, n * 0.1, 20, 150) for n in range(int(seconds * 10))]

        def send(arrival: Arrival) -> "asyncio.Task[Result]":
            return asyncio.ensure_future(load.ask(stack.http, "demo", arrival, salt="pause", timeout_s=timeout_s))

        async def strike() -> None:
            await asyncio.sleep(1)
            await asyncio.to_thread(blow)

        report, _ = await asyncio.gather(load.replay(arrivals, send), strike())
        return report

    report = uvloop.run(run())
    for result in report.results:
        check_outcome(result)
    return report


def _freeze(stack: FaultStack, pid: int, seconds: float) -> Callable[[], None]:
    def blow() -> None:
        with stack.stopped(pid):
            time.sleep(seconds)

    return blow


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_what_only_directs_may_stand_still(stack: FaultStack) -> None:
    """Longer than the lease too, one after the other: nobody notices, nothing is started again."""
    stack.pool(workers=2)
    before = {w.worker_id: (w.incarnation, stack.engine_pids(w.worker_id)) for w in stack.workers("ACTIVE")}
    for victim, seconds in (("router", 3.0), ("controlplane", 6.0), ("nodeagent", 6.0)):
        report = _storm(stack, _freeze(stack, stack.pid(victim), seconds), seconds=seconds + 3)
        assert not report.failed, (victim, report.explain())
        stack.check_whole(active=2)
        assert victim == "nodeagent" or "worker_lost" not in stack.actions(), "it took its own standstill for silence"
        after = {w.worker_id: (w.incarnation, stack.engine_pids(w.worker_id)) for w in stack.workers("ACTIVE")}
        assert after == before, victim


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_worker_that_stands_still_for_a_moment(stack: FaultStack) -> None:
    """Shim, guard and engine in turn: streams go on where they were, nothing is replaced."""
    stack.pool(workers=2)
    target = sorted(stack.workers("ACTIVE"), key=lambda w: w.worker_id)[0]
    pids = stack.engine_pids(target.worker_id)

    def blow() -> None:
        for victim in ("shim", "guard", "engine"):
            with stack.stopped(stack.pid(victim, target.worker_id)):
                time.sleep(2.0)

    report = _storm(stack, blow, seconds=7)
    assert not report.failed, report.explain()
    stack.check_whole(active=2)
    assert stack.by_id()[target.worker_id].incarnation == target.incarnation
    assert stack.engine_pids(target.worker_id) == pids


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_that_stand_still_for_good_are_replaced(stack: FaultStack) -> None:
    """Probes fail, SUSPECT, then killed and replaced: a stopped shim, a stopped engine, one that hangs. A stopped guard
    serves nothing but stops: those must work all the same. Clients get exact answers or explicit errors."""
    stack.pool(workers=4)
    before = {w.worker_id: w.incarnation for w in stack.workers("ACTIVE")}
    shim, engine, hang, guard = sorted(before)
    old = [stack.engine_process(worker_id) for worker_id in sorted(before)]

    def blow() -> None:
        os.kill(stack.pid("shim", shim), signal.SIGSTOP)
        os.kill(stack.pid("engine", engine), signal.SIGSTOP)
        os.kill(stack.pid("guard", guard), signal.SIGSTOP)
        stack.inject(hang, kind="hang")
        stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id=guard), timeout=5)

    _storm(stack, blow, seconds=3, timeout_s=90)
    wait_for("the end of the old engines", lambda: not any(process.is_running() for process in old), 60)
    for worker_id in (shim, engine, hang):
        assert "worker_suspect" in stack.actions(worker_id), stack.describe()
    stack.check_whole(active=4)
    assert not {w.incarnation for w in stack.workers("ACTIVE")} & set(before.values())
    assert stack.ask().exact
