"""Nothing of an engine survives: shim, guard and engine killed in turn, children that try to get away."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent import guard
from tests.nodeagent.processes import RunningShim, alive, eventually, marked, stream_words, unix_call

Start = Callable[..., RunningShim]
ORPHANS = ("--fault", "orphans")


async def _family(shim: RunningShim, marker: str, size: int) -> set[int]:
    """Guard, engine and its children; the shim itself is left out."""
    await eventually(lambda: len(marked(marker)) >= size + 1)
    return set(marked(marker)) - {shim.process.pid}


async def test_killed_shim_takes_its_engine_with_it(start_shim: Start, marker: str) -> None:
    """F34, NA: SIGKILL to the shim leaves no process, not even one with a session of its own."""
    shim = await start_shim(*ORPHANS).serving()
    family = await _family(shim, marker, 4)
    shim.kill()
    await eventually(lambda: not any(map(alive, family)))


async def test_killed_guard_takes_its_engine_with_it(start_shim: Start, marker: str) -> None:
    """The shim finishes what a killed guard cannot, and reports the end."""
    shim = await start_shim(*ORPHANS).serving()
    family = await _family(shim, marker, 4)
    os.kill((await shim.status())["guardPid"], signal.SIGKILL)
    status = await shim.ended()
    assert (status["exitSignal"], status.get("stopRequested", False)) == (9, False)
    assert not any(map(alive, family))


async def test_killed_engine_is_reported_and_its_children_are_gone(start_shim: Start, marker: str) -> None:
    """NA11: the waiter learns of the end at once, with the signal; running streams end with an error (F5)."""
    shim = await start_shim(*ORPHANS, "--decode-base-ms", "20").serving()
    family = await _family(shim, marker, 4)
    stream = asyncio.create_task(stream_words(shim.base, "x", 5000))

    async def runs() -> bool:
        return int((await shim.status()).get("inFlight", 0)) == 1

    await eventually(runs)
    version = (await shim.status())["version"]
    waiting = asyncio.create_task(shim.status(f"?after={version}&wait_s=20"))
    guard = (await shim.status())["guardPid"]
    engine = next(pid for pid in family if _parent(pid) == guard and "nodeagent.engines.sim" in marked(marker)[pid])
    os.kill(engine, signal.SIGKILL)
    status = await waiting
    assert (status["process"], status["exitSignal"]) == ("ENGINE_PROCESS_ENDED", 9)
    assert not any(map(alive, family))
    _, errors, done = await stream
    assert len(errors) == 1
    assert not done


async def test_exit_code_is_reported_and_the_shim_refuses_until_it_may_quit(start_shim: Start) -> None:
    """NA11: the shim keeps the status of a dead engine until the agent has taken it."""
    shim = await start_shim("--fault", "fail_start,exit_code=42").listening()
    status = await shim.ended()
    assert status["exitCode"] == 42
    with pytest.raises(AssertionError, match="gone"):
        await stream_words(shim.base, "x", 1)
    assert (await unix_call(shim.control, "POST", "/v1/quit", {})).status_code == 200
    await eventually(lambda: shim.process.poll() is not None)
    assert shim.process.returncode == 0


async def test_an_interpreter_that_does_not_exist_ends_with_a_clear_line(start_shim: Start, short_dir: Path) -> None:
    """The engine's log says what could not be started."""
    shim = await start_shim(argv=["/nowhere/python", "-m", "x"]).listening()
    assert (await shim.ended())["exitCode"] == 127
    assert "cannot start the engine: /nowhere/python" in (shim.folder / "engine.log").read_text()


async def test_stop_gives_grace_then_kills(start_shim: Start, marker: str) -> None:
    """SIGTERM first, SIGKILL to everything after the grace; a stop without grace is a kill."""
    polite = await start_shim().serving()
    await unix_call(polite.control, "POST", "/v1/stop", {"graceS": 10})
    status = await polite.ended()
    assert (status.get("exitCode", status.get("exitSignal")), status["stopRequested"]) in ((0, True), (15, True))
    stubborn = await start_shim("--fault", "ignore_sigterm", *ORPHANS).serving()
    answer = (await unix_call(stubborn.control, "POST", "/v1/stop", {"graceS": 0.3})).json()
    assert answer["process"] == "ENGINE_PROCESS_STOPPING"
    assert (await stubborn.ended())["exitSignal"] == 9
    hard = await start_shim("--fault", "ignore_sigterm").serving()
    await unix_call(hard.control, "POST", "/v1/stop", {"graceS": 600})
    await unix_call(hard.control, "POST", "/v1/stop", {})
    assert (await hard.ended())["exitSignal"] == 9


async def test_guard_and_shim_stay_small(start_shim: Start) -> None:
    """A shim per worker must not cost what an engine costs."""
    shim = await start_shim().serving()
    guard = (await shim.status())["guardPid"]
    assert _rss_mib(guard) < 20
    assert _rss_mib(shim.process.pid) < 80


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _rss_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def test_orders_that_come_with_the_launch_are_followed(short_dir: Path) -> None:
    """A stop that overtakes the guard's own start is not forgotten: launch and order arrive in one read."""
    order_read, order_write = os.pipe()
    report_read, report_write = os.pipe()
    launch = {"argv": ["/bin/sleep", "600"], "env": {}, "cwd": str(short_dir)}
    os.write(order_write, json.dumps(launch).encode() + b"\nK\n")
    command = [sys.executable, "-I", "-S", guard.__file__, str(order_read), str(report_write)]
    process = subprocess.Popen(command, pass_fds=(order_read, report_write), start_new_session=True)
    os.close(report_write)
    try:
        process.wait(timeout=8.0)
        with open(report_read, "rb") as report:
            assert [json.loads(line)["event"] for line in report] == ["started", "ended"]
    finally:
        process.kill()
        os.close(order_write)
        os.close(order_read)
