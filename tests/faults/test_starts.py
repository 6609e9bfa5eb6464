"""Starts that fail in every way: back-off, a bounded number of attempts, a reported condition; other pools go on.

CP13 CP14 NA3 NA5 NA7 NA11, F19 F20 F36 F45.
"""

import itertools
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.faults.blows import ENGINE, FaultStack, wait_for
from tests.faults.conftest import TIMING

SLUGGISH = ("--startup-s", "0.1", "--decode-base-ms", "5000")  # warms up for longer than anybody waits here
BAD_STARTS: dict[str, tuple[dict[str, Any], str]] = {
    "fails": ({"engine_args": (*ENGINE, "--fault", "fail_start")}, "ENGINE_EXITED"),
    "slow": ({"engine_args": (*ENGINE, "--fault", "slow_start,seconds=60"), "start_timeout_s": 1.5}, "START_TIMEOUT"),
    "crashes while it warms": ({"engine_args": (*SLUGGISH, "--fault", "crash,after_s=1")}, "ENGINE_EXITED"),
    "killed while it warms": ({"engine_args": (*SLUGGISH, "--fault", "crash,after_s=1,signal=9")}, "ENGINE_KILLED"),
    "hangs while it warms": (
        {"engine_args": (*SLUGGISH, "--fault", "hang,after_s=1"), "start_timeout_s": 2.0},
        "START_TIMEOUT",
    ),
    "unknown flag": ({"engine_args": (*ENGINE, "--no-such-flag")}, "ENGINE_EXITED"),
    "interpreter that is not allowed": ({"interpreter": "/nowhere/python"}, "LAUNCH_REFUSED"),
}


def _exhausted(stack: FaultStack, pool: str) -> str:
    """The pool's condition once its starts ran out."""
    found = [p for p in stack.status().pools if p.spec.name == pool]
    return next((c for c in found[0].status.conditions if "START_ATTEMPTS_EXHAUSTED" in c), "") if found else ""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_starts_that_fail_again_and_again(tmp_path: Path) -> None:
    """All kinds side by side on one node, and a good pool among them that does not notice."""
    stack = FaultStack(tmp_path, gpus=10, timing=TIMING, agent_config="parallel_starts = 4\n")
    try:
        stack.start()
        pools = {case: f"bad-{number}" for number, case in enumerate(BAD_STARTS)}
        for case, (spec, _) in BAD_STARTS.items():
            stack.pool(pools[case], wait=False, max_start_attempts=3, stop_grace_s=0.5, **spec)
        stack.pool("good")
        for case, (_, reason) in BAD_STARTS.items():
            _gives_up(stack, pools[case], reason)
        assert stack.ask("good").exact
        # A corrected spec heals a pool without a word from an operator.
        stack.pool(pools["fails"], wait=False, engine_args=ENGINE)
        wait_for("the healed pool", lambda: len(stack.workers("ACTIVE")) == 2, 30)
    finally:
        stack.stop()
    assert stack.strays() == []


def _gives_up(stack: FaultStack, pool: str, reason: str) -> None:
    """Three tries with growing pauses, the report, and an operator's new try."""
    condition = wait_for(f"the report of {pool}", lambda: _exhausted(stack, pool), 60)
    assert reason in condition
    failures = [e for e in stack.events() if e.action == "worker_failed" and e.pool == pool]
    assert len(failures) == 3, failures
    gaps = [b.at.ToDatetime() - a.at.ToDatetime() for a, b in itertools.pairwise(failures)]
    assert all(gap.total_seconds() >= 0.3 for gap in gaps), gaps
    worker = next(w for w in stack.workers() if w.pool == pool)
    assert worker.phase == t.WORKER_PHASE_FAILED
    # Once its GPUs are free it may be tried again, and the count begins anew.
    wait_for("the free slice", lambda: not stack.by_id()[worker.worker_id].gpu_ids, 20)
    stack.operator.ActivateWorker(cp.ActivateWorkerRequest(worker_id=worker.worker_id), timeout=10)
    wait_for("another try", lambda: stack.actions(worker.worker_id).count("scale_up_start") >= 4, 10)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_bad_pool_never_blocks_another_on_the_same_node(tmp_path: Path) -> None:
    """A start that hangs holds the node's start slot only for so long; the others get theirs within their own time."""
    stack = FaultStack(tmp_path, gpus=4, timing=TIMING, agent_config="start_slot_s = 1.0\n")
    try:
        stack.start()
        _bad_beside_good(stack)
    finally:
        stack.stop()


def _bad_beside_good(stack: FaultStack) -> None:
    stack.pool(
        "bad",
        workers=2,
        wait=False,
        engine_args=(*ENGINE, "--fault", "slow_start,seconds=600"),
        start_timeout_s=40.0,
    )
    wait_for("bad starts under way", lambda: [w for w in stack.workers("STARTING") if w.log_path], 10)
    stack.pool("good", start_timeout_s=10.0)
    assert not [e for e in stack.events() if e.action == "worker_failed" and e.pool == "good"]
    assert stack.ask("good").exact


@pytest.mark.timeout(60)
def test_taken_ports(tmp_path: Path) -> None:
    """Every port of the agent's range is in use: a clear reason, and the start succeeds once one is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = FaultStack(tmp_path, gpus=1, timing=TIMING, agent_config=f"port_first = {port}\nport_last = {port}\n")
        try:
            stack.start()
            stack.pool(wait=False)
            failed = wait_for("the failure", lambda: [e for e in stack.events() if e.action == "worker_failed"], 20)
            assert failed[0].reason == "PORTS_EXHAUSTED"
            assert str(port) in failed[0].message
            taken.close()
            stack.wait_workers("ACTIVE", 1)
            assert stack.ask().exact
        finally:
            stack.stop()
    assert stack.strays() == []


@pytest.mark.timeout(60)
def test_a_model_that_is_not_there(stack: FaultStack) -> None:
    stack.pool(
        "ghost", wait=False, engine="llamacpp", model="/nowhere/model.gguf", engine_args=(), max_start_attempts=2
    )
    condition = wait_for("the report", lambda: _exhausted(stack, "ghost"), 30)
    worker = next(w for w in stack.workers() if w.pool == "ghost")
    assert "/nowhere/model.gguf" in worker.exit.message + worker.exit.log_tail + worker.message, (condition, worker)
    with pytest.raises(grpc.RpcError) as refusal:
        stack.operator.ActivateWorker(cp.ActivateWorkerRequest(worker_id="ghost-99"), timeout=5)
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
