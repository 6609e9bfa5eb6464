"""Routing on the whole system, as separate processes: a router of two, two simulated engines, a real control plane."""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.system.conftest import TIMING, apply_demo
from tests.system.stack import Stack, wait_for


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path, gpus=2, timing=TIMING)
    made.commands["router"] += ["--workers", "2"]
    try:
        yield made.start()
    finally:
        made.stop()
        assert made.strays() == []


def ask(stack: Stack, **headers: str) -> tuple[int, dict[str, str]]:
    """One short answer over a connection of its own: the kernel gives it to either process."""
    body = json.dumps({"model": "demo", "prompt": "tide", "max_tokens": 2}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        stack.http + "/v1/completions", body, {"content-type": "application/json", **named}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


def served(stack: Stack, total: int) -> dict[str, int]:
    """Requests that each worker has served, once they are `total` together."""

    def probe() -> dict[str, int] | None:
        found = {worker.worker_id: worker.total_served for worker in stack.workers("ACTIVE")}
        return found if sum(found.values()) == total else None

    return wait_for(f"{total} served", probe, 20)


def test_a_pools_routing_policy_labels_and_measured_start_reach_every_process(stack: Stack) -> None:
    """RT1, RT3, RT7, RT13; DESIGN rule 10: Retry-After is the measured start."""
    apply_demo(
        stack, min_workers=2, max_workers=2, routing=t.RoutingSpec(name="sticky"), labels={"tier": "gold"}, ramp_s=0.0
    )
    for _ in range(12):
        assert ask(stack, x_session_id="one")[0] == 200
    counts = served(stack, 12)
    assert sorted(counts.values()) == [0, 12]
    assert ask(stack, x_session_id="one", x_require_labels="tier=gold")[0] == 200
    assert ask(stack, x_require_labels="tier=iron")[0] == 503
    assert ask(stack, x_priority="99")[0] == 400

    starts = {e.target: e.at.ToNanoseconds() for e in stack.events() if e.action == "scale_up_start"}
    ends = {e.target: e.at.ToNanoseconds() for e in stack.events() if e.action == "scale_up_complete"}
    took_s = sorted((ends[worker] - starts[worker]) / 1e9 for worker in ends)
    stack.apply(name="demo", engine="sim", min_workers=0, max_workers=2)
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=0), timeout=5)
    stack.wait_workers("ACTIVE", 0)

    def not_ready() -> int | None:
        try:
            urllib.request.urlopen(stack.http + "/ready?model=demo", timeout=5).close()
        except urllib.error.HTTPError as error:
            return int(error.headers["retry-after"]) if error.code == 503 else None
        return None

    assert wait_for("not ready", not_ready) in (math.ceil(took_s[0]), math.ceil(took_s[0]) + 1)
    with urllib.request.urlopen(stack.http + "/ready", timeout=5) as answer:
        assert answer.status == 200
