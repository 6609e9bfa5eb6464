"""Hosts whose agents are simply there, told of by a provisioner of kind static: real processes, all left alone."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.system.conftest import ENGINE, TIMING
from tests.system.stack import Stack, wait_for

GPUS = 2
IDLE_S = 0.5
AGENTS = {"nodeagent": "node-a", "second": "node-b"}
# Of a node that a provisioner could stop each of these would soon be its end.
NODES = f"[nodes]\nidle_s = {IDLE_S}\nlost_release_s = 1.0\nregister_timeout_s = 2.0\nbackoff_s = 0.2\n"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Control plane, two agents and the provisioner that tells of them and of a third host that is off."""
    found = Stack(tmp_path, gpus=GPUS, timing=TIMING)
    with (tmp_path / "controlplane.toml").open("a") as file:
        file.write(NODES)
    del found.commands["router"]
    second = [part.replace("node-a", "node-b") for part in found.commands["nodeagent"]]
    second[second.index("--data-dir") + 1] = str(tmp_path / "second")
    found.commands["second"] = second
    (tmp_path / "static.toml").write_text(
        f'kind = "static"\nid = "racks"\ncontrolplane = ["{found.address}"]\ndata_dir = "{tmp_path / "static"}"\n'
        "poll_interval_s = 0.2\nreport_interval_s = 0.25\nmetrics_port = 0\n"
        '[[provider.sets]]\nname = "rack1"\nnodes = ["node-a", "node-b", "node-off"]\n'
        f'gpus_per_node = {GPUS}\nlabels = {{ zone = "a" }}\n'
    )
    found.commands["static"] = ["-m", "provisioner", "--config", str(tmp_path / "static.toml")]
    try:
        yield found.start()
    finally:
        for name in ("static", "second"):
            process = found.processes.pop(name, None)
            if process is not None:
                process.terminate()
                process.wait(20)
        found.stop()
    assert found.strays() == []


def racks(stack: Stack) -> cp.ProvisionerSetStatus | None:
    """Its one set, as the control plane tells of it, once all that is there is connected."""
    for provisioner in stack.status().provisioners:
        for found in provisioner.sets:
            if provisioner.connected and found.connected == len(AGENTS):
                return found
    return None


def nodes(stack: Stack) -> dict[str, t.Node]:
    return {node.node_id: node for node in stack.status().nodes}


def scale(stack: Stack, workers: int) -> None:
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=workers), timeout=5)


def watch_it_stay(stack: Stack, seconds: float = 4 * IDLE_S) -> None:
    """For so long, each agent lives and has its session."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert all(stack.processes[name].poll() is None for name in AGENTS)
        time.sleep(0.1)
    assert all(nodes(stack)[node_id].heartbeat_age_s < TIMING["lease_s"] for node_id in AGENTS.values())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_static_nodes_are_used_and_neither_started_nor_stopped(stack: Stack) -> None:
    """PV2, PV1, CP9, CP10: capacity and nodes are seen; demand beyond them asks for none; idle and drained nodes stay,
    also when their provisioner is killed and comes again; a drain that is withdrawn gives the node back."""
    found = wait_for("both nodes", lambda: racks(stack))
    assert (found.capability_set.max_nodes, found.capability_set.gpus_per_node) == (3, GPUS)
    assert (found.desired, found.pending, found.releasing) == (2, 0, 0)
    seen = nodes(stack)
    assert seen.keys() == set(AGENTS.values()), "a host that is off is no node, and none that is awaited"
    assert {(node.provisioner_id, node.capability_set, len(node.gpus)) for node in seen.values()} == {
        ("racks", "rack1", GPUS)
    }
    stack.apply(name="demo", engine="sim", engine_args=ENGINE, min_workers=0, max_workers=9, policy_name="static")
    scale(stack, 2 * GPUS + 1)
    stack.wait_workers("ACTIVE", 2 * GPUS)
    assert {worker.node_id for worker in stack.workers("ACTIVE")} == set(AGENTS.values())

    stack.operator.NoticeNode(cp.NoticeNodeRequest(node_id="node-b"), timeout=5)
    wait_for("the drain", lambda: {w.node_id for w in stack.workers("ACTIVE", "DRAINING")} == {"node-a"})
    watch_it_stay(stack)
    assert nodes(stack)["node-b"].state == t.NODE_STATE_RELEASING

    stack.kill("static")
    scale(stack, 0)
    stack.wait_workers("ACTIVE", 0)
    wait_for("word of its end", lambda: not any(p.connected for p in stack.status().provisioners))
    stack.start("static")
    wait_for("its provisioner again", lambda: any(p.connected for p in stack.status().provisioners))
    stack.operator.NoticeNode(cp.NoticeNodeRequest(node_id="node-b", withdraw=True), timeout=5)
    wait_for("the drained node again", lambda: nodes(stack)["node-b"].state == t.NODE_STATE_UP)
    watch_it_stay(stack)

    scale(stack, 2 * GPUS)
    stack.wait_workers("ACTIVE", 2 * GPUS)
    scale(stack, 0)
    actions = {event.action for event in stack.events()}
    assert not actions & {"node_requested", "node_found", "node_releasing", "node_gone", "node_lost"}, actions
    log = stack.log("static")
    assert "starts group" not in log
    assert "gives group" not in log
    stack.processes["static"].send_signal(signal.SIGTERM)
    assert stack.processes.pop("static").wait(20) == 0
    assert all(stack.processes[name].poll() is None for name in AGENTS), "they outlive it"
