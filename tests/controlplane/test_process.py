"""The control plane as a process: restarts, refusals, signals. What runs on nodes never notices more than a pause."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from springtide.model.enums import Want
from springtide.model.routing import PoolReport
from springtide.rpc import channel
from springtide.v1 import controlplane_pb2 as pb
from tests.controlplane.harness import FakeAgent, FakeRouter, operator, until

TIMING = """
[timing]
heartbeat_interval_s = 0.1
suspect_after_s = 1.0
lease_s = 4.0
grace_s = 4.0
sample_interval_s = 0.1
monitoring_interval_s = 0.5
"""
POOL = """
[[pools]]
name = "chat"
engine = "sim"
min_workers = 2
max_workers = 3
policy = "static"
"""


class Process:
    """`python -m controlplane` with its own folder."""

    def __init__(self, folder: Path, listen: str = "127.0.0.1:0", pools: str = POOL, *flags: str) -> None:
        self.folder = folder
        self.listen = listen
        self.flags = flags
        folder.mkdir(exist_ok=True)
        self.config = folder / "config.toml"
        self.config.write_text(TIMING + pools)
        self.discovery = folder / "data" / "controlplane.json"

    async def start(self) -> None:
        command = ["-m", "controlplane", "--config", str(self.config), "--data-dir", str(self.folder / "data")]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--listen", self.listen, *self.flags, stderr=asyncio.subprocess.PIPE
        )

    async def ready(self) -> str:
        """Its address, once this very process listens."""

        def found() -> dict[str, Any] | None:
            assert self.process.returncode is None, "it ended"
            with contextlib.suppress(OSError, ValueError):
                content: dict[str, Any] = json.loads(self.discovery.read_text())
                return content if content["pid"] == self.process.pid else None
            return None

        self.found = await until(found, "discovery file", bound_s=30)
        return str(self.found["grpc"])

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def ended(self) -> tuple[int, str]:
        _, stderr = await asyncio.wait_for(self.process.communicate(), 30)
        return self.process.returncode or 0, stderr.decode()


@contextlib.asynccontextmanager
async def running(
    folder: Path, *arguments: str, pools: str = POOL, listen: str = "127.0.0.1:0"
) -> AsyncIterator[Process]:
    made = Process(folder, listen, pools, *arguments)
    await made.start()
    try:
        yield made
    finally:
        if made.process.returncode is None:
            await made.kill()


async def test_killed_and_started_again_it_converges_and_stops_nothing(tmp_path) -> None:
    """CP4, CP10, rule 8: SIGKILL; the same store, node and routes come back; no STOP, no second start."""
    async with running(tmp_path / "cp") as first:
        address = await first.ready()
        async with FakeAgent(address) as agent, FakeRouter(address) as router:
            router.demand(PoolReport("chat", 0))
            await until(lambda: len(router.table.workers) == 2, "two workers")
            table = dict(router.table.workers)
            decisions = await listed(address)
            await first.kill()
            async with running(tmp_path / "cp", listen=address) as second:
                assert await second.ready() == address
                before, messages = agent.answers, len(router.messages)
                await until(lambda: agent.answers > before + 5 and len(router.messages) > messages, "both are back")
                assert dict(router.table.workers) == table
                assert [want for _, want in agent.orders] == [Want.RUN, Want.RUN]
                assert sorted(agent.reports) == ["chat-1", "chat-2"]
                assert (await listed(address))[-len(decisions) :] == decisions
                async with channel(address) as ch:
                    status = await operator(ch).GetStatus(pb.GetStatusRequest())
                    assert status.store_id == router.table.store_id
                    assert len(status.workers) == 2


async def listed(address: str) -> list[int]:
    async with channel(address) as ch:
        answer = await operator(ch).ListDecisions(pb.ListDecisionsRequest(skip_holds=True))
        return [decision.decision_id for decision in answer.decisions]


async def test_an_empty_store_never_stops_an_engine(tmp_path) -> None:
    """DESIGN 3: generations compare within one store; an unknown engine is foreign, its GPUs count as taken."""
    async with running(tmp_path / "old") as old:
        agent = FakeAgent(await old.ready(), gpus=3)
        async with agent:
            await until(lambda: len(agent.reports) == 2)
    async with running(tmp_path / "new") as new:
        agent.address = await new.ready()
        known = set(agent.reports)
        async with agent, channel(agent.address) as ch:
            ops = operator(ch)
            await until(lambda: foreign(ops), "foreign engines are seen")
            node = (await ops.ListNodes(pb.ListNodesRequest())).nodes[0]
            assert node.foreign_workers == 2
            assert not set(node.free_gpus) & {gpu for key in known for gpu in agent.reports[key].gpu_ids}
            before = agent.answers
            await until(lambda: agent.answers > before + 10)
            assert Want.STOP not in {want for _, want in agent.orders}


async def foreign(ops: Any) -> bool:
    nodes = (await ops.ListNodes(pb.ListNodesRequest())).nodes
    return bool(nodes) and nodes[0].foreign_workers == 2


async def test_sigterm_ends_it_cleanly(tmp_path) -> None:
    """CM9: the discovery file names what is bound while the process serves, and goes with it."""
    async with running(tmp_path / "cp") as process:
        address = await process.ready()
        async with FakeAgent(address) as agent:
            await until(lambda: agent.answers > 2)
            process.process.send_signal(signal.SIGTERM)
            code, _ = await process.ended()
        assert code == 0
        assert not process.discovery.exists()


async def test_two_control_planes_on_one_folder_are_refused(tmp_path) -> None:
    async with running(tmp_path / "cp") as first:
        await first.ready()
        async with running(tmp_path / "cp") as second:
            code, stderr = await second.ended()
        assert code == 2
        (line,) = stderr.strip().splitlines()
        assert line.startswith("controlplane: data_dir = ")
        assert str(first.process.pid) in line


@pytest.mark.parametrize("seat", ["grpc", "metrics"])
async def test_a_port_in_use_names_the_setting_and_the_remedy(tmp_path, seat) -> None:
    """CM10, rule 15."""
    async with running(tmp_path / "one", "--metrics-port", "0") as first:
        await first.ready()
        taken = str(first.found[seat])
        flags = ["--metrics-port", taken.rpartition(":")[2]] if seat == "metrics" else []
        async with running(tmp_path / "two", *flags, listen=taken if seat == "grpc" else "127.0.0.1:0") as second:
            code, stderr = await second.ended()
        assert code == 2
        (line,) = stderr.strip().splitlines()
        assert taken in line
        assert ("listen" if seat == "grpc" else "metrics_port") in line


@pytest.mark.parametrize(
    ("config", "flags", "told"),
    [
        ("frobnicate = 1\n", [], "frobnicate"),
        ("[timing]\nlease_s = -1\n", [], "timing.lease_s"),
        ("[timing]\nheartbeat_interval_s = 30\n", [], "timing.suspect_after_s"),
        ("[timing]\nsuspect_after_s = 20\n", [], "timing.lease_s"),
        ('store = "paper"\n', [], "store"),
        ('[[pools]]\nname = "a"\n', [], "pools[0].engine"),
        ('[[pools]]\nname = "a"\nengine = "sim"\nmin_workers = 5\nmax_workers = 2\n', [], "spec.min_workers"),
        ('[[pools]]\nname = "a"\nengine = "sim"\ncolour = 2\n', [], "pools[0].colour"),
        ("", ["--listen", "0.0.0.0:0"], "listen"),
        ("", ["--listen", "nowhere"], "listen"),
        ("", ["--tls-cert", "/does/not/exist", "--tls-key", "/does/not/exist"], "tls"),
        ("", ["--log-level", "loud"], "log_level"),
    ],
)
async def test_a_start_that_cannot_work_says_which_setting_and_ends_with_2(tmp_path, config, flags, told) -> None:
    """CM5, rule 15: one clear line, nothing changed."""
    path = tmp_path / "bad.toml"
    path.write_text(config)
    listen = [] if "--listen" in flags else ["--listen", "127.0.0.1:0"]
    command = ["-m", "controlplane", "--config", str(path), "--data-dir", str(tmp_path / "data"), *listen, *flags]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = stderr.decode().strip().splitlines()
    assert process.returncode == 2, lines
    assert len(lines) == 1, lines
    assert told in lines[0]


async def test_health_reflection_and_metrics_of_the_process(tmp_path) -> None:
    """CP21, CM1: grpcurl works out of the box, and so does a scrape."""
    async with running(tmp_path / "cp", "--metrics-port", "0") as process:
        address = await process.ready()
        async with channel(address) as ch, FakeAgent(address) as agent:
            health = health_pb2_grpc.HealthStub(ch)
            for name in ("", *(f"springtide.v1.{s}Service" for s in ("Agent", "Routing", "ControlPlane"))):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(ch).ServerReflectionInfo(iter([asked]))
            names = {entry.name async for answer in call for entry in answer.list_services_response.service}
            assert "springtide.v1.ControlPlaneService" in names
            await until(lambda: len(agent.reports) == 2)
        url = f"http://{process.found['metrics']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        for name in ("active_workers", "draining_workers", "total_workers", "total_capacity", "desired_workers"):
            assert f'springtide_pool_{name}{{pool="chat"}}' in text
        assert 'springtide_pool_pending_requests{pool="chat"}' not in text, "no router: unknown, not zero"
        assert "springtide_commits_total" in text


async def test_readiness_and_watchdog_are_told_to_systemd(tmp_path) -> None:
    import socket

    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(20)
        os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"] = str(path), "400000"
        try:
            async with running(tmp_path / "cp") as process:
                said = await asyncio.to_thread(lambda: [receiver.recv(4096).decode() for _ in range(4)])
                process.process.send_signal(signal.SIGTERM)
                assert (await process.ended())[0] == 0
        finally:
            del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]
        assert said[0].startswith("READY=1")
        assert said.count("WATCHDOG=1") >= 2
        assert any(line.startswith("STATUS=1 pools") for line in said)
        rest = []
        receiver.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                rest.append(receiver.recv(4096).decode())
        assert "STOPPING=1" in rest
