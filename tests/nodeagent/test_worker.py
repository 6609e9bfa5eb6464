"""One worker's task in this process, with a real shim: memory, spans, a full disk, real order of facts."""

import dataclasses
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nodeagent.ledger import LedgerEntry
from nodeagent.node import Node
from nodeagent.setup import NodeSetup
from nodeagent.worker import Worker
from springtide.clock import SystemClock
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import WorkerReport
from springtide.telemetry import new_traceparent, shutdown, spans, trace_id_of
from tests.nodeagent.fake_controlplane import launch
from tests.nodeagent.processes import eventually, kill_marked, marked
from tests.nodeagent.setups import node_setup

P = ReportedPhase


class Memory:
    """GPU memory that the test sets."""

    def __init__(self) -> None:
        self.used: int | None = 3 * 2**30

    def memory_used_bytes(self, gpu_id: str) -> int | None:
        return self.used


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
async def setup(short_dir: Path, marker: str, memory: Memory) -> NodeSetup:
    """A node with two simulated GPUs."""
    return node_setup(short_dir, marker, gpus=2, memory=memory)


@pytest.fixture
async def node(setup: NodeSetup, marker: str) -> AsyncIterator[Node]:
    """Its workers."""
    made = Node(setup)
    yield made
    await made.close()
    kill_marked(marker)


def _want(want: Want, generation: int, **more: Any) -> list[DesiredWorker]:
    return [DesiredWorker("w-1", "p", generation, want, launch(), **more)]


async def _until(node: Node, phase: ReportedPhase) -> WorkerReport:
    def check() -> WorkerReport | None:
        return next((report for report in node.reports() if report.phase is phase), None)

    found: WorkerReport = await eventually(check)
    return found


async def test_a_slice_is_given_back_only_when_its_memory_is_free(node: Node, memory: Memory, marker: str) -> None:
    """DESIGN rule 9, F34: processes gone is not enough; what was in use before the start does not count."""
    node.apply("s", _want(Want.RUN, 1))
    await _until(node, P.READY)
    memory.used = 60 * 2**30
    node.apply("s", _want(Want.STOP, 2))
    await eventually(lambda: not marked(marker))
    held = [report.phase for report in node.reports()]
    other = dataclasses.replace(_want(Want.RUN, 1)[0], worker_id="w-2")
    node.apply("s", [*_want(Want.STOP, 2), other])
    refused = next(report for report in node.reports() if report.worker_id == "w-2")
    assert refused.exit is not None
    assert (held, refused.phase) == ([P.STOPPING], P.FAILED)
    assert "GPU_IN_USE" in refused.exit.message
    memory.used = 3 * 2**30 + 1000
    await _until(node, P.STOPPED)


async def test_spans_of_a_life(node: Node) -> None:
    """One trace from boot to freed memory, with pool, worker, node and incarnation."""
    exporter = InMemorySpanExporter()
    spans.attach(SimpleSpanProcessor(exporter), Resource({}))
    traceparent = new_traceparent()
    try:
        node.apply("s", _want(Want.RUN, 1, traceparent=traceparent))
        report = await _until(node, P.READY)
        assert report.traceparent == traceparent
        node.apply("s", _want(Want.DRAIN, 2, traceparent=traceparent))
        await _until(node, P.DRAINING)
        node.apply("s", _want(Want.STOP, 3, traceparent=traceparent))
        await _until(node, P.STOPPED)
        found = exporter.get_finished_spans()
    finally:
        shutdown()
    assert [span.name.removeprefix("springtide.worker.") for span in found] == [
        "boot",
        "load",
        "warm_up",
        "start",
        "drain",
        "release",
    ]
    for span in found:
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == trace_id_of(traceparent)
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        phases = {key: value for key, value in (span.attributes or {}).items() if key.startswith("springtide.start.")}
        assert bool(phases) == span.name.endswith(".start")
        assert dict(span.attributes or {}) == phases | {
            "springtide.pool": "p",
            "springtide.worker": "w-1",
            "springtide.node": "n-1",
            "springtide.incarnation": report.incarnation,
        }


async def test_a_full_disk_starts_nothing(
    node: Node, setup: NodeSetup, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC before the spawn: FAILED with LEDGER_WRITE_FAILED; the next generation is a new attempt."""

    def full(entry: LedgerEntry) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(setup.ledger, "write", full)
    node.apply("s", _want(Want.RUN, 1))
    failed = await _until(node, P.FAILED)
    assert failed.exit is not None
    assert (failed.exit.reason, marked(marker)) == ("LEDGER_WRITE_FAILED", {})
    monkeypatch.undo()
    node.apply("s", _want(Want.RUN, 2))
    await _until(node, P.READY)


async def test_run_during_a_stop_starts_again_afterwards(node: Node) -> None:
    """The orders of one worker are taken one after another."""
    node.apply("s", _want(Want.RUN, 1))
    first = await _until(node, P.READY)
    node.apply("s", _want(Want.STOP, 2))
    await _until(node, P.STOPPING)
    node.apply("s", _want(Want.RUN, 3))

    def again() -> bool:
        report = node.reports()[0]
        return report.phase is P.READY and report.incarnation > first.incarnation

    await eventually(again)


async def test_a_start_that_waits_for_its_turn_can_be_cancelled(node: Node, setup: NodeSetup, marker: str) -> None:
    """Nothing was started, so STOPPED follows at once."""
    async with setup.start_slots.one():
        node.apply("s", _want(Want.RUN, 1))
        await _until(node, P.BOOTING)
        node.apply("s", _want(Want.STOP, 2))
        stopped = await _until(node, P.STOPPED)
    assert (stopped.incarnation, marked(marker)) == (0, {})


async def test_an_undrain_and_a_crash_are_one_failure(node: Node, marker: str) -> None:
    """An engine that ends by itself after newer orders is FAILED for them too: no start without a newer order."""
    node.apply("s", _want(Want.RUN, 1))
    await _until(node, P.READY)
    node.apply("s", _want(Want.DRAIN, 2))
    await _until(node, P.DRAINING)
    node.apply("s", _want(Want.RUN, 3))
    await _until(node, P.READY)
    kill_marked(marker)
    failed = await _until(node, P.FAILED)
    assert failed.generation == 3
    node.apply("s", _want(Want.RUN, 3))
    assert node.reports()[0].phase is P.FAILED
    node.apply("s", _want(Want.RUN, 4))
    await _until(node, P.READY)


async def test_what_no_shim_has_said_is_not_drained(node: Node, setup: NodeSetup) -> None:
    """DESIGN rule 1: an agent that leaves never takes a worker that it cannot ask for an idle one."""
    node.apply("s", _want(Want.RUN, 1))
    await _until(node, P.READY)
    assert not node.drained, "it admits"
    await node.close()
    (entry,) = setup.ledger.read_all()
    assert not Worker(setup, entry).drained, "live, and nothing heard of it"
    assert Worker(setup, dataclasses.replace(entry, live=False)).drained


async def test_an_incarnation_is_newer_than_what_was_seen_elsewhere(node: Node) -> None:
    """F15: this node's clock may be behind that of the node where the worker ran before."""
    ahead = int(SystemClock().now() * 1000) + 3_600_000
    node.apply("s", _want(Want.RUN, 1, after_incarnation=ahead))
    report = await _until(node, P.READY)
    assert report.incarnation == ahead + 1
    node.apply("s", _want(Want.STOP, 2))
    await _until(node, P.STOPPED)
