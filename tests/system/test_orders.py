"""Operators' orders on the whole system: what they do, and that a wrong one changes nothing.

CP5 CP6 CP8 CM4, PL10: by the command line, with its exit codes.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from springtide.v1 import controlplane_pb2 as cp
from tests.system.conftest import ENGINE, POLICY, apply_demo
from tests.system.stack import ROOT, Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _run(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "SPRINGTIDE_ADDRESS": stack.address}
    return subprocess.run(
        [sys.executable, "-m", "springtide.cli", *arguments],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _json(stack: Stack, *arguments: str) -> Any:
    done = _run(stack, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_day_of_an_operator(small_stack: Stack) -> None:
    """Scale by hand, drain, take a drain back, activate, cordon, pause: the loop undoes none of it."""
    stack = small_stack
    apply_demo(stack)
    assert _run(stack, "scale", "demo", "3", "--wait").returncode == 0
    first = sorted(w.worker_id for w in stack.workers("ACTIVE"))
    assert len(first) == 3
    assert _run(stack, "drain", first[1], "--wait").returncode == 0
    stack.wait_workers("ACTIVE", 3)  # pinned to three: a replacement, but not the drained one
    assert first[1] not in {w.worker_id for w in stack.workers("ACTIVE")}
    assert _run(stack, "scale", "demo", "2", "--wait").returncode == 0
    assert _run(stack, "cordon", "node-a").returncode == 0
    assert _run(stack, "scale", "demo", "4").returncode == 0
    wait_for("the reason why not", lambda: "CANNOT_PLACE" in " ".join(stack.status().pools[0].status.conditions))
    assert len(stack.workers("ACTIVE", "STARTING")) == 2
    assert _run(stack, "uncordon", "node-a").returncode == 0
    stack.wait_workers("ACTIVE", 4)
    assert _run(stack, "scale", "demo", "auto").returncode == 0
    stack.wait_workers("ACTIVE", 1, 60)  # no load: back to min
    assert _run(stack, "pause", "demo", "--for", "1h").returncode == 0
    assert stack.status().pools[0].status.HasField("hold_until")
    assert _run(stack, "resume", "demo").returncode == 0
    assert not stack.status().pools[0].status.HasField("hold_until")
    metrics = _json(stack, "status", "--metrics")
    assert set(metrics) == {
        *("active_workers", "draining_workers", "total_workers", "active_requests", "pending_requests"),
        *("load_ratio", "total_capacity"),
    }
    lines = _run(stack, "events", "--format", "csv").stdout.splitlines()
    assert lines[0] == "time,action,target,status"
    actions = {line.split(",")[1] for line in lines[1:]}
    assert {"scale_up_start", "scale_up_complete", "scale_down_start", "scale_down_complete"} <= actions


def test_a_pause_that_expires_lets_the_policy_go_on(small_stack: Stack) -> None:
    """CP5: the hold has an end, and failed workers are replaced meanwhile."""
    stack = small_stack
    apply_demo(stack)
    assert _run(stack, "scale", "demo", "2", "--wait").returncode == 0
    assert _run(stack, "pause", "demo", "--for", "4s").returncode == 0
    assert _run(stack, "scale", "demo", "auto").returncode == 0
    assert len(stack.workers("ACTIVE")) == 2  # held
    stack.wait_workers("ACTIVE", 1, 60)


BAD_ORDERS = [
    (("scale", "nope", "2"), 4, ("nope", "demo")),
    (("scale", "demo", "9"), 1, ("workers", "9", "1 to 4")),
    (("drain", "demo-77"), 4, ("demo-77", "demo-1")),
    (("undrain", "demo-1"), 5, ("demo-1", "ACTIVE")),
    (("activate", "demo-1"), 5, ("demo-1", "ACTIVE")),
    (("cancel", "demo-1"), 5, ("demo-1", "ACTIVE")),
    (("cordon", "node-z"), 4, ("node-z", "node-a")),
    (("pause", "demo", "--for", "48h"), 1, ("hold", "24")),
    (("delete", "demo"), 5, ("demo", "drain")),
    (("--address", "127.0.0.1:1", "pools"), 3, ("127.0.0.1:1",)),
]


def test_wrong_orders_name_field_value_and_remedy_and_change_nothing(small_stack: Stack) -> None:
    stack = small_stack
    apply_demo(stack)
    before = stack.status().pools[0].spec
    for arguments, code, words in BAD_ORDERS:
        done = _run(stack, *arguments)
        assert done.returncode == code, (arguments, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        for word in words:
            assert word in done.stderr, (arguments, word, done.stderr)
    assert stack.status().pools[0].spec == before
    assert [w.worker_id for w in stack.workers("ACTIVE")] == ["demo-1"]


BAD_POOLS = [
    ({"min_workers": 3, "max_workers": 2}, ("min_workers", "3", "max_workers")),
    ({"tensor_parallel_size": 3}, ("tensor_parallel_size", "3", "4")),
    ({"tensor_parallel_size": -1}, ("tensor_parallel_size", "-1")),
    ({"engine": ""}, ("engine",)),
    ({"name": "Not A Name"}, ("name", "Not A Name")),
    ({"policy": {"scale_up_treshold": 0.9}}, ("scale_up_treshold", "scale_up_threshold")),
    ({"policy": {"scale_up_threshold": 0.4}}, ("scale_up_threshold", "scale_down_threshold")),
    ({"policy": {**POLICY, "monitoring_interval": 12, "min_stable_period": 10}}, ("monitoring_interval", "12")),
]


@pytest.mark.parametrize(("change", "words"), BAD_POOLS)
def test_a_wrong_pool_is_refused_whole(orders_stack: Stack, change: dict[str, Any], words: tuple[str, ...]) -> None:
    import grpc

    spec: dict[str, Any] = {"name": "bad", "engine": "sim", "engine_args": ENGINE, **change}
    with pytest.raises(grpc.RpcError) as caught:
        orders_stack.apply(**spec)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for word in words:
        assert word in str(caught.value.details()), (word, caught.value.details())
    assert not orders_stack.operator.ListPools(cp.ListPoolsRequest(), timeout=5).pools


def test_a_pool_that_no_node_can_hold_says_so_and_blocks_nobody(small_stack: Stack) -> None:
    """NA14: cannot place; GPU not available."""
    stack = small_stack
    apply_demo(stack, min_workers=2)
    stack.apply(name="wide", engine="sim", engine_args=ENGINE, tensor_parallel_size=4, min_workers=1, max_workers=1)

    def told() -> str:
        wide = next(pool for pool in stack.status().pools if pool.spec.name == "wide")
        return " ".join(wide.status.conditions)

    wait_for("the reason", lambda: "CANNOT_PLACE" in told())
    assert "node-a" in told()
    assert _run(stack, "scale", "demo", "3", "--wait").returncode == 0
