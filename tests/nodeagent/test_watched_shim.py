"""A real shim as the agent sees it: what it says, whether it lives, and its end."""

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.kept_entry import KeptEntry
from nodeagent.ledger import LedgerEntry
from nodeagent.watched_shim import ENDED, Status, WatchedShim
from springtide.clock import ManualClock, SystemClock
from springtide.model.enums import Want
from springtide.processes import identify
from springtide.v1 import shim_pb2
from tests.nodeagent.fake_controlplane import launch
from tests.nodeagent.processes import RunningShim, eventually
from tests.nodeagent.setups import node_setup

OPEN = shim_pb2.SHIM_ADMISSION_OPEN


@pytest.fixture
def kept(short_dir: Path, marker: str) -> KeptEntry:
    """Of a worker that has no shim yet."""
    setup = node_setup(short_dir, marker)
    entry = LedgerEntry("w-1", "p", "s", 1, Want.RUN, launch(), incarnation=7, control_path=str(short_dir / "none"))
    return KeptEntry(setup, entry)


class Watching:
    """A watched shim, and what it told."""

    def __init__(self, kept: KeptEntry, shim: RunningShim | None, clock: Any = None) -> None:
        if shim is not None:
            kept.remember(control_path=str(shim.control), shim=identify(shim.process.pid))
        self.told: list[tuple[Status | None, Status]] = []
        self.woken = 0
        self.shim = WatchedShim(kept, clock or SystemClock(), lambda *both: self.told.append(both), self._wake)

    def _wake(self) -> None:
        self.woken += 1


async def test_what_it_says_is_told_with_what_it_said_before(
    kept: KeptEntry, start_shim: Callable[..., RunningShim]
) -> None:
    """NA11, rule 9: its changes come by themselves, and its engine's end is one of them."""
    running = await start_shim().serving()
    seen = Watching(kept, running)
    found = await seen.shim.first_status(30.0)
    assert found is not None
    assert (found.worker_id, seen.shim.status, seen.told) == ("w-1", None, [])
    seen.shim.note(found)
    watching = asyncio.create_task(seen.shim.watch())
    await seen.shim.admit(OPEN, 2, 9, abort=False)
    await eventually(lambda: seen.told[-1][1].max_in_flight == 9)
    await seen.shim.stop(0.0)
    await asyncio.wait_for(watching, 30)
    assert seen.shim.ended
    assert not seen.shim.lost
    assert seen.shim.status is not None
    assert seen.shim.status.process == ENDED
    assert [new for _, new in seen.told[:-1]] == [old for old, _ in seen.told[1:]]
    await seen.shim.dismiss()
    await eventually(lambda: running.process.poll() is not None)


async def test_one_that_is_killed_is_lost(kept: KeptEntry, start_shim: Callable[..., RunningShim]) -> None:
    """Rule 8: its end shows at once, and says why."""
    running = await start_shim().serving()
    seen = Watching(kept, running)
    seen.shim.note(await seen.shim.first_status(30.0) or Status())
    watching = asyncio.create_task(seen.shim.watch())
    os.kill(running.process.pid, signal.SIGKILL)
    await asyncio.wait_for(watching, 30)
    running.process.returncode = -signal.SIGKILL  # it was collected by the one that watches
    assert (seen.shim.lost, seen.shim.ended, seen.woken) == (True, True, 1)
    assert seen.shim.death().reason == "SHIM_DIED"
    assert await seen.shim.silence() != ""
    assert await seen.shim.first_status(30.0) is None


async def test_one_that_is_not_wanted_any_more(kept: KeptEntry, start_shim: Callable[..., RunningShim]) -> None:
    """Rule 9: killed by its identity; once its process is gone it is lost."""
    running = await start_shim().listening()
    seen = Watching(kept, running)

    def lost() -> bool:
        seen.shim.kill()
        return seen.shim.lost

    await eventually(lost, 30.0)
    running.process.returncode = -signal.SIGKILL  # it was collected by the one that watches
    assert seen.shim.death().reason == "SHIM_DIED"


async def test_one_that_never_was_is_lost(kept: KeptEntry) -> None:
    """A start whose shim is gone before it said a word is not waited for."""
    seen = Watching(kept, None)
    assert await seen.shim.first_status(600.0) is None
    assert seen.shim.lost
    await seen.shim.refresh()
    assert (seen.told, seen.shim.counts) == ([], None)


async def test_one_that_lives_and_says_nothing_is_lost_after_the_bound(kept: KeptEntry, caplog) -> None:
    """Rule 8: a process that is there and does not answer."""
    mute = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    try:
        kept.remember(shim=identify(mute.pid))
        seen = Watching(kept, None, ManualClock())
        assert await seen.shim.first_status(-1.0) is None
    finally:
        mute.kill()
        await mute.wait()
    assert seen.shim.lost
    assert "its shim is silent" in caplog.text


def test_old_counts_are_unknown(kept: KeptEntry) -> None:
    """Unknown is not zero: what nobody has confirmed for a while counts no longer, its other facts do."""
    clock = ManualClock()
    seen = Watching(kept, None, clock)

    def known() -> bool:
        return seen.shim.counts is not None

    seen.shim.note(Status(in_flight=3, version=1))
    clock.advance(4.9)
    assert known()
    clock.advance(0.2)
    assert not known()
    assert seen.shim.status is not None
    seen.shim.note(Status(in_flight=3, version=2))
    assert known()
    seen.shim.note(Status(in_flight=3, version=3, process=ENDED))
    assert not known()


def test_a_full_disk_puts_the_ledger_behind(kept: KeptEntry, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Rule 8: the worker goes on; the line names it."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept.remember(weight_version="v1")
    monkeypatch.setattr("nodeagent.ledger.os.fsync", full)
    caplog.set_level(logging.ERROR)
    kept.remember(weight_version="v2")
    assert kept.entry.weight_version == "v2"
    (record,) = caplog.records
    assert (record.name, record.__dict__["worker"]) == ("nodeagent.incarnation", "w-1")
