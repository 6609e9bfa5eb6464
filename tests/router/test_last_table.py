"""The table on disk: what is read is what was written, or nothing (DESIGN rule 8)."""

import asyncio
import logging
import os
import random
from pathlib import Path

import pytest

from router import last_table
from router.last_table import LastTable, decode, encode
from springtide.errors import InvalidArgument
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingTable
from tests.dataplane.fakes import until

TABLE = RoutingTable(
    "store",
    7,
    {"p": RoutedPool("p", "m", max_workers=3, engine="vllm", start_up_s=41.0)},
    {f"w{n}": RoutedWorker(f"w{n}", "p", 100 + n, f"127.0.0.1:{n + 1}", labels={"a": "b"}) for n in range(3)},
)


def test_what_is_read_is_what_was_written() -> None:
    assert decode(encode(TABLE)) == TABLE
    assert decode(encode(RoutingTable())) == RoutingTable()


def test_traces_of_starts_end_with_the_life_in_which_they_began() -> None:
    worker = RoutedWorker("w", "p", 1, "127.0.0.1:1", traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
    assert decode(encode(RoutingTable("s", 1, {}, {"w": worker}))).workers["w"].traceparent == ""


def test_any_damage_is_noticed() -> None:
    """Each byte changed, each length cut, and bytes that are nobody's."""
    whole = encode(TABLE)
    rng = random.Random(1)
    damaged = [whole[:at] for at in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole + b"\0", b"", b"{}", rng.randbytes(1000)]
    for raw in damaged:
        with pytest.raises((ValueError, InvalidArgument)):
            decode(raw)


async def saved(last: LastTable, path: Path, *tables: RoutingTable) -> None:
    running = asyncio.create_task(last.run())
    for table in tables:
        last.changed(table)
        await asyncio.sleep(0)
    if tables:
        await until(path.exists)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_last_of_many_changes_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "router.table"
    later = RoutingTable("store", 9, TABLE.pools, {})
    await saved(LastTable(path), path, TABLE, RoutingTable("store", 8, TABLE.pools, {}), later)
    assert LastTable(path).load() == later
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["router.table"]  # noqa: PTH208 (it is small)


async def test_one_that_only_reads_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "router.table"
    last = LastTable(path, writes=False)
    last.changed(TABLE)
    await saved(last, path)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"no table", encode(TABLE)[:-1], b"x" * 100_000])
async def test_a_damaged_file_is_said_and_left(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "router.table"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert LastTable(path).load() is None
    assert str(path) in caplog.text
    assert path.read_bytes() == content


async def test_no_file_is_nothing_to_speak_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert LastTable(tmp_path / "router.table").load() is None
    assert not caplog.records


async def test_a_table_that_is_too_large_leaves_no_old_one_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "router.table"
    await saved(LastTable(path), path, TABLE)
    monkeypatch.setattr(last_table, "MAX_BYTES", 100)
    assert LastTable(path).load() is None
    last = LastTable(path)
    running = asyncio.create_task(last.run())
    last.changed(TABLE)
    await until(lambda: not path.exists())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = LastTable(tmp_path / "gone" / "router.table")
    running = asyncio.create_task(last.run())
    last.changed(TABLE)
    await until(lambda: "cannot be written" in caplog.text)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
