"""The whole loop with real processes: a pool needs nodes, a provisioner starts agents, load falls, nodes go back; and
what is killed on the way changes nothing of it."""

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from springtide.v1 import controlplane_pb2 as cp
from tests.provisioner.local_stack import LocalStack, NetworkedStack
from tests.provisioner.slurm_stack import Load
from tests.system.stack import wait_for

NODES, GPUS = 3, 2


class Watch:
    """The most agents that were ever there at once."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._over = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            self.most = max(self.most, len(self._stack.agents()))

    def stop(self) -> int:
        self._over.set()
        self._thread.join(10)
        return self.most


def scale(stack: LocalStack, workers: int) -> None:
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=workers), timeout=5, wait_for_ready=True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nodes_come_and_go_and_kills_change_nothing(tmp_path: Path) -> None:
    """CP9, CP10, CP13, CP16, CP17, PV1, PV3, NA13: 0 -> 3 -> 1 -> 0 nodes under load, with kill -9 of the provisioner
    and of the control plane in the middle of each; zero failed requests, no orphan, never more nodes than needed."""
    stack = LocalStack(tmp_path)
    stack.add_provisioner("local", nodes=9, gpus=GPUS)
    stack.start("controlplane", "router", "local")
    watch = Watch(stack)
    try:
        stack.pool(most=6)
        scale(stack, 1)
        stack.wait_workers("ACTIVE", 1, 60)
        stack.wait_routable("demo")
        load = Load(stack.http, "demo")
        _grow_under_kills(stack)
        _shrink_under_kills(stack)
        report = load.stop()
        assert report.results
        assert not report.failed, report.explain()
        assert not report.inexact, report.explain()
        scale(stack, 0)
        wait_for("no agent left", lambda: not stack.agents(), 60)
        wait_for("no node left", lambda: not stack.states("UP", "REQUESTED", "RELEASING", "LOST"), 30)
        assert watch.stop() <= NODES, stack.explain()
    finally:
        watch.stop()
        said = stack.explain() if "controlplane" in stack.processes else ""
        stack.stop()
    assert stack.strays() == [], said


def _grow_under_kills(stack: LocalStack) -> None:
    scale(stack, NODES * GPUS)
    wait_for("nodes asked for", lambda: stack.states("REQUESTED", "UP")[1:], 30)
    stack.kill("local")
    stack.start("local")
    stack.kill("controlplane")
    wait_for("word of that", lambda: "no session with the control plane" in stack.log("local"), 30)
    stack.start("controlplane")
    stack.wait_nodes("UP", NODES, 60)
    stack.wait_workers("ACTIVE", NODES * GPUS, 60)
    assert len(stack.agents()) == NODES, stack.explain()


def _shrink_under_kills(stack: LocalStack) -> None:
    scale(stack, 1)
    wait_for("a drain", lambda: stack.workers("DRAINING") or len(stack.workers("ACTIVE")) < NODES * GPUS, 30)
    stack.kill("controlplane")
    stack.kill("local")
    stack.start("controlplane")
    stack.start("local")
    stack.wait_workers("ACTIVE", 1, 60)
    wait_for("what is idle is given back", lambda: len(stack.agents()) == 1, 60)
    stack.wait_nodes("UP", 1)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_agent_that_is_killed_comes_back_with_its_streams(tmp_path: Path) -> None:
    """PV3, CM3, rule 8: kill -9 of an agent: started again, its engine is adopted, no request fails."""
    stack = LocalStack(tmp_path)
    stack.add_provisioner("local", nodes=2, gpus=1)
    stack.start("controlplane", "router", "local")
    try:
        stack.pool(most=2)
        scale(stack, 1)
        (worker,) = stack.wait_workers("ACTIVE", 1, 60)
        stack.wait_routable("demo")
        load = Load(stack.http, "demo")
        (agent,) = stack.agents()
        os.kill(agent, signal.SIGKILL)
        wait_for("another agent", lambda: [pid for pid in stack.agents() if pid != agent], 30)
        wait_for("heard again", lambda: stack.states("UP")[0].heartbeat_age_s < 1.0, 30)
        report = load.stop()
        assert not report.failed, report.explain()
        (after,) = stack.workers("ACTIVE")
        assert after.incarnation == worker.incarnation, "adopted, not loaded again"
        shape = _cluster_status(stack)
        assert (shape["model"], shape["ready_workers"], shape["max_nodes"]) == ("demo", 1, 2)
        wait_for("requests served", lambda: _cluster_status(stack)["workers"][0]["requests_served"], 10)
        scale(stack, 0)
        wait_for("no agent left", lambda: not stack.agents(), 60)
    finally:
        stack.stop()
    assert stack.strays() == []


def _cluster_status(stack: LocalStack) -> dict[str, Any]:
    """CM3: the third document's view, over HTTP."""
    address = json.loads((stack.folder / "cp" / "controlplane.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://{address}/cluster_status?pool=demo", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_over_a_network_everybody_needs_a_token_of_his_own(tmp_path: Path) -> None:
    """Rule 13, CP9, CM3: TLS and tokens from the start: an operator makes the provisioner's token, the order brings the
    agents' one; both are in no command line and no log. Without one nobody gets in. Views from the command line."""
    stack = NetworkedStack(tmp_path)
    stack.add_provisioner("local", nodes=2, gpus=1)
    try:
        stack.start("controlplane", "router")
        stack.pool(most=2)
        scale(stack, 1)
        stack.environ["SPRINGTIDE_TOKEN"] = "guess"
        stack.start("local")
        wait_for("a refusal", lambda: "carries no token" in stack.log("local"), 20)
        stack.kill("local")
        stack.environ["SPRINGTIDE_TOKEN"] = "operator"
        token = stack.springtide("token", "create", "--provisioner", "local", "--for", "1h")
        assert token.startswith("stj1.")
        stack.environ["SPRINGTIDE_TOKEN"] = token
        stack.start("local")
        (worker,) = stack.wait_workers("ACTIVE", 1, 60)
        stack.environ["SPRINGTIDE_TOKEN"] = "operator"
        shape = json.loads(stack.springtide("status", "--json", "--shape", "cluster", "--pool", "demo"))
        assert (shape["ready_workers"], shape["workers"][0]["worker_id"]) == (1, worker.worker_id)
        assert "local" in stack.springtide("provisioners")
        assert f"{worker.node_id}" in stack.springtide("nodes")
        _no_secret(stack, token)
        scale(stack, 0)
        wait_for("no agent left", lambda: not stack.agents(), 60)
    finally:
        stack.stop()
    assert stack.strays() == []


def _no_secret(stack: NetworkedStack, token: str) -> None:
    """Neither token is in a log or on a command line; each is in the environment of whom it is for."""
    (agent,) = stack.agents()
    environ = Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
    (node_token,) = [item.partition(b"=")[2] for item in environ if item.startswith(b"SPRINGTIDE_TOKEN=")]
    assert node_token.startswith(b"stj1.")
    assert node_token != token.encode()
    logs = [path for path in stack.folder.rglob("*.log") if path.is_file()]
    assert len(logs) >= 5
    for secret in (token.encode(), node_token):
        for path in logs:
            assert secret not in path.read_bytes(), path
        for pid in stack.strays():
            assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    engines = [pid for pid in stack.strays() if b"nodeagent.shim" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert engines
    for pid in engines:
        assert b"SPRINGTIDE_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
