"""What only the sqlite store must do: outlive kills, full disks, damage, rivals and older versions."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.core.snapshot import Put
from controlplane.store.sqlite import SqliteStore
from controlplane.store.store import Compare
from springtide.errors import FailedPrecondition, Internal, Unavailable
from springtide.model.pool import Pool, PoolSpec
from springtide.model.record import Event

WRITER = """
import asyncio, sys, pathlib
from controlplane.core.snapshot import Put
from controlplane.store.sqlite import SqliteStore
from springtide.model.pool import Pool, PoolSpec
from springtide.model.record import Event

async def main():
    store = SqliteStore(pathlib.Path(sys.argv[1]))
    await store.open()
    revision = (await store.snapshot()).revision
    while True:
        revision += 1
        a, b = (Pool(PoolSpec(name, "sim", model=str(revision))) for name in ("a", "b"))
        await store.commit([], [Put(a), Put(b)], [], [Event(0.0, "x", "a", str(revision))])
        print(revision, flush=True)

asyncio.run(main())
"""


def write_and_kill(path: Path) -> int:
    """Starts a writer, kills it after some commits, and returns the last revision that it was told is durable."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        acknowledged = 0
        while acknowledged % 20 == 0:
            acknowledged = int(writer.stdout.readline())
        while acknowledged % 20 != 0:
            acknowledged = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        return int(rest[-1]) if rest else acknowledged
    finally:
        writer.kill()
        writer.wait()


async def test_it_survives_sigkill_with_whole_commits_only(tmp_path) -> None:
    """CP10: killed in the middle of commits, three times; what was acknowledged is there, and nothing is half there."""
    store_ids = set()
    for _ in range(3):
        acknowledged = await asyncio.to_thread(write_and_kill, tmp_path)
        store = SqliteStore(tmp_path)
        store_ids.add(await store.open())
        records = await store.snapshot()
        assert records.revision in (acknowledged, acknowledged + 1)
        models = {pool.spec.model for pool in records.pools.values()}
        assert models == {str(records.revision)}
        events = await store.events(limit=100_000)
        assert [int(event.status) for event in events] == list(range(1, records.revision + 1))
        await store.close()
    assert len(store_ids) == 1


async def test_a_full_disk_fails_the_commit_whole_and_the_store_goes_on(tmp_path) -> None:
    """A commit that cannot be written changes nothing; when there is room again the next one succeeds."""
    store = SqliteStore(tmp_path)
    await store.open()
    await store.commit([], [Put(Pool(PoolSpec("small", "sim")))])
    connection = store._connection
    assert connection is not None

    def limit(pages: int) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    used = (await store._in_thread(lambda: connection.execute("PRAGMA page_count").fetchone()))[0]
    await store._in_thread(limit, used)
    big = Pool(PoolSpec("big", "sim", model="x" * 200_000))
    with pytest.raises(Unavailable) as caught:
        await store.commit([Compare("pool", "big", 0)], [Put(big)], [], [Event(0.0, "a", "b", "c")])
    assert caught.value.reason == "STORE_FULL"
    assert caught.value.remedy
    records = await store.snapshot()
    assert (records.revision, list(records.pools)) == (1, ["small"])
    assert await store.events() == ()
    await store._in_thread(limit, 1_000_000)
    committed = await store.commit([Compare("pool", "big", 0)], [Put(big)])
    assert committed.revision == 2
    await store.close()


async def test_a_second_control_plane_on_the_folder_is_refused(tmp_path) -> None:
    first, second = SqliteStore(tmp_path), SqliteStore(tmp_path)
    await first.open()
    with pytest.raises(FailedPrecondition) as caught:
        await second.open()
    assert caught.value.reason == "DATA_DIR_IN_USE"
    assert str(os.getpid()) in str(caught.value)
    await first.close()
    assert await SqliteStore(tmp_path).open() == await reopen(tmp_path)


async def reopen(path: Path) -> str:
    connection = sqlite3.connect(path / "controlplane.sqlite")
    try:
        return str(connection.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()[0])
    finally:
        connection.close()


async def test_a_damaged_file_is_named(tmp_path) -> None:
    (tmp_path / "controlplane.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(Internal) as caught:
        await SqliteStore(tmp_path).open()
    assert caught.value.reason == "STORE_DAMAGED"
    assert "controlplane.sqlite" in str(caught.value)


async def test_a_locked_file_is_named(tmp_path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    connection = store._connection
    assert connection is not None
    await store._in_thread(connection.execute, "PRAGMA busy_timeout = 10")
    rival = sqlite3.connect(tmp_path / "controlplane.sqlite", isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable) as caught:
        await store.commit([], [Put(Pool(PoolSpec("a", "sim")))])
    assert caught.value.reason == "STORE_LOCKED"
    rival.execute("ROLLBACK")
    rival.close()
    await store.commit([], [Put(Pool(PoolSpec("a", "sim")))])
    await store.close()


async def test_a_file_of_a_later_version_is_left_alone(tmp_path) -> None:
    """Rule 14: nothing is downgraded silently."""
    store = SqliteStore(tmp_path)
    await store.open()
    await store.close()
    connection = sqlite3.connect(tmp_path / "controlplane.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(FailedPrecondition) as caught:
        await SqliteStore(tmp_path).open()
    assert caught.value.reason == "STORE_TOO_NEW"


async def test_history_is_bounded(tmp_path) -> None:
    """Rule 10."""
    store = SqliteStore(tmp_path, events_kept=50)
    await store.open()
    for number in range(300):
        await store.commit([], [], [], [Event(0.0, "x", "a", str(number))])
    events = await store.events(limit=10_000)
    assert 50 <= len(events) < 150
    assert events[-1].status == "299"
    await store.close()
