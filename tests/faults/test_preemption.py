"""A node that is taken away under load, told by signal, by file or by an operator: not one request fails.

NA10 SM6, F4: announced at once, unrouted, drained within the deadline, the rest continued elsewhere, replaced in
parallel.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from springtide.v1 import types_pb2 as t
from tests.faults.blows import FaultStack, wait_for
from tests.faults.conftest import TIMING
from tests.system import load
from tests.system.load import Report, Result
from tests.system.stack import ROOT
from tests.system.trace import Arrival

NOTICE_S = 20.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[FaultStack]:
    """Two nodes; two workers of one pool, one on each, and a free GPU on each."""
    config = f'notice_file = "{tmp_path}/notice"\nnotice_s = {NOTICE_S}\n'
    found = FaultStack(tmp_path, gpus=2, timing=TIMING, agent_config=config)
    try:
        found.add_agent("node-b", gpus=2)
        command = found.commands["node-b"]  # it is told nothing
        (tmp_path / "node-b.toml").touch()
        command[command.index("--config") + 1] = str(tmp_path / "node-b.toml")
        found.start()
        wait_for("two nodes", lambda: len(found.status().nodes) == 2, 20)
        yield found
    finally:
        found.stop()
        assert found.strays() == []


def _by_signal(stack: FaultStack) -> None:
    stack.processes["nodeagent"].send_signal(signal.SIGUSR1)


def _by_file(stack: FaultStack) -> None:
    (stack.folder / "notice").write_text(f"{NOTICE_S}\n")


def _by_operator(stack: FaultStack) -> None:
    command = [sys.executable, "-m", "springtide.cli", "notice", "node-a", "--in", f"{NOTICE_S:g}s"]
    environ = {**stack.environ, "SPRINGTIDE_ADDRESS": stack.address}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "taken away" in done.stdout


def _on(stack: FaultStack, node: str, *states: str) -> list[t.Worker]:
    return [w for w in stack.workers(*states) if w.node_id == node]


def _node(stack: FaultStack, node: str) -> t.Node:
    return next(n for n in stack.status().nodes if n.node_id == node)


@pytest.mark.parametrize("notify", [_by_signal, _by_file, _by_operator])
def test_a_notice_costs_no_request(stack: FaultStack, notify: object) -> None:
    assert callable(notify)
    stack.pool(workers=2, most=2, drain_timeout_s=8.0)
    told_at = 0.0

    async def run() -> Report:
        nonlocal told_at
        number = iter(range(10**6))
        over = asyncio.Event()

        async def client() -> list[Result]:
            found = []
            while not over.is_set():
                arrival = Arrival(next(number), 0, 20, 60)
                found.append(await load.ask(stack.http, "demo", arrival, salt="notice", timeout_s=60))
            return found

        clients = [asyncio.ensure_future(client()) for _ in range(6)]
        await asyncio.sleep(0.5)
        told_at = time.time()
        await asyncio.to_thread(notify, stack)
        await asyncio.to_thread(wait_for, "the move", lambda: len(_on(stack, "node-b", "ACTIVE")) == 2, 30)
        await asyncio.to_thread(wait_for, "an empty node", lambda: not _on(stack, "node-a", "ACTIVE", "DRAINING"), 30)
        over.set()
        return Report([result for found in await asyncio.gather(*clients) for result in found])

    before = _on(stack, "node-a", "ACTIVE")
    assert before
    report = uvloop.run(run())
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert len(report.results) > 6
    node = _node(stack, "node-a")
    assert node.state in (t.NODE_STATE_RELEASING, t.NODE_STATE_GONE)
    events = stack.events()
    announced = next(e for e in events if e.action == "node_stopping" and e.target == "node-a")
    ended = [e for e in events if e.action == "scale_down_complete" and e.target in {w.worker_id for w in before}]
    assert len(ended) == len(before)
    assert all(e.at.seconds <= told_at + NOTICE_S for e in ended), "drained within the deadline"
    since = announced.at.ToNanoseconds()
    assert [e for e in events if e.action == "scale_up_start" and e.at.ToNanoseconds() >= since], (
        "the replacement is asked for at once"
    )
    unrouted = [e for e in events if e.action == "scale_down_start" and e.target == before[0].worker_id]
    assert unrouted[0].reason == "NODE_STOPPING"


def test_what_does_not_finish_in_time_is_continued_elsewhere(stack: FaultStack) -> None:
    """Streams longer than the notice: cut at the drain's end and continued on the other node, exactly."""
    stack.pool(workers=2, most=2, drain_timeout_s=3.0)

    async def run() -> list[Result]:
        arrivals = [Arrival(number, 0, 20, 1200) for number in range(4)]
        streams = [asyncio.ensure_future(load.ask(stack.http, "demo", a, salt="long", timeout_s=80)) for a in arrivals]
        on_both = lambda: all(w.in_flight for w in stack.workers("ACTIVE"))  # noqa: E731
        await asyncio.to_thread(wait_for, "streams on both", on_both, 20)
        await asyncio.to_thread(_by_signal, stack)
        return list(await asyncio.gather(*streams))

    results = uvloop.run(run())
    assert all(result.exact for result in results), Report(results).explain()
    wait_for("the agent's end", lambda: stack.processes["nodeagent"].poll() is not None, 30)
    assert stack.processes["nodeagent"].poll() == 0
    assert len(_on(stack, "node-b", "ACTIVE")) == 2
