"""Requests that ask for labels scale their own workers, over the real processes of a control plane, two agents and a
router (PL6, RT7, SM9; seed 2 §2.07, §2.08)."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.conftest import ENGINE, TIMING
from tests.system.stack import Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def two_zones(tmp_path: Path) -> Iterator[Stack]:
    """node-a has the label zone=a, node-b zone=b; 4 simulated GPUs each."""
    stack = Stack(tmp_path, gpus=4, timing=TIMING, agent_config='[labels]\nzone = "a"\n')
    (tmp_path / "node-b.toml").write_text('[labels]\nzone = "b"\n')
    stack.commands["node-b"] = [
        *("-m", "nodeagent", "--controlplane", stack.address, "--data-dir", str(tmp_path / "agent-b"), "--gpus", "4"),
        *("--node-id", "node-b", "--metrics-port", "-1", "--config", str(tmp_path / "node-b.toml")),
    ]
    try:
        stack.start()
        wait_for("both nodes", lambda: len(stack.status().nodes) == 2)
        yield stack
    finally:
        other = stack.processes.pop("node-b", None)
        if other is not None:
            other.terminate()
            other.wait(30)
        stack.stop()
        assert stack.strays() == []


def complete(stack: Stack, zone: str, tokens: int) -> int:
    """The answer's status."""
    body = json.dumps({"model": "demo", "prompt": "tide", "max_tokens": tokens, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json", "x-require-labels": f"zone={zone}"}
    request = urllib.request.Request(stack.http + "/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def nodes(stack: Stack) -> list[str]:
    return sorted(worker.node_id for worker in stack.workers("ACTIVE"))


def test_each_set_of_labels_scales_by_itself(two_zones: Stack) -> None:
    """PL6, PL11, RT7, CP11: the first request for zone=a starts a worker there; one for zone=b, which nobody has then,
    waits, and starts one on the other node; many of them start more of these only; at the end all are gone."""
    stack = two_zones
    stack.apply(
        name="demo",
        engine="sim",
        engine_args=ENGINE,
        min_workers=0,
        max_workers=6,
        policy={"policy_content": "allocate=capability; scaling=capability", "monitoring_interval": 0.5},
    )
    stack.wait_routable("demo")
    assert complete(stack, "a", 4) == 200
    assert nodes(stack) == ["node-a"]
    with ThreadPoolExecutor(12) as clients:
        held = clients.submit(complete, stack, "a", 1200)
        assert complete(stack, "b", 4) == 200
        assert nodes(stack) == ["node-a", "node-b"]
        many = [clients.submit(complete, stack, "b", 1000) for _ in range(11)]
        wait_for("three for eleven", lambda: nodes(stack) == ["node-a", "node-b", "node-b", "node-b"])
        assert {one.result() for one in (held, *many)} == {200}
    said = [decision for decision in stack.decisions() if decision.policy == "capability"]
    assert any("{zone=b} 3" in decision.message for decision in said)
    stack.wait_workers("ACTIVE", 0, 60)
