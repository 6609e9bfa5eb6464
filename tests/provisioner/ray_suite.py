"""The provider `ray` on a real Ray cluster of three nodes on this host; run by test_ray.py with .venv-ray's Python.

The cluster is made by the commands of the growing cluster: started with the head and one node, one is added, and the
next one fails because no GPU is left.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from provisioner.context import ProviderContext
from provisioner.core.provider import Phase, ProvidedNode, Refused
from provisioner.ray.cluster import RayCluster
from provisioner.ray.keeper import AgentKeeper
from provisioner.ray.provider import RayProvider
from provisioner.ray.settings import RaySettings
from tests.ports import free_port
from tests.provisioner.conformance import CHECKS, Rig
from tests.provisioner.slurm_stack import Load
from tests.system.conftest import ENGINE, TIMING
from tests.system.stack import ROOT, Stack, wait_for

pytestmark = pytest.mark.timeout(180)
GPUS = 3


class Growing:
    """`python -m provisioner.ray` in a short folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "provisioner.ray", *arguments, "--data-dir", str(self.folder)]

    def up(self, workers: int) -> None:
        with (self.folder / "out").open("ab") as out:
            flags = ("--gpus", str(GPUS), "--port", str(self.port))
            self.process = subprocess.Popen(
                self.command("up", str(workers), *flags), stdout=out, stderr=out, cwd=ROOT, start_new_session=True
            )

        def started() -> bool:
            said = (self.folder / "out").read_text()
            assert self.process is not None
            assert self.process.poll() is None, said
            return "Ctrl-C ends it" in said

        wait_for("the Ray cluster", started, 120)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self.command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=120)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def pid(self, gpu: int) -> int:
        """Of the `ray start --block` of that GPU's node."""
        return int(json.loads((self.folder / f"node-{gpu:03}.json").read_text())["pid"])

    def processes(self, *words: str) -> list[int]:
        """Live processes of the cluster whose command line has these words."""
        mark = f"SPRINGTIDE_RAY={self.folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if mark not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                line = (process / "cmdline").read_text().replace("\0", " ")
                alive = (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if alive and all(word in line for word in words):
                    found.append(int(process.name))
        return found

    def down(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(90)
        self.process = None
        return code


def test_the_keeper_travels_without_this_package(tmp_path: Path) -> None:
    """PV5: a node has Ray and none of our packages: what the keeper needs goes with it."""
    RayCluster(RaySettings(), "p1")
    (tmp_path / "keeper").write_bytes(ray.cloudpickle.dumps(AgentKeeper))
    load = "import ray, sys; found = ray.cloudpickle.loads(open('keeper', 'rb').read())"
    load += "; print(found.__name__, 'springtide' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", load], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["AgentKeeper", "False"], done.stderr


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Growing]:
    """The head and one node, then one more. Ended without a rest."""
    folder = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
    found = Growing(folder)
    try:
        found.up(1)
        assert found.run("add").returncode == 0
        yield found
        assert found.down() == 0
        assert found.processes() == []
    finally:
        for pid in found.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


class RayRig(Rig):
    set_name = "ray-1"
    most = GPUS
    bound_s = 60.0

    def __init__(self, cluster: Growing, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._context = ProviderContext(f"suite-{secrets.token_hex(3)}", folder, "127.0.0.1:1")
        self.opened: list[RayProvider] = []

    def settings(self) -> dict[str, Any]:
        return {
            "address": self.cluster.address,
            "agent_host": "127.0.0.1",
            "simulated_gpus": True,
            "data_dir": str(self._folder / "agents"),
            "stop_timeout_s": 5.0,
            "silence_s": 12.0,
        }

    async def open(self) -> RayProvider:
        found = RayProvider(RaySettings(**self.settings()), self._context)
        self.opened.append(found)
        return found

    async def real(self) -> int:
        return len(self.cluster.processes("-m nodeagent", str(self._folder)))

    async def cut(self) -> bool:
        self._gcs(signal.SIGSTOP)
        return True

    async def mend(self) -> None:
        self._gcs(signal.SIGCONT)

    def _gcs(self, number: int) -> None:
        for pid in self.cluster.processes("gcs_server"):
            os.kill(pid, number)

    async def ended(self, provider: RayProvider, node_id: str) -> ProvidedNode:
        """The node, once it has ended."""

        async def over() -> bool:
            return any(n.phase is Phase.ENDED for n in await provider.list() if n.node_id == node_id)

        await self.until(over, f"the end of {node_id}")
        return next(n for n in await provider.list() if n.node_id == node_id)


@pytest.fixture
async def rig(ray_cluster: Growing, tmp_path: Path) -> AsyncIterator[RayRig]:
    found = RayRig(ray_cluster, tmp_path)
    yield found
    last = await found.open()
    for group in {node.group_id for node in await last.list() if node.phase is not Phase.ENDED}:
        await last.stop(group, ())

    async def empty() -> bool:
        return all(n.phase is Phase.ENDED for n in await last.list()) and await found.real() == 0

    await found.until(empty, "nothing left")
    for provider in found.opened:
        with contextlib.suppress(RuntimeError):  # closed by its test
            await provider.close()


def test_no_gpu_is_left(ray_cluster: Growing, tmp_path: Path) -> None:
    """PV5: added until the GPUs run out, and then it fails in one clean line; too many at the start, too; and what is
    there goes on."""
    third = ray_cluster.run("add")
    assert third.returncode == 1
    assert third.stderr.startswith("ray: all 3 GPUs of this host are in the cluster; there is no GPU 3.")
    assert len(third.stderr.splitlines()) == 1
    nobody = subprocess.run(
        [sys.executable, "-m", "provisioner.ray", "add", "--data-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert nobody.returncode == 4
    flags = ["up", "3", "--gpus", "3", "--data-dir", str(tmp_path)]
    many = subprocess.run([sys.executable, "-m", "provisioner.ray", *flags], cwd=ROOT, capture_output=True, text=True)
    assert many.returncode == 2
    assert "needs 4 GPUs" in many.stderr
    assert "GPUs in use: [0, 1, 2] of 3" in ray_cluster.run("status").stdout


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Any, rig: RayRig) -> None:
    """PV1, PV5: the suite of all providers, with a head that falls silent."""
    await check(rig)


async def test_one_agent_on_each_node(rig: RayRig) -> None:
    """PV5: each order gets a Ray node of its own, in a placement group pinned to it; the one too many is refused."""
    provider = await rig.open()
    orders = [rig.order() for _ in range(GPUS)]
    for order in orders:
        await provider.start(order)
    nodes = await provider.list()
    assert len({node.reference for node in nodes}) == GPUS
    (offer,) = await provider.capability_sets()
    assert (offer.max_nodes, offer.keep_nodes, offer.available_nodes, offer.gpus_per_node) == (GPUS, GPUS, 0, 1)
    with pytest.raises(Refused) as refused:
        await provider.start(rig.order())
    assert refused.value.status == "WORKER_GROUP_TOO_MUCH"


async def test_an_agent_that_ends_gives_its_node_back(rig: RayRig) -> None:
    """PV5: a crashed agent, and a keeper that is killed: both are ends, the placement group goes, the node is free."""
    provider = await rig.open()
    first, second = rig.order(), rig.order()
    await provider.start(first)

    async def runs() -> bool:
        return await rig.real() == 1

    await rig.until(runs, "the agent")
    os.kill(rig.cluster.processes("-m nodeagent", first.group_id)[0], signal.SIGKILL)
    node = await rig.ended(provider, first.group_id)
    assert node.reason in ("START_FAILED", "AGENT_ENDED")
    await provider.start(second)
    await rig.until(runs, "the second agent")
    (keeper,) = rig.cluster.processes("ray::AgentKeeper")
    os.kill(keeper, signal.SIGKILL)
    assert (await rig.ended(provider, second.group_id)).reason == "AGENT_LOST"

    async def gone() -> bool:
        return await rig.real() == 0

    await rig.until(gone, "the agent whose keeper died")
    (offer,) = await provider.capability_sets()
    assert offer.available_nodes == GPUS


@pytest.fixture
def stack(ray_cluster: Growing, tmp_path: Path) -> Iterator[Stack]:
    """Control plane, router, and a provisioner of kind ray."""
    found = Stack(tmp_path, timing=TIMING)
    del found.commands["nodeagent"]
    with (tmp_path / "controlplane.toml").open("a") as file:
        file.write("[nodes]\nidle_s = 2.0\nlost_release_s = 2.0\nbackoff_s = 0.5\n")
    provider = {
        "address": ray_cluster.address,
        "agent_host": "127.0.0.1",
        "simulated_gpus": True,
        "data_dir": str(tmp_path / "agents"),
        "stop_timeout_s": 10.0,
    }
    (tmp_path / "provisioner.toml").write_text(
        f'kind = "ray"\nid = "ray"\ncontrolplane = ["{found.address}"]\ndata_dir = "{tmp_path}/provisioner"\n'
        "poll_interval_s = 0.5\nreport_interval_s = 0.25\n[provider]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in provider.items())
    )
    found.commands["provisioner"] = ["-m", "provisioner", "--config", str(tmp_path / "provisioner.toml")]
    try:
        yield found
    finally:
        # The provisioner first: while it runs it answers each agent's end with a new agent.
        provisioner = found.processes.pop("provisioner", None)
        if provisioner is not None:
            provisioner.terminate()
            provisioner.wait(30)
        for pid in ray_cluster.processes("-m nodeagent", str(tmp_path)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_for("the agents' ends", lambda: not ray_cluster.processes("-m nodeagent", str(tmp_path)))
        found.stop()
        assert found.strays() == []


def test_nodes_that_join_are_used_and_those_that_leave_are_lost(ray_cluster: Growing, stack: Stack) -> None:
    """PV5, CP12: a pool on all Ray nodes; one leaves under load and one joins again: no request fails."""
    stack.start()
    policy = {"workers": GPUS}
    stack.apply(
        name="demo",
        engine="sim",
        min_workers=0,
        max_workers=GPUS,
        engine_args=ENGINE,
        policy_name="static",
        policy=policy,
    )
    stack.wait_workers("ACTIVE", GPUS, 90)
    stack.wait_routable("demo")
    load = Load(stack.http, "demo")
    try:
        wait_for("some answers", lambda: len(load.results) > 5)
        os.killpg(ray_cluster.pid(GPUS - 1), signal.SIGKILL)  # the raylet of one node
        stack.wait_workers("ACTIVE", GPUS - 1, 60)
        wait_for("the end of its process", lambda: "[0, 1] of 3" in ray_cluster.run("status").stdout, every_s=0.5)
        added = ray_cluster.run("add")
        assert added.returncode == 0, added.stderr
        stack.wait_workers("ACTIVE", GPUS, 90)
    finally:
        report = load.stop()
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
