"""`--workers N` as processes: one router to everybody else, one view of load among them, nothing left behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from springtide.v1 import generation_pb2 as pb
from tests.dataplane.fakes import DONE, SSE_HEAD, Peer, chunk, client, event, post, says, stream_of, until, upstream
from tests.router.fakes import ControlPlane, control_plane, generation_stub, table, worker
from tests.router.test_http_front import STREAM, stream


@dataclass
class Several:
    process: asyncio.subprocess.Process
    folder: Path

    @property
    def found(self) -> dict[str, Any]:
        return json.loads((self.folder / "router.json").read_text())  # type: ignore[no-any-return]

    def port(self, name: str) -> int:
        return int(str(self.found[name]).rpartition(":")[2])

    async def metric(self, name: str) -> float:
        """Summed over its labels."""
        async with client(self.port("metrics")) as c:
            c.send(b"GET /metrics HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            lines = (await c.rest()).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def several(folder: Path, cp: ControlPlane, *arguments: str, count: int = 2) -> AsyncIterator[Several]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--workers", str(count), "--listen", "127.0.0.1:0", "--router-id", "r",
        "--http-listen", "127.0.0.1:0", "--metrics-port", "0", "--data-dir", str(folder), "--controlplane", cp.address,
        "--drain-timeout-s", "5", *arguments, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    made = Several(process, folder)
    try:
        await until((folder / "router.json").exists, 30)
        await until(lambda: len({hello.router_id for hello in cp.hellos}) == count, 20)
        await until(lambda: len(cp.acks) >= count)
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_one_router_to_everybody_and_an_orderly_end(tmp_path: Path) -> None:
    """Both ports, one discovery file, one metrics endpoint; a session with the control plane for each process."""
    async with (
        upstream(*[says(stream_of(2))] * 50) as up,
        control_plane(table(worker("a", up.port))) as cp,
        several(tmp_path, cp) as r,
    ):
        assert r.found["pid"] == r.process.pid
        assert {hello.router_id for hello in cp.hellos} == {"r-0", "r-1"}
        pids = r.found["processes"]
        assert len(set(pids)) == 2
        assert all(alive(pid) for pid in pids)
        for _ in range(12):  # one connection each: the kernel spreads them
            async with client(r.port("http")) as c:
                assert await stream(c) == event(0) + event(1) + DONE
        async with generation_stub(r.found["grpc"]) as stub:
            assert [m.name for m in (await stub.ListModels(pb.ListModelsRequest())).models] == ["m"]
        assert await r.metric("springtide_router_requests_total") == 12
        assert await r.metric("springtide_router_workers") == 1
        r.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(r.process.wait(), 20) == 0
        assert not any(alive(pid) for pid in pids)
        assert not list(tmp_path.glob("router.?.json"))  # noqa: ASYNC240


async def test_processes_hold_back_what_a_worker_cannot_take(tmp_path: Path) -> None:
    """One view of load: 24 streams over 3 processes at a worker that takes 6. No refusal is needed for it, except where
    two take a place that became free in the same instant."""
    gate = asyncio.Event()
    running = most = 0

    async def hold(peer: Peer) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await peer.send(SSE_HEAD + chunk(event(0)))
        await gate.wait()
        running -= 1
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    async with (
        upstream(*[hold] * 24) as up,
        control_plane(table(worker("a", up.port, max_in_flight=6))) as cp,
        several(tmp_path, cp, count=3) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        # POOL holds 8 requests at the most: the bound is the router's, not each process's.
        clients = [await stack.enter_async_context(client(r.port("http"))) for _ in range(24)]
        for c in clients[:6]:
            c.send(post("/v1/completions", STREAM))
            await c.head()
        for c in clients[6:14]:
            c.send(post("/v1/completions", STREAM))

        async def waiting() -> bool:
            return await r.metric("springtide_router_waiting") == 8

        for _ in range(200):
            if await waiting():
                break
            await asyncio.sleep(0.05)
        assert await waiting()
        assert running == 6
        for c in clients[14:]:
            c.send(post("/v1/completions", STREAM))
            assert (await c.head()).startswith(b"HTTP/1.1 429")
        gate.set()
        for c in clients[:6]:
            assert await c.chunks() == event(0) + DONE
        for c in clients[6:14]:
            assert (await c.head()).startswith(b"HTTP/1.1 200")
            assert await c.chunks() == event(0) + DONE
        assert most <= 6 + 2


async def test_a_killed_process_is_started_again_and_its_load_is_forgotten(tmp_path: Path) -> None:
    async def never(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await peer.closed()

    async with (
        upstream(*[never] * 4, *[says(stream_of(1))] * 20) as up,
        control_plane(table(worker("a", up.port, max_in_flight=4))) as cp,
        several(tmp_path, cp) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(4):
            c = await stack.enter_async_context(client(r.port("http")))
            c.send(post("/v1/completions", STREAM))
            await c.head()
        before = r.found["processes"]
        for pid in before:  # all at once: what they had is gone, whichever had it
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not set(before) & set(r.found["processes"]), 30)
        await until(lambda: len(cp.streams) == 2, 20)
        await until(lambda: len(cp.acks) >= 4, 20)
        async with client(r.port("http")) as c:
            assert await stream(c) == event(0) + DONE
        assert r.process.returncode is None


async def test_the_parents_death_ends_its_processes(tmp_path: Path) -> None:
    async with control_plane(table()) as cp, several(tmp_path, cp) as r:
        pids = r.found["processes"]
        r.process.kill()
        await r.process.wait()
        await until(lambda: not any(alive(pid) for pid in pids), 20)


@pytest.mark.parametrize("setting", ["--listen", "--http-listen"])
async def test_a_port_in_use_is_one_clear_line(tmp_path: Path, setting: str) -> None:
    """Also where the other one would share it: a second router must not take half of the connections."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "--workers", "2", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
            "--data-dir", str(tmp_path), "--controlplane", "127.0.0.1:1",
            setting, f"127.0.0.1:{taken.getsockname()[1]}", stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    last = stderr.decode().strip().splitlines()[-1]
    assert last.startswith("router: ")
    assert setting.removeprefix("--").replace("-", "_") in last
    assert not (tmp_path / "router.json").exists()


async def test_what_ends_a_process_at_the_start_ends_the_router(tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    config.write_text('[security]\ntls_cert = "/nowhere.pem"\ntls_key = "/nowhere.pem"\n')
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--config", str(config), "--workers", "2", "--listen", "127.0.0.1:0",
        "--http-listen", "127.0.0.1:0", "--data-dir", str(tmp_path), "--controlplane", "127.0.0.1:1",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert b"/nowhere.pem" in stderr
