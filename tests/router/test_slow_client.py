"""Clients that do not read what they asked for: the engine is held back, and the router's memory stays as it was."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.dataplane.fakes import DONE, SSE_HEAD, Peer, chunk, post, until, upstream
from tests.router.fakes import control_plane, table, worker
from tests.router.test_http_front import STREAM
from tests.router.test_process import flags, start

CLIENTS = 8
EVENT = b'data: {"choices":[{"text":"' + b"x" * 16_000 + b'"}]}\n\n'
MUCH = 64 * 1024 * 1024
"""What an engine has for each client: more than all buffers on the way."""


@asynccontextmanager
async def router_process(folder: Path, address: str) -> AsyncIterator[tuple[int, psutil.Process]]:
    process = await start(*flags(folder, address))
    try:
        found = folder / "router.json"
        await until(found.exists, 20)
        yield int(json.loads(found.read_text())["http"].rpartition(":")[2]), psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_what_nobody_reads_stays_at_the_engine(tmp_path: Path) -> None:
    """F8: half a gigabyte for eight clients that never read, and then do."""
    sent: list[int] = []

    async def much(peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        number = len(sent)
        sent.append(0)
        while sent[number] < MUCH:
            await peer.send(chunk(EVENT))
            await peer.writer.drain()
            sent[number] += len(EVENT)
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    async def settled() -> int:
        """What the engines could send until nothing moved any more."""
        before, same = -1, 0
        while same < 10:
            total = sum(sent)
            same, before = (same + 1, total) if total == before else (0, total)
            await asyncio.sleep(0.05)
        return before

    async with (
        upstream(much) as up,
        control_plane(table(worker("a", up.port))) as cp,
        router_process(tmp_path, cp.address) as (port, process),
    ):
        await cp.acked(1)
        rss = process.memory_info().rss
        readers = []
        for _ in range(CLIENTS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(post("/v1/completions", STREAM))
            readers.append((reader, writer))
        await until(lambda: len(sent) == CLIENTS, 20)
        held = await asyncio.wait_for(settled(), 30)
        assert held < CLIENTS * MUCH / 2, "the engines were not held back"
        assert process.memory_info().rss - rss < 32 * 1024 * 1024
        reader, _ = readers[0]
        got = 0
        async with asyncio.timeout(60):  # it goes on for one that reads after all
            while got < MUCH:
                got += len(await reader.read(1024 * 1024))
        for _, writer in readers:
            writer.close()
