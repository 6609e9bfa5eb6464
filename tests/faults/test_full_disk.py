"""Disks that are full: nothing that runs stops, every order is whole or refused, and all recovers with the room.

CP10 CP21, DESIGN rules 8 and 10.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from springtide.v1 import controlplane_pb2 as cp
from tests.faults.blows import FaultStack, wait_for
from tests.faults.conftest import TIMING


@contextlib.contextmanager
def small_disk(path: Path, size_kib: int) -> Iterator[None]:
    """A filesystem of its own for `path`."""
    path.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path) -> Path:
    """Takes every byte that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filler


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[FaultStack]:
    """A stack whose three data folders are small filesystems."""
    with contextlib.ExitStack() as disks:
        for name, size_kib in (("cp", 4096), ("agent", 4096), ("router", 1024)):
            disks.enter_context(small_disk(tmp_path / name, size_kib))
        stack = FaultStack(tmp_path, gpus=4, timing=TIMING)
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()
            assert stack.strays() == []


def _health(stack: FaultStack) -> int:
    with grpc.insecure_channel(stack.address) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


def _scale(stack: FaultStack, workers: int) -> None:
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=workers), timeout=5)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_store_is_full(cramped: FaultStack) -> None:
    stack = cramped
    stack.pool()
    filler = fill(stack.folder / "cp")
    refused = None
    for workers in (2, 1) * 200:  # the journal has pages of its own to fill first
        try:
            _scale(stack, workers)
        except grpc.RpcError as error:
            refused = error
            break
    assert refused is not None, "the store never filled up: the test proves nothing"
    assert refused.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED), refused
    assert "full" in str(refused.details()), refused
    wait_for("bad health", lambda: _health(stack) == health_pb2.HealthCheckResponse.NOT_SERVING, 15)
    assert stack.status().pools, "looks still work"
    assert stack.ask().exact
    # Started again on the full disk it refuses or serves; it never forgets.
    filler.unlink()
    wait_for("good health", lambda: _health(stack) == health_pb2.HealthCheckResponse.SERVING, 15)
    _scale(stack, 3)
    stack.check_whole(active=3)
    stack.kill("controlplane")
    filler = fill(stack.folder / "cp")
    stack.start("controlplane")
    assert stack.processes["controlplane"].poll() is None
    wait_for("the node", lambda: stack.status().nodes, 10)
    assert stack.ask().exact
    filler.unlink()
    _wait_scale(stack, 1)
    stack.check_whole(active=1)


def _wait_scale(stack: FaultStack, workers: int) -> None:
    def done() -> bool:
        _scale(stack, workers)
        return True

    wait_for("an order is taken", done, 15)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_ledger_is_full(cramped: FaultStack) -> None:
    stack = cramped
    stack.pool(max_start_attempts=3)
    filler = fill(stack.folder / "agent")
    _scale(stack, 2)
    failed = wait_for("the failure", lambda: [e for e in stack.events() if e.action == "worker_failed"], 15)
    assert failed[0].reason == "LEDGER_WRITE_FAILED", failed[0]
    assert len(stack.engines()) == 1
    assert stack.ask().exact
    # What runs can still be stopped, and an agent that starts again without room still finds what runs.
    stack.kill("nodeagent")
    stack.start("nodeagent")
    assert stack.ask().exact
    wait_for("the adopted one", lambda: stack.actions().count("node_up") >= 1 and stack.workers("ACTIVE"), 15)
    assert stack.processes["nodeagent"].poll() is None, stack.log("nodeagent")[-1000:]
    filler.unlink()
    wait_for("an active second", lambda: len(stack.workers("ACTIVE")) >= 1, 15)
    for worker in stack.workers("INACTIVE"):
        with contextlib.suppress(grpc.RpcError):
            stack.operator.ActivateWorker(cp.ActivateWorkerRequest(worker_id=worker.worker_id), timeout=5)
    stack.check_whole(active=2)
    fill(stack.folder / "agent")
    _scale(stack, 1)
    stack.check_whole(active=1)
    (stack.folder / "agent" / "filler").unlink()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_routers_disk_is_full(cramped: FaultStack) -> None:
    stack = cramped
    stack.pool()
    fill(stack.folder / "router")
    assert stack.ask().exact
    stack.kill("router")
    stack.start("router")
    stack.wait_routable("demo")
    assert stack.ask().exact
