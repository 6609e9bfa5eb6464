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


def _storm(stack: FaultStack, blow: Callable[[], None], *, seconds: float = 6.0, tokens: int = 150) -> Report:
    """Ten requests a second, and the blow after one second."""

    async def run() -> Report:
        arrivals = [Arrival(n, n * 0.1, 20, tokens) for n in range(int(seconds * 10))]

        def send(arrival: Arrival) -> "asyncio.Task[Result]":
            return asyncio.ensure_future(load.ask(stack.http, "demo", arrival, salt="pause", timeout_s=40))

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
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("victim", "seconds"),
    [("controlplane", 2.0), ("controlplane", 6.0), ("nodeagent", 2.5), ("nodeagent", 6.0), ("router", 3.0)],
)
def test_what_only_directs_may_stand_still(stack: FaultStack, victim: str, seconds: float) -> None:
    """Longer than the lease too: nobody notices, nothing is started again."""
    stack.pool(workers=2)
    before = {w.worker_id: (w.incarnation, stack.engine_pids(w.worker_id)) for w in stack.workers("ACTIVE")}
    report = _storm(stack, _freeze(stack, stack.pid(victim), seconds), seconds=seconds + 3)
    assert not report.failed, report.explain()
    stack.check_whole(active=2)
    assert victim == "nodeagent" or "worker_lost" not in stack.actions(), "it took its own standstill for silence"
    after = {w.worker_id: (w.incarnation, stack.engine_pids(w.worker_id)) for w in stack.workers("ACTIVE")}
    assert after == before


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("victim", ["shim", "guard", "engine"])
def test_a_worker_that_stands_still_for_a_moment(stack: FaultStack, victim: str) -> None:
    stack.pool(workers=2)
    target = sorted(stack.workers("ACTIVE"), key=lambda w: w.worker_id)[0]
    pids = stack.engine_pids(target.worker_id)
    report = _storm(stack, _freeze(stack, stack.pid(victim, target.worker_id), 3.0), seconds=6)
    assert not report.failed, report.explain()
    stack.check_whole(active=2)
    assert stack.by_id()[target.worker_id].incarnation == target.incarnation
    assert stack.engine_pids(target.worker_id) == pids


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("victim", ["shim", "guard", "engine", "hang"])
def test_a_worker_that_stands_still_for_good_is_replaced(stack: FaultStack, victim: str) -> None:
    """Probes fail, SUSPECT, then killed and replaced, whichever of its processes it is that hangs."""
    stack.pool(workers=2)
    target = sorted(stack.workers("ACTIVE"), key=lambda w: w.worker_id)[0]
    old = stack.engine_process(target.worker_id)
    if victim == "hang":
        stack.inject(target.worker_id, kind="hang")
    else:
        os.kill(stack.pid(victim, target.worker_id), signal.SIGSTOP)
    if victim == "guard":  # it serves nothing but stops: those must work all the same
        stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id=target.worker_id), timeout=5)
        wait_for("the end of the old engine", lambda: not old.is_running(), 30)
    else:
        wait_for("doubt", lambda: "worker_suspect" in stack.actions(target.worker_id), 30)
        wait_for("the end of the old engine", lambda: not old.is_running(), 40)
    stack.check_whole(active=2)
    assert all(w.incarnation != target.incarnation for w in stack.workers("ACTIVE"))
    assert stack.ask().exact
