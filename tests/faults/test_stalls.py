"""Engines that live and do nothing: found by what they do, not by what they answer.

NA11 CP20 RT6, F11 F32, DESIGN rules 1 and 6.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.faults.blows import FaultStack, wait_for
from tests.faults.conftest import TIMING
from tests.system import load
from tests.system.load import Report, Result
from tests.system.trace import Arrival

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[FaultStack]:
    found = FaultStack(
        tmp_path, gpus=4, timing={**TIMING, "unhealthy_after_s": 4.0}, agent_config="stall_timeout_s = 4\n"
    )
    try:
        found.start()
        yield found
    finally:
        found.stop()
        assert found.strays() == []


async def _streams(stack: FaultStack, count: int, tokens: int) -> "list[asyncio.Task[Result]]":
    tasks = [
        asyncio.ensure_future(load.ask(stack.http, "demo", Arrival(n, 0, 20, tokens), salt="stall", timeout_s=90))
        for n in range(count)
    ]
    on_all = lambda: all(w.in_flight for w in stack.workers("ACTIVE"))  # noqa: E731
    await asyncio.to_thread(wait_for, "streams on all", on_all, 20)
    return tasks


def test_an_engine_that_answers_probes_and_does_no_work_is_replaced(stack: FaultStack) -> None:
    """Its health and its metrics answer; its streams stand still. SUSPECT, out of the table, killed, replaced; what ran
    there goes on elsewhere, exactly."""
    stack.pool(workers=2)
    victim = stack.workers("ACTIVE")[0]

    async def run() -> Report:
        tasks = await _streams(stack, 6, 300)
        await asyncio.to_thread(stack.inject, victim.worker_id, kind="hang", scope="engine")
        return Report(list(await asyncio.gather(*tasks)))

    report = uvloop.run(run())
    assert all(result.exact for result in report.results), report.explain()
    wait_for("its end", lambda: "worker_failed" in stack.actions(victim.worker_id), 40)
    told = next(e for e in stack.events() if e.action == "worker_suspect" and e.target == victim.worker_id)
    assert told.reason == "PROBES_FAIL"
    assert "nothing has come of them" in stack.log("nodeagent")
    stack.check_whole(active=2)


def test_a_busy_engine_is_not_a_stalled_one(stack: FaultStack) -> None:
    """Twenty times slower than ever, with work for much longer than the bound: it is never called stalled."""
    stack.pool(workers=1, max_in_flight=64)
    victim = stack.workers("ACTIVE")[0]

    async def run() -> Report:
        tasks = await _streams(stack, 4, 60)
        await asyncio.to_thread(stack.inject, victim.worker_id, kind="slow", factor=20.0)
        return Report(list(await asyncio.gather(*tasks)))

    report = uvloop.run(run())
    assert all(result.exact for result in report.results), report.explain()
    assert "nothing has come of them" not in stack.log("nodeagent")
    assert stack.by_id()[victim.worker_id].incarnation == victim.incarnation


def test_a_hung_engine_leaves_the_table_before_it_is_given_up(stack: FaultStack) -> None:
    """Three failed probes: new requests go to the other worker alone, long before the hung one is killed."""
    stack.pool(workers=2)
    victim = stack.workers("ACTIVE")[0]
    os.kill(stack.pid("engine", victim.worker_id), signal.SIGSTOP)
    wait_for("suspicion", lambda: "worker_suspect" in stack.actions(victim.worker_id), 30)
    results = [stack.ask(number=number) for number in range(8)]
    assert all(result.exact for result in results), results
    wait_for("its end", lambda: "worker_failed" in stack.actions(victim.worker_id), 40)
    suspect, failed = (
        next(e for e in stack.events() if e.action == action and e.target == victim.worker_id)
        for action in ("worker_suspect", "worker_failed")
    )
    assert suspect.at.ToNanoseconds() < failed.at.ToNanoseconds()
    assert failed.reason == "PROBES_FAILED"
    stack.check_whole(active=2)
