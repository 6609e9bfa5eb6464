"""Everything at once: random kills and pauses of every kind of process, and what is left of it all.

CP10 NA10 NA11 RT5 RT6 RT8 SM8, F5 F6 F8 F11 F23 F30 F34.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter

import psutil
import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from tests.faults.blows import ENGINE, FaultStack, check_outcome, wait_for
from tests.system import load
from tests.system.load import Report, Result
from tests.system.trace import Arrival

STORM_S = float(os.environ.get("SPRINGTIDE_STORM_S", "20"))


def _blows(stack: FaultStack, seed: int, log: list[str]) -> None:
    """One blow after another; what directs or routes is started again after a moment."""
    rng = random.Random(seed)
    end = time.monotonic() + STORM_S
    while time.monotonic() < end:
        victim = rng.choice(["controlplane", "nodeagent", "router", "shim", "guard", "engine"])
        how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        log.append(f"{victim} {how.name}")
        try:
            if victim in ("shim", "guard", "engine"):
                folders = sorted((stack.folder / "agent" / "workers").iterdir())
                pid = stack.pid(victim, rng.choice(folders).name)
            else:
                pid = stack.pid(victim)
            if how == signal.SIGSTOP:
                with stack.stopped(pid):
                    time.sleep(rng.uniform(0.2, 2.0))
            elif victim in ("shim", "guard", "engine"):
                os.kill(pid, how)
            else:
                stack.kill(victim)
                time.sleep(rng.uniform(0.0, 0.5))
                stack.start_only(victim)
        except (OSError, KeyError, IndexError, ValueError, psutil.Error):
            log[-1] += " (nobody there)"
        time.sleep(rng.uniform(0.2, 1.2))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_storm_of_kills(stack: FaultStack) -> None:
    """Every outcome is exact or explicit; afterwards two workers serve, one engine each, and nothing else is left."""
    seed = int(os.environ.get("SPRINGTIDE_STORM_SEED", "11"))
    stack.pool(workers=2, max_start_attempts=50)
    log: list[str] = []

    async def run() -> Report:
        arrivals = [Arrival(n, n * 0.2, 20, 60) for n in range(int(STORM_S * 5))]

        def send(arrival: Arrival) -> "asyncio.Task[Result]":
            return asyncio.ensure_future(load.ask(stack.http, "demo", arrival, salt="storm", timeout_s=60))

        report, _ = await asyncio.gather(load.replay(arrivals, send), asyncio.to_thread(_blows, stack, seed, log))
        return report

    report = uvloop.run(run())
    print(log, Counter("ok" if r.ok else r.error[:80] or r.transport or r.status for r in report.results))
    for result in report.results:
        check_outcome(result)
    assert any(result.ok for result in report.results), report.explain()
    for name in ("controlplane", "nodeagent", "router"):
        assert stack.processes[name].poll() is None, stack.log(name)[-2000:]
    stack.check_whole(active=2, timeout_s=60)
    for name in ("controlplane", "nodeagent", "router"):
        assert "Traceback" not in stack.log(name), stack.log(name)[stack.log(name).index("Traceback") - 500 :][:3000]
    stack.wait_routable("demo")
    assert stack.ask().exact


def _sizes(stack: FaultStack) -> dict[str, tuple[int, int]]:
    """File descriptors and resident KiB of each process that lives through it all."""
    worker = sorted(stack.workers("ACTIVE"), key=lambda w: w.worker_id)[0].worker_id
    pids = {name: stack.pid(name, worker) for name in ("controlplane", "nodeagent", "router", "shim", "engine")}
    return {
        name: (psutil.Process(pid).num_fds(), psutil.Process(pid).memory_info().rss // 1024)
        for name, pid in pids.items()
    }


async def _leave(stack: FaultStack, arrival: Arrival) -> None:
    """A client that goes after its first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.http_port)
    body = (
        b'{"model":"demo","stream":true,"max_tokens":200,"messages":[{"role":"user","content":"leaver %d"}]}'
        % arrival.number
    )
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.read(200)
    writer.transport.abort()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_leaks(stack: FaultStack) -> None:
    """Requests by the thousand, a fifth of which leave in the middle, and thirty scaling events: same size after it."""
    quick = ("--startup-s", "0.05", "--decode-base-ms", "1", "--decode-per-request-ms", "0.01", "--max-num-seqs", "64")
    stack.pool(workers=1, engine_args=quick, drain_timeout_s=5.0, stop_grace_s=2.0)

    async def requests(count: int) -> None:
        gate = asyncio.Semaphore(24)

        async def one(number: int) -> None:
            async with gate:
                arrival = Arrival(number, 0, 10, 8)
                if number % 5 == 0:
                    await _leave(stack, arrival)
                else:
                    result = await load.ask(stack.http, "demo", arrival, salt="leak", timeout_s=60)
                    assert result.exact, result

        await asyncio.gather(*(one(number) for number in range(count)))

    uvloop.run(requests(400))
    stack.check_whole(active=1)
    before = _sizes(stack)

    async def all_of_it() -> None:
        await asyncio.gather(requests(2600), asyncio.to_thread(_scale_about, stack))

    uvloop.run(all_of_it())
    stack.check_whole(active=1)
    try:
        wait_for("descriptors as before", lambda: _fewer(before, _sizes(stack)), 30, 1.0)
    finally:
        after = _sizes(stack)
        print(before, after)
    for name, (_, kib) in before.items():
        assert after[name][1] <= kib + 40_000, (name, before[name], after[name])


def _fewer(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> bool:
    return all(now[name][0] <= before[name][0] + 12 for name in before)


def _scale_about(stack: FaultStack) -> None:
    for number in range(15):
        stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=2 + number % 2), timeout=30)
        time.sleep(0.4)
        stack.operator.ScalePool(cp.ScalePoolRequest(pool="demo", workers=1), timeout=30)
        time.sleep(0.4)


ENDS = ("stop", "kill shim", "kill guard", "kill engine")


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_nothing_of_an_engine_survives(stack: FaultStack) -> None:
    """Children in sessions of their own and an engine that ignores SIGTERM go with it, whatever ended it: four workers,
    each ended in another way."""
    faults = ("--fault", "orphans", "--fault", "ignore_sigterm")
    stack.pool(workers=4, engine_args=(*ENGINE, *faults), stop_grace_s=1.0)
    families = {}
    for how, worker in zip(ENDS, stack.workers("ACTIVE"), strict=True):
        engine = stack.engine_process(worker.worker_id)
        families[how] = [engine, *engine.children(recursive=True)]
        assert len(families[how]) == 3, families[how]
        if how == "stop":
            stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id=worker.worker_id), timeout=30)
        else:
            os.kill(stack.pid(how.split()[1], worker.worker_id), signal.SIGKILL)
    wait_for("the end of all families", lambda: not _survivors(families), 30)
    stack.check_whole(active=4)
    assert stack.ask().exact


def _survivors(families: dict[str, list[psutil.Process]]) -> dict[str, list[psutil.Process]]:
    """What is left, by how its engine ended."""
    left = {how: [process for process in family if _lives(process)] for how, family in families.items()}
    return {how: family for how, family in left.items() if family}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
