"""Sleep, wake, loans and weights through the whole stack, under load, as separate processes.

NA8 NA9 NA16 RL4 RL8 CP19, F5 F6 F42: nobody notices a sleep or a wake; memory is really free; every process may die
while a worker sleeps; a loan ends before its owner wakes; no request is lost while weights change.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.system import load
from tests.system.conftest import ENGINE, TIMING, apply_demo
from tests.system.load import Report, Result
from tests.system.stack import ROOT, Stack, running, wait_for
from tests.system.trace import Arrival

MIB = 1024 * 1024
SLEEPY = (*ENGINE, "--memory-mb", "64")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running(tmp_path, gpus=2, timing=TIMING) as found:
        yield found
    assert found.strays() == []


def phase(worker: t.Worker) -> str:
    return t.WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_")


def worker(stack: Stack, worker_id: str) -> t.Worker:
    return next(found for found in stack.workers() if found.worker_id == worker_id)


def wait_phase(stack: Stack, worker_id: str, wanted: str, timeout_s: float = 40.0) -> t.Worker:
    return wait_for(
        f"{worker_id} {wanted}",
        lambda: found if phase(found := worker(stack, worker_id)) == wanted else None,
        timeout_s,
    )


def scale(stack: Stack, workers: int, pool: str = "demo") -> None:
    stack.operator.ScalePool(cp.ScalePoolRequest(pool=pool, workers=workers), timeout=5)


def asleep(stack: Stack) -> t.Worker:
    def probe() -> t.Worker | None:
        return next((found for found in stack.workers("INACTIVE") if phase(found) == "SLEEPING"), None)

    return wait_for("a sleeper", probe, 40)


def engine_of(stack: Stack, worker_id: str) -> psutil.Process:
    guard = psutil.Process(stack.engine_pids(worker_id)["guard"])
    (engine,) = guard.children()
    return engine


def cli(stack: Stack, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "springtide.cli", "--address", stack.address, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
    return done.stdout


def under_load(stack: Stack, seconds: float, act: Callable[[], Awaitable[None]], model: str = "demo") -> Report:
    """Five streams a second for so long, and `act` beside them."""
    arrivals = [Arrival(number, number * 0.2, 30, 40) for number in range(int(seconds * 5))]

    async def both() -> Report:
        def send(arrival: Arrival) -> "asyncio.Task[Result]":
            return asyncio.ensure_future(load.ask(stack.http, model, arrival, salt="sleep"))

        report, _ = await asyncio.gather(load.replay(arrivals, send), act())
        return report

    return uvloop.run(both())


def test_sleep_and_wake_under_load(stack: Stack) -> None:
    """NA8, NA16, F6, F42: 2 -> 1 -> 2 with a killed control plane and a killed agent while it sleeps: no request
    fails, each answer is exact, the memory is really free, the same engine wakes."""
    apply_demo(stack, min_workers=1, max_workers=2, engine_args=SLEEPY, scale_down=t.SCALE_DOWN_SLEEP)
    scale(stack, 2)
    before = {found.worker_id: found.incarnation for found in stack.wait_workers("ACTIVE", 2)}
    seen: dict[str, int] = {}

    def cycle() -> None:
        scale(stack, 1)
        sleeper = asleep(stack)
        assert sleeper.freed_bytes > 50 * MIB
        engine = engine_of(stack, sleeper.worker_id)
        seen["asleep"] = engine.memory_info().rss
        for process in ("controlplane", "nodeagent"):
            stack.kill(process)
            stack.start(process)
        wait_for("the agent", lambda: stack.operator.ListNodes(cp.ListNodesRequest(), timeout=2).nodes, 30)
        wait_phase(stack, sleeper.worker_id, "SLEEPING")
        scale(stack, 2)
        stack.wait_workers("ACTIVE", 2)
        again = worker(stack, sleeper.worker_id)
        assert again.reoccupied_bytes > 50 * MIB
        seen["awake"] = engine.memory_info().rss

    report = under_load(stack, 12.0, lambda: asyncio.to_thread(cycle))
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert seen["awake"] - seen["asleep"] > 50 * MIB
    assert {found.worker_id: found.incarnation for found in stack.workers("ACTIVE")} == before
    assert stack.counted("nodeagent", "springtide_agent_freed_bytes", pool="demo") > 50 * MIB
    assert "MiB" in cli(stack, "workers", "-o", "wide")


def test_a_sleeper_is_killed_and_operators_put_to_sleep_and_wake(stack: Stack) -> None:
    """NA8, F5: noticed without a probe, its GPU is free again."""
    apply_demo(stack, min_workers=0, max_workers=2, engine_args=SLEEPY, scale_down=t.SCALE_DOWN_SLEEP)
    scale(stack, 1)
    stack.wait_workers("ACTIVE", 1)
    scale(stack, 0)
    sleeper = asleep(stack)
    os.kill(engine_of(stack, sleeper.worker_id).pid, signal.SIGKILL)
    failed = wait_phase(stack, sleeper.worker_id, "FAILED")
    assert failed.reason == "ENGINE_KILLED"
    wait_for("a free GPU", lambda: len(stack.status().nodes[0].free_gpus) == 2)
    scale(stack, 1)
    (again,) = stack.wait_workers("ACTIVE", 1)
    cli(stack, "sleep", again.worker_id, "--wait")
    assert phase(worker(stack, again.worker_id)) == "SLEEPING"
    cli(stack, "wake", again.worker_id, "--wait")


def test_gpus_are_lent_and_claimed_back(tmp_path: Path) -> None:
    """RL8: one GPU for two pools: the borrower finishes what it runs, goes, and only then the owner wakes. A job
    outside keeps them until they are claimed back."""
    with running(tmp_path, gpus=1, timing=TIMING) as stack:
        common = {"engine": "sim", "engine_args": SLEEPY, "policy": {"enable_elastic": False}, "max_workers": 1}
        stack.apply(name="owner", min_workers=0, scale_down=t.SCALE_DOWN_SLEEP, lend_gpus=True, **common)
        scale(stack, 1, "owner")
        stack.wait_workers("ACTIVE", 1)
        scale(stack, 0, "owner")
        sleeper = asleep(stack)
        stack.apply(name="guest", min_workers=1, **common)
        (guest,) = stack.wait_workers("ACTIVE", 1)
        assert (guest.pool, list(guest.gpu_ids)) == ("guest", list(sleeper.gpu_ids))
        stack.wait_routable("guest")

        async def claim() -> None:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(scale, stack, 1, "owner")

        async def stream_and_claim() -> Result:
            long = load.ask(stack.http, "guest", Arrival(1, 0.0, 20, 200), salt="guest")
            result, _ = await asyncio.gather(long, claim())
            return result

        result = uvloop.run(stream_and_claim())
        assert result.exact, result
        owner = wait_for("the owner", lambda: [w for w in stack.workers("ACTIVE") if w.pool == "owner"], 40)
        assert owner[0].incarnation == sleeper.incarnation
        assert not stack.workers("STARTING", "DRAINING")

        scale(stack, 0, "owner")
        sleeper = asleep(stack)
        stack.operator.DeletePool(cp.DeletePoolRequest(name="guest", drain=True), timeout=5)
        wait_for("the end of the guest", lambda: len(stack.status().pools) == 1, 40)
        told = cli(stack, "lend", sleeper.worker_id, "--to", "training")
        assert "GPUs sim0 are lent to training" in told
        scale(stack, 1, "owner")
        wait_for(
            "a decision that nothing can be placed",
            lambda: any("CANNOT_PLACE" in text for text in stack.status().pools[0].status.conditions),
        )
        assert phase(worker(stack, sleeper.worker_id)) == "SLEEPING"
        cli(stack, "reclaim", sleeper.worker_id)
        stack.wait_workers("ACTIVE", 1)
    assert stack.strays() == []


def test_weights_change_under_load_and_verbs_reach_the_engine(stack: Stack) -> None:
    """RL4, CP19, NA9: worker after worker, no request is lost, a new one joins with the current version only."""
    apply_demo(stack, min_workers=1, max_workers=2, engine_args=SLEEPY)
    scale(stack, 2)
    stack.wait_workers("ACTIVE", 2)

    async def change() -> None:
        await asyncio.to_thread(
            cli, stack, "weights", "demo", "--version", "v2", "--source", "/weights/2", "--wait", "--timeout", "60s"
        )

    report = under_load(stack, 6.0, change)
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert {found.weight_version for found in stack.workers("ACTIVE")} == {"v2"}
    actions = [event.action for event in stack.events()]
    assert actions.count("weights_start") == actions.count("weights_complete") == 2
    scale(stack, 1)
    stack.wait_workers("ACTIVE", 1)
    scale(stack, 2)
    assert {found.weight_version for found in stack.wait_workers("ACTIVE", 2)} == {"v2"}

    one = stack.workers("ACTIVE")[0].worker_id
    assert "done" in cli(stack, "engine", one, "flush-cache")
    assert json.loads(cli(stack, "--json", "engine", one, "weight-version")) == {"weight_version": "v2"}
    assert json.loads(cli(stack, "--json", "worker-verb", one, "load"))["running"] == 0
    cli(stack, "engine", one, "abort", "nobody")
    cli(stack, "engine", one, "pause", "keep")
    assert t.WorkerAdmission.Name(worker(stack, one).admission) == "WORKER_ADMISSION_PAUSED"
    stack.kill("controlplane")
    stack.start("controlplane")
    wait_for("the node", lambda: worker(stack, one).HasField("in_flight"), 30)
    assert t.WorkerAdmission.Name(worker(stack, one).admission) == "WORKER_ADMISSION_PAUSED"
    cli(stack, "engine", one, "resume")
    assert json.loads(cli(stack, "--json", "engine", one, "ready"))["ready"] is True
