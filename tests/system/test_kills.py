"""Each process in turn is killed with SIGKILL under load and started again.

CP10 CP11 CP12 CP14 NA11 NA13 RT5 SM8, F15 F30 F34. Control plane and agent: nobody notices. Router: clients see a
broken connection, never a clean end, and asking again is exact. Shim, guard, engine: nobody notices, streams go on at
another worker. Nothing survives what it belonged to, nothing is started twice.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.system import load, trace
from tests.system.conftest import TIMING, apply_demo
from tests.system.load import Report, Result
from tests.system.stack import Stack, running, wait_for
from tests.system.trace import Arrival

LONG = 100_000  # numbers of the long streams that are under way when the blow falls


async def _until_answered(stack: Stack, arrival: Arrival, salt: str) -> Result:
    """Asks again after a broken connection, as a client with retries does; the broken tries are counted."""
    tries = 0
    while True:
        result = await load.ask(stack.http, "demo", arrival, salt=salt)
        result.retries = tries
        assert not (result.done and not result.exact), result  # a clean end is always the whole answer
        if not result.transport or tries >= 100:
            return result
        tries += 1
        await asyncio.sleep(0.1)


async def _storm(stack: Stack, blow: Callable[[], None], *, ask_again: bool = False, salt: str = "kill") -> Report:
    """Twenty seconds of the trace and six long streams; the blow falls after five seconds."""
    arrivals = trace.read("code", start_s=0, length_s=400, compress=20)
    long = [Arrival(LONG + n, 3.0 + n * 0.05, 50, 600) for n in range(6)]
    every = sorted(arrivals + long, key=lambda a: a.at_s)

    def send(arrival: Arrival) -> "asyncio.Task[Result]":
        ask = _until_answered(stack, arrival, salt) if ask_again else load.ask(stack.http, "demo", arrival, salt=salt)
        return asyncio.ensure_future(ask)

    async def strike() -> None:
        await asyncio.sleep(5)
        await asyncio.to_thread(blow)

    report, _ = await asyncio.gather(load.replay(every, send), strike())
    return report


def _engine_of(stack: Stack, worker_id: str) -> psutil.Process:
    """The engine's first process: the guard's child."""
    return psutil.Process(stack.engine_pids(worker_id)["guard"]).children()[0]


def _engines(stack: Stack) -> list[psutil.Process]:
    """Live simulated engines of this stack."""
    found = []
    for pid in stack.strays():
        try:
            process = psutil.Process(pid)
            if "nodeagent.engines.sim" in process.cmdline() and "guard.py" not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _check_one_engine_each(stack: Stack) -> None:
    """As many engines as live workers, on disjoint GPUs."""
    live = stack.workers("STARTING", "ACTIVE", "DRAINING")
    wait_for("one engine per worker", lambda: len(_engines(stack)) == len(stack.workers("ACTIVE")), 20)
    held = Counter(gpu for worker in live for gpu in worker.gpu_ids)
    assert max(held.values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("victim", ["controlplane", "nodeagent"])
def test_nobody_notices_the_death_of(small_stack: Stack, victim: str) -> None:
    stack = small_stack
    apply_demo(stack, min_workers=2)
    before = {w.worker_id: (w.incarnation, stack.engine_pids(w.worker_id)) for w in stack.workers("ACTIVE")}

    def blow() -> None:
        stack.kill(victim)
        stack.start(victim)

    report = uvloop.run(_storm(stack, blow))
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert sum(r.arrival.number >= LONG for r in report.results) == 6
    wait_for("the return to two workers", lambda: len(stack.workers("ACTIVE")) == 2, 60)
    after = {w.worker_id: w for w in stack.workers()}
    for worker_id, (incarnation, pids) in before.items():
        if after[worker_id].state == t.WORKER_STATE_ACTIVE and after[worker_id].incarnation == incarnation:
            assert stack.engine_pids(worker_id) == pids
    assert not [e for e in stack.events() if e.action in ("worker_failed", "worker_lost")]
    _check_one_engine_each(stack)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_killed_router_breaks_connections_and_never_ends_one_cleanly(small_stack: Stack) -> None:
    stack = small_stack
    apply_demo(stack, min_workers=2)

    def blow() -> None:
        stack.kill("router")
        stack.start("router")

    report = uvloop.run(_storm(stack, blow, ask_again=True))
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert [r for r in report.results if r.retries], "nobody was hit: the test proves nothing"
    wait_for("no request left at an engine", lambda: all(w.in_flight == 0 for w in stack.workers("ACTIVE")), 10)
    _check_one_engine_each(stack)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("victim", ["shim", "engine", "guard"])
def test_a_worker_that_dies_is_replaced_and_nobody_notices(small_stack: Stack, victim: str) -> None:
    """RT5: streams go on elsewhere from their token ids: every answer is whole and exact."""
    stack = small_stack
    apply_demo(stack, min_workers=2)
    target = sorted(stack.workers("ACTIVE"), key=lambda w: w.worker_id)[0]
    pids = stack.engine_pids(target.worker_id)
    engine = _engine_of(stack, target.worker_id)

    def blow() -> None:
        os.kill({"engine": engine.pid, **pids}[victim], signal.SIGKILL)

    report = uvloop.run(_storm(stack, blow))
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert stack.counted("router", "springtide_router_continuations_total", result="exact") >= 1, "nobody was hit"
    assert stack.counted("router", "springtide_router_continuations_total", result="failed") == 0
    wait_for("the end of the old engine", lambda: not engine.is_running() or engine.status() == "zombie", 10)
    wait_for("a new incarnation", lambda: _replaced(stack, target), 60)
    wait_for("the return to two workers", lambda: len(stack.workers("ACTIVE")) == 2, 60)
    assert [e for e in stack.events() if e.action == "worker_failed" and e.target == target.worker_id]
    assert [d for d in stack.decisions() if d.result == t.DECISION_RESULT_REPLACE]
    _check_one_engine_each(stack)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_drain_at_its_deadline_cuts_no_stream(small_stack: Stack) -> None:
    """F1 F3: sixty-four long streams, and the action ABORT for those of the drained worker: all of them exact."""
    stack = small_stack
    args = ("--startup-s", "0.5", "--decode-base-ms", "10", "--decode-per-request-ms", "0.1", "--max-num-seqs", "64")
    apply_demo(
        stack,
        min_workers=2,
        engine_args=args,
        drain_timeout_s=1.0,
        drain_action=t.DRAIN_ACTION_ABORT,
        policy={"enable_elastic": False},
    )
    target = sorted(stack.workers("ACTIVE"), key=lambda w: w.worker_id)[0]

    async def drained_under_load() -> Report:
        streams = [Arrival(LONG + n, 0, 50, 400) for n in range(64)]
        asking = [asyncio.ensure_future(load.ask(stack.http, "demo", a, salt="drain")) for a in streams]
        await asyncio.to_thread(
            wait_for, "load on both", lambda: all(w.in_flight > 20 for w in stack.workers("ACTIVE")), 20
        )
        order = cp.DrainWorkerRequest(worker_id=target.worker_id)
        await asyncio.to_thread(lambda: stack.operator.DrainWorker(order, timeout=5))
        return Report(list(await asyncio.gather(*asking)))

    report = uvloop.run(drained_under_load())
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert stack.counted("router", "springtide_router_continuations_total", reason="drained", result="exact") > 20
    wait_for("the end of the drain", lambda: not stack.workers("DRAINING"), 30)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_without_continuation_every_loss_is_explicit(tmp_path: Path) -> None:
    """RT5 with continue_streams = false: an error in the stream, and never a clean end."""
    with running(tmp_path, timing=TIMING, router_config="continue_streams = false\n") as stack:
        apply_demo(stack, min_workers=2)
        engines = [_engine_of(stack, w.worker_id) for w in stack.workers("ACTIVE")]

        async def killed_under_load() -> list[Result]:
            arrivals = [Arrival(LONG + n, 0, 50, 600) for n in range(8)]
            asking = [asyncio.ensure_future(load.ask(stack.http, "demo", a, salt="off")) for a in arrivals]
            await asyncio.to_thread(
                wait_for, "load on both", lambda: all(w.in_flight > 0 for w in stack.workers("ACTIVE")), 20
            )
            os.kill(engines[0].pid, signal.SIGKILL)
            return list(await asyncio.gather(*asking))

        results = uvloop.run(killed_under_load())
        lost = [result for result in results if not result.ok]
        assert lost, "nobody was hit: the test proves nothing"
        for result in lost:
            assert result.status == 200, result
            assert "cannot be continued: continue_streams is off" in result.error, result
            assert not result.done, result
            assert load.expected(result.arrival, "off").startswith(result.text)
        assert all(result.exact for result in results if result.ok)


def _replaced(stack: Stack, old: t.Worker) -> bool:
    return all(w.incarnation != old.incarnation for w in stack.workers("ACTIVE"))


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_everything_killed_at_once_converges(small_stack: Stack) -> None:
    """Control plane, agent and router die together: engines go on, are adopted, and serve."""
    stack = small_stack
    apply_demo(stack, min_workers=2)
    before = {w.worker_id: w.incarnation for w in stack.workers("ACTIVE")}
    for name in tuple(stack.processes):
        stack.kill(name)
    assert len(_engines(stack)) == 2
    stack.start()
    wait_for("both workers adopted", lambda: len(stack.workers("ACTIVE")) == 2, 30)
    stack.wait_routable("demo")
    assert {w.worker_id: w.incarnation for w in stack.workers("ACTIVE")} == before
    result = uvloop.run(load.ask(stack.http, "demo", Arrival(1, 0, 50, 30), salt="again"))
    assert result.exact, result
    _check_one_engine_each(stack)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_an_empty_store_never_stops_an_engine(small_stack: Stack) -> None:
    """The control plane's folder is lost: engines and routers go on with what they know (DESIGN rule 8)."""
    stack = small_stack
    apply_demo(stack, min_workers=2)
    engines = {process.pid for process in _engines(stack)}
    stack.kill("controlplane")
    (stack.folder / "cp").rename(stack.folder / "cp-lost")
    stack.start("controlplane")
    wait_for("the node's hello", lambda: stack.status().nodes, 20)
    wait_for("the foreign engines noticed", lambda: stack.status().nodes[0].foreign_workers == 2, 20)
    assert {process.pid for process in _engines(stack)} == engines
    result = uvloop.run(load.ask(stack.http, "demo", Arrival(1, 0, 50, 30), salt="foreign"))
    assert result.exact, result
