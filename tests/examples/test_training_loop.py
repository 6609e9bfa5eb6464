"""examples/training_loop: membership at step boundaries, and the whole loop with real workers and gradient steps."""

import os
import re
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.training_loop.membership import Member, Membership
from springtide.v1 import controlplane_pb2 as cp
from tests.system.conftest import POLICY, TIMING
from tests.system.stack import ROOT, Stack, wait_for

ONE, TWO, AGAIN = Member("w-1", 10), Member("w-2", 11), Member("w-1", 12)


def test_members_are_numbered_once() -> None:
    """RL5 1.08 1.09: joined and left between steps; a replaced worker is another actor, and no number is used again."""
    membership = Membership()
    assert membership.at_step([ONE]).joined == (ONE,)
    assert membership.at_step([ONE]).joined == ()
    change = membership.at_step([TWO, AGAIN])
    assert (change.left, change.joined) == ((ONE,), (AGAIN, TWO))
    assert membership.actors == {AGAIN: 1, TWO: 2}
    assert membership.actor_of("w-1", 12) == 1
    assert membership.actor_of("w-1", 10) is None
    assert membership.at_step([]).left == (AGAIN, TWO)
    membership.at_step([ONE])
    assert membership.actors == {ONE: 3}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, gpus=4, timing=TIMING)
    try:
        yield stack.start()
    finally:
        stack.stop()
        assert stack.strays() == []


def loop(stack: Stack, out: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """The example in the environment of the engines, which has PyTorch."""
    own = sysconfig.get_path("purelib")
    command = [str(ROOT / ".venv-vllm/bin/python"), "-m", "examples.training_loop.train"]
    command += ["--controlplane", stack.address, "--router", f"127.0.0.1:{stack.router_port}", *arguments]
    with out.open("wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{own}"},
            cwd=ROOT,
        )


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_the_loop_grows_and_survives_a_dead_worker(stack: Stack, tmp_path: Path) -> None:
    """RL5 SM10: workers are added while it trains and used from the next step on; SIGKILL of an engine in the middle of
    a step fails no step; losses are real and fall; the lines are those that the first seed promises."""
    args = ("--startup-s", "0.2", "--decode-base-ms", "20", "--max-num-seqs", "16")
    stack.apply(name="demo", engine="sim", min_workers=1, max_workers=3, engine_args=args, policy=POLICY)
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=1), timeout=5)
    stack.wait_workers("ACTIVE", 1)
    stack.wait_routable("demo")
    out = tmp_path / "loop.out"
    process = loop(stack, out, "--steps", "400", "--pause-s", "0.2", "--max-tokens", "32")

    def said(pattern: str, times: int = 1) -> bool:
        assert process.poll() is None, out.read_text()
        return len(re.findall(pattern, out.read_text())) >= times

    try:
        wait_for("two steps", lambda: said(r"Step \d+ completed:", 2), 60)
        stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=3), timeout=5)
        wait_for("the new workers", lambda: said("Detected new worker: ", 2), 60)
        wait_for("a step on three actors", lambda: said("on 3 actors"), 60)
        victim = stack.workers("ACTIVE")[0]
        guard = stack.engine_pids(victim.worker_id)["guard"]
        steps = len(re.findall("completed:", out.read_text()))
        os.kill(guard, signal.SIGKILL)
        wait_for("its replacement", lambda: said("Detected new worker: ", 3), 60)
        wait_for("steps after it", lambda: said("completed:", steps + 3), 60)
    finally:
        process.terminate()
        process.wait(20)
    text = out.read_text()
    assert "failed and is left out" not in text, text
    assert "💤 Worker gone: " in text
    losses = [float(found) for found in re.findall(r"Actor 0: training: loss=(\d+\.\d{4})", text)]
    assert losses[-1] < losses[0], losses
    assert re.search(r"Average duration: \d+\.\d{3}s", text)


@pytest.mark.heavy
def test_without_a_control_plane_it_says_so(tmp_path: Path, stack: Stack) -> None:
    """1.15: an error that names what is missing, and an exit code."""
    stack.kill("controlplane")
    out = tmp_path / "loop.out"
    process = loop(stack, out, "--steps", "1", "--pause-s", "0")
    assert process.wait(60) == 1, out.read_text()
    assert "No control plane answers" in out.read_text()
    assert "No worker yet" in out.read_text()
