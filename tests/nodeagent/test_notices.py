"""A node that is told that it will be taken away: by signal, by file (NA10, F4)."""

import asyncio
import datetime
import os
import signal
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from nodeagent.notices import notice_end
from springtide.model.enums import ReportedPhase, Want
from tests.nodeagent.fake_controlplane import FakeControlPlane, launch
from tests.nodeagent.processes import RunningAgent, eventually, expected, marked, stream_words

P = ReportedPhase
Stream: TypeAlias = "asyncio.Task[tuple[list[str], list[dict[str, Any]], bool]]"
SLOW = ("--decode-base-ms", "20")


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("120", 120.0), ("45.5\n", 45.5), ("", 30.0), ("soon", 30.0), ("-5", 30.0), ("nan", 30.0), ("inf", 30.0)],
)
def test_seconds_count_from_when_the_file_was_written(tmp_path: Path, said: str, seconds: float) -> None:
    """What cannot be read counts as the default: better too early than not at all."""
    path = tmp_path / "notice"
    path.write_text(said)
    os.utime(path, (1_000.0, 1_000.0))
    assert notice_end(path, 30.0) == 1_000.0 + seconds


@pytest.mark.parametrize("said", ["2026-11-28T04:00:00Z", "2026-11-28T04:00:00", "2026-11-28T05:00:00+01:00"])
def test_an_iso_time(tmp_path: Path, said: str) -> None:
    path = tmp_path / "notice"
    path.write_text(said)
    assert notice_end(path, 30.0) == datetime.datetime(2026, 11, 28, 4, tzinfo=datetime.UTC).timestamp()


def test_no_file(tmp_path: Path) -> None:
    assert notice_end(tmp_path / "notice", 30.0) is None


async def _serving_stream(cp: FakeControlPlane, agent: RunningAgent, *flags: str) -> Stream:
    await agent.start(*flags).up()
    cp.want("w-1", Want.RUN, 1, launch(*SLOW))
    report = await cp.until("w-1", P.READY)
    stream = asyncio.create_task(stream_words(f"http://{report.endpoint}", "z", 100))
    await eventually(lambda: cp.reports["w-1"].in_flight == 1)
    return stream


async def _drained_and_gone(cp: FakeControlPlane, agent: RunningAgent, stream: Stream) -> None:
    cp.want("w-1", Want.DRAIN, 2)
    await cp.until("w-1", P.DRAINING, 2)
    words, errors, done = await stream
    assert ("".join(words), errors, done) == (expected("z", 100), [], True)
    cp.want("w-1", Want.STOP, 3)
    assert await agent.exited() == 0
    assert not marked(agent.marker)


async def test_the_signal_of_a_batch_system(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """The deadline is notice_s and not stop_timeout_s; the signal may come twice; SIGTERM later shortens the time."""
    flags = ("--notice-s", "300", "--notice-signal", "SIGUSR2", "--stop-timeout-s", "20")
    stream = await _serving_stream(controlplane, agent, *flags)
    agent.signal(signal.SIGUSR2)
    assert 250 < await eventually(lambda: controlplane.stopping) <= 300
    agent.signal(signal.SIGUSR2)
    agent.signal(signal.SIGTERM)
    await eventually(lambda: (controlplane.stopping or 300.0) <= 20)
    await _drained_and_gone(controlplane, agent, stream)


async def test_a_file_that_appears(controlplane: FakeControlPlane, agent: RunningAgent, tmp_path: Path) -> None:
    """Announced at once, with the time that it holds; one from an earlier life of the node says nothing."""
    path = tmp_path / "notice"
    path.write_text("10")
    os.utime(path, (1_000.0, 1_000.0))
    stream = await _serving_stream(controlplane, agent, "--notice-file", str(path))
    assert controlplane.stopping is None
    path.write_text("120")
    assert 90 < await eventually(lambda: controlplane.stopping) <= 120
    await _drained_and_gone(controlplane, agent, stream)
