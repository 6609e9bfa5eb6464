"""Fixtures: a marker that finds every process of a test, and folders short enough for unix sockets."""

import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nodeagent.fake_controlplane import FakeControlPlane
from tests.nodeagent.processes import RunningAgent, RunningShim, kill_marked, marked


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary folder with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="stn-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def marker() -> Iterator[str]:
    """A value of SPRINGTIDE_NODE of this test alone. Nothing that carries it may be alive at the end."""
    value = f"test-{uuid.uuid4().hex}"
    yield value
    end = time.monotonic() + 5
    while (left := marked(value)) and time.monotonic() < end:
        time.sleep(0.05)
    kill_marked(value)
    assert not left, f"left behind: {left}"


@pytest.fixture
def start_shim(short_dir: Path, marker: str) -> Iterator[Callable[..., RunningShim]]:
    """Starts shims; at the end they are killed, which must take their engines with them."""
    started: list[RunningShim] = []

    def start(*engine_flags: str, **launch: Any) -> RunningShim:
        folder = short_dir / f"s{len(started)}"
        folder.mkdir()
        started.append(RunningShim(folder, marker, engine_flags, **launch))
        return started[-1]

    yield start
    for shim in started:
        shim.kill()


@pytest.fixture
async def controlplane() -> AsyncIterator[FakeControlPlane]:
    """A running fake control plane."""
    fake = await FakeControlPlane().start()
    yield fake
    await fake.stop()


@pytest.fixture
def agent(short_dir: Path, controlplane: FakeControlPlane) -> Iterator[RunningAgent]:
    """An agent that is not started yet. At the end it and all that it started are killed."""
    running = RunningAgent(short_dir, controlplane.address)
    yield running
    running.kill()
    kill_marked(running.marker)
    end = time.monotonic() + 5
    while (left := marked(running.marker)) and time.monotonic() < end:
        time.sleep(0.05)
        kill_marked(running.marker)
    assert not left, f"cannot be killed: {left}"
