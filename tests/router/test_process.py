"""`python -m router` as a process: discovery file, orderly end, clear start-up errors."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.dataplane.fakes import DONE, SSE_HEAD, Peer, chunk, client, event, post, says, stream_of, until, upstream
from tests.router.fakes import control_plane, table, worker
from tests.router.test_http_front import STREAM, stream


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *arguments, stderr=asyncio.subprocess.PIPE
    )


def flags(data_dir: Path, address: str) -> list[str]:
    return [
        "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--metrics-port", "0",
        "--data-dir", str(data_dir), "--controlplane", address,
    ]  # fmt: skip


async def test_serves_drains_on_sigterm_and_keeps_its_id(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slowly(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await gate.wait()
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    async with upstream(says(stream_of(1)), slowly) as up, control_plane(table(worker("a", up.port))) as cp:
        process = await start(*flags(tmp_path, cp.address))
        try:
            found = tmp_path / "router.json"
            await until(found.exists, 20)
            addresses = json.loads(found.read_text())
            assert addresses["pid"] == process.pid
            await cp.acked(1)
            port = int(addresses["http"].rpartition(":")[2])
            async with client(port) as c:
                assert await stream(c) == event(0) + DONE
                async with client(int(addresses["metrics"].rpartition(":")[2])) as scraper:
                    scraper.send(b"GET /metrics HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
                    assert b"springtide_router_requests_total" in await scraper.rest()
                c.send(post("/v1/completions", STREAM))
                await c.head()
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                gate.set()
                assert await c.chunks() == event(0) + DONE
            assert await asyncio.wait_for(process.wait(), 15) == 0
            assert addresses["router_id"] == (tmp_path / "router.id").read_text().strip() == cp.hellos[0].router_id
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--http-listen", "127.0.0.1:{taken}"], ["http_listen", "ss -ltnp"]),
        (["--listen", "127.0.0.1:{taken}"], ["listen", "ss -ltnp"]),
        (["--listen", "nowhere"], ["listen", "nowhere", "127.0.0.1:7400"]),
        (["--http-listen", "0.0.0.0:0"], ["http_listen", "0.0.0.0:0", "TLS"]),
        (["--controlplane", "x"], ["controlplane", "'x'"]),
        (["--config", "{file}"], ["listne", "Did you mean listen?"]),
    ],
)
async def test_start_up_errors_are_one_clear_line(tmp_path: Path, change: list[str], words: list[str]) -> None:
    config = tmp_path / "router.toml"
    config.write_text('listne = "127.0.0.1:1"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"taken": str(taken.getsockname()[1]), "file": str(config)}
        arguments = [part.format(**known) for part in change]
        process = await start(*flags(tmp_path, "127.0.0.1:1"), *arguments)
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    last = stderr.decode().strip().splitlines()[-1]
    assert last.startswith("router: ")
    assert all(word in last for word in words)
    assert not (tmp_path / "router.json").exists()
