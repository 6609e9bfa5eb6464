"""An engine that becomes ready and dies soon after, again and again: backed off, reported, left, and started again when
an operator says so.

CP11 CM5, F45, DESIGN rules 2 and 4.
"""

import subprocess
import sys

import pytest

from springtide.v1 import types_pb2 as t
from tests.faults.blows import ENGINE, FaultStack, wait_for
from tests.system.stack import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _command(stack: FaultStack, *arguments: str) -> str:
    environ = {**stack.environ, "SPRINGTIDE_ADDRESS": stack.address}
    done = subprocess.run(
        [sys.executable, "-m", "springtide.cli", *arguments],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_crash_loop_is_visible_and_bounded(stack: FaultStack) -> None:
    args = (*ENGINE, "--fault", "crash,after_s=0.6,exit_code=7")
    stack.pool(workers=1, wait=False, max_start_attempts=3, engine_args=args)
    stack.pool("other", workers=1)

    def looping() -> bool:
        return "CRASH_LOOP" in _command(stack, "status")

    wait_for("the loop in the status", looping, 30, every_s=0.3)

    def left() -> bool:
        return any("START_ATTEMPTS_EXHAUSTED" in c for p in stack.status().pools for c in p.status.conditions)

    wait_for("its end", left, 30)
    worker = next(w for w in stack.workers() if w.pool == "demo")
    assert (worker.phase, worker.attempts, worker.exit.code) == (t.WORKER_PHASE_FAILED, 3, 7)
    assert "listening" in worker.exit.log_tail, "the end of its log"
    page = _command(stack, "workers", worker.worker_id)
    assert "exited with code 7" in page
    starts = stack.actions(worker.worker_id).count("scale_up_start")
    assert starts == 3
    assert stack.ask("other").exact, "other pools serve on"

    # what was wrong is put right: a changed spec is a clean record
    stack.pool(workers=1, wait=False, max_start_attempts=3)
    wait_for("it serves", lambda: any(w.pool == "demo" for w in stack.workers("ACTIVE")), 30)
    stack.wait_routable("demo")
    assert stack.ask().exact
    wait_for("a clean status", lambda: "CRASH_LOOP" not in _command(stack, "status"), 30, every_s=0.3)


def test_the_phases_of_a_start_are_shown(stack: FaultStack) -> None:
    """SM11: in the record, in `workers -o wide`, and on the worker's page; starts one after another wait for a slot,
    which is no part of their deadline."""
    stack.pool(workers=3, engine_args=(*ENGINE[2:], "--startup-s", "1.5"), start_timeout_s=4.0)
    found = [dict(w.start_phases_s) for w in stack.workers("ACTIVE")]
    assert len(found) == 3
    assert all({"process", "import", "warm_up"} <= set(phases) for phases in found), found
    assert sum(phases.get("slot", 0.0) for phases in found) > 3.0, "one start at a time"
    wide = _command(stack, "workers", "-o", "wide")
    assert "LAST START" in wide
    assert "import " in wide
    assert "last start" in _command(stack, "workers", stack.workers("ACTIVE")[0].worker_id)
