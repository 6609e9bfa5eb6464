"""Faults of the simulated engine, injected at start and at run time, and how it ends on signals."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.adapter import ReadyReason
from nodeagent.engines.http import NoAnswer
from nodeagent.engines.sim.faults import FaultError, make_fault, parse_fault
from nodeagent.engines.sim.harm import ORPHAN_MARK
from nodeagent.engines.sim.tokens import answer_text
from tests.engines.conftest import StartSim
from tests.engines.running import Engine, Stream, eventually, stream

COMPLETIONS = "/v1/completions"


def body(prompt: str = "hello", n: int = 10, streamed: bool = True) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": n, "stream": streamed}


async def inject(engine: Engine, **fault: Any) -> Any:
    response = await engine.http.post("/fault", fault)
    assert response.status == 200, response.text()
    return response.json()


async def left(engine: Engine) -> int:
    await eventually(lambda: engine.process.poll() is not None)
    code: int = engine.process.returncode
    return code


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize(("fault", "code"), [("exit_code=3", 3), ("signal=9", -9)])
async def test_crash_after_tokens(sim: StartSim, at_start: bool, fault: str, code: int) -> None:
    flags = ("--fault", f"crash,after_tokens=5,{fault}") if at_start else ()
    engine = await sim(*flags)
    if not at_start:
        name, _, value = fault.partition("=")
        await inject(engine, kind="crash", after_tokens=5, **{name: int(value)})
    got = await stream(engine.command.endpoint, COMPLETIONS, body(n=100))
    assert got.ended == "closed"
    assert answer_text("hello", 100).startswith(got.text)
    assert await left(engine) == code
    assert (await engine.adapter.ready(engine.http)).reason is ReadyReason.NOT_LISTENING


async def test_crash_at_once_still_answers_the_request_that_asked(sim: StartSim) -> None:
    engine = await sim()
    await inject(engine, kind="crash", exit_code=7)
    assert await left(engine) == 7


async def test_a_lifted_crash_does_not_happen(sim: StartSim) -> None:
    engine = await sim()
    await inject(engine, kind="crash", after_s=0.2)
    await inject(engine, kind="crash", after_tokens=5)
    lifted = await engine.http.request("DELETE", "/fault")
    assert lifted.json() == {"faults": [], "orphans": []}
    slow = await stream(engine.command.endpoint, COMPLETIONS, body(n=300))  # takes longer than the crash had time
    assert slow.ended == "done"
    assert engine.process.poll() is None


async def test_hung_process_answers_nothing_and_ignores_sigterm(sim: StartSim) -> None:
    engine = await sim()
    running = await Stream(engine.command.endpoint, COMPLETIONS, body(n=16000)).open()
    await inject(engine, kind="hang")  # begins a moment after its reply

    async def silent() -> bool:
        try:
            await engine.http.get("/health", timeout_s=0.3)
        except NoAnswer:
            return True
        return False

    await eventually(silent)
    assert (await engine.adapter.ready(_quick(engine))).reason is ReadyReason.NO_ANSWER
    engine.process.send_signal(signal.SIGTERM)
    with pytest.raises(NoAnswer):
        await engine.http.get("/health", timeout_s=0.5)
    assert engine.process.poll() is None
    running.close()


def _quick(engine: Engine) -> Any:
    engine.http.timeout_s = 0.5
    return engine.http


async def test_hung_engine_stalls_streams_but_not_health(sim: StartSim) -> None:
    engine = await sim()
    await inject(engine, kind="hang", scope="engine", after_tokens=3)
    running = await Stream(engine.command.endpoint, COMPLETIONS, body(n=500)).open()

    async def hung() -> bool:  # a fault that has struck is no longer in force
        return "hang" not in (await engine.http.get("/fault")).text()

    await eventually(hung)
    produced = (await engine.adapter.load(engine.http)).generation_tokens_total
    assert produced is not None
    assert produced < 500
    while running.seen.text != answer_text("hello", produced):
        assert await running.next() is not None
    stalled = asyncio.create_task(running.next())
    assert (await engine.http.get("/health")).status == 200
    assert not stalled.done()
    await engine.http.request("DELETE", "/fault")
    await stalled
    assert (await running.finish()).text == answer_text("hello", 500)


async def test_cut_stream_closes_without_an_end_once(sim: StartSim) -> None:
    engine = await sim("--fault", "cut_stream,after_tokens=4")
    cut = await stream(engine.command.endpoint, COMPLETIONS, body())
    assert (cut.status, cut.ended, cut.text) == (200, "closed", answer_text("hello", 4))
    assert (await stream(engine.command.endpoint, COMPLETIONS, body())).text == answer_text("hello", 10)


async def test_cut_before_the_first_token_and_without_stream(sim: StartSim) -> None:
    engine = await sim()
    await inject(engine, kind="cut_stream", after_tokens=0, count=0)
    for _ in range(2):
        cut = await stream(engine.command.endpoint, COMPLETIONS, body())
        assert (cut.status, cut.ended, cut.events) == (200, "closed", [])
    whole = await stream(engine.command.endpoint, COMPLETIONS, body(streamed=False))
    assert (whole.status, whole.body) == (0, b"")
    await engine.http.request("DELETE", "/fault")
    assert (await stream(engine.command.endpoint, COMPLETIONS, body())).ended == "done"


async def test_error_event_then_done_as_vllm_does(sim: StartSim) -> None:
    """spec/engines-cpu.md: a killed rank ends the stream with HTTP 200, an error event and [DONE]."""
    engine = await sim()
    await inject(engine, kind="stream_error", after_tokens=2)
    got = await stream(engine.command.endpoint, COMPLETIONS, body())
    assert (got.status, got.ended) == (200, "done")
    assert got.events[-1]["error"]["code"] == 500
    assert "".join(event["choices"][0]["text"] for event in got.events[:-1]) == answer_text("hello", 2)
    await inject(engine, kind="stream_error")
    whole = await stream(engine.command.endpoint, COMPLETIONS, body(streamed=False))
    assert whole.status == 500
    assert await engine.adapter.idle(engine.http) is True


async def test_http_error_for_a_number_of_requests(sim: StartSim) -> None:
    engine = await sim()
    await inject(engine, kind="http_error", status=503, count=2)
    statuses = [(await stream(engine.command.endpoint, COMPLETIONS, body())).status for _ in range(3)]
    assert statuses == [503, 503, 200]


async def test_refused_health(sim: StartSim) -> None:
    engine = await sim()
    await inject(engine, kind="refuse_health")
    assert (await engine.adapter.ready(engine.http)).reason is ReadyReason.UNHEALTHY
    await engine.http.request("DELETE", "/fault")
    assert (await engine.adapter.ready(engine.http)).ready


async def test_slow_start_and_slow_steps(launch_sim: Callable[..., Engine]) -> None:
    engine = launch_sim("--fault", "slow_start,seconds=0.4", "--fault", "slow,factor=3")
    assert (await engine.adapter.ready(engine.http)).reason is ReadyReason.NOT_LISTENING
    await engine.until_ready()
    assert (await stream(engine.command.endpoint, COMPLETIONS, body())).text == answer_text("hello", 10)


async def test_failed_start(launch_sim: Callable[..., Engine]) -> None:
    engine = launch_sim("--fault", "fail_start,exit_code=4")
    assert await left(engine) == 4
    assert "injected failure" in engine.log.read_text()


async def test_orphans_outlive_the_engine_until_they_are_killed(sim: StartSim) -> None:
    """One stays in the engine's group, one leaves it: what the guard must clean up."""
    engine = await sim()
    pids = (await inject(engine, kind="orphans"))["orphans"]
    try:
        assert os.getpgid(pids[0]) == engine.process.pid
        assert os.getpgid(pids[1]) == pids[1]
        for pid in pids:  # a child is this mark only once it has executed
            await eventually(partial(_is_orphan, pid))
            await eventually(partial(_ignores_sigterm, pid))
        engine.process.terminate()
        assert await left(engine) == 0
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            assert _is_orphan(pid)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        await eventually(partial(_gone, pid))


def _is_orphan(pid: int) -> bool:
    return ORPHAN_MARK in Path(f"/proc/{pid}/cmdline").read_text()


def _ignores_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_ignored_sigterm(sim: StartSim) -> None:
    engine = await sim("--fault", "ignore_sigterm")
    engine.process.terminate()
    assert (await stream(engine.command.endpoint, COMPLETIONS, body())).ended == "done"
    await eventually(lambda: "SIGTERM ignored" in engine.log.read_text())
    assert engine.process.poll() is None


async def test_sigterm_drains_running_streams_and_refuses_new_ones(sim: StartSim) -> None:
    """NA10; new requests get vLLM's 500 while /health still says 200."""
    engine = await sim("--shutdown-timeout", "20", "--decode-base-ms", "200")
    running = await Stream(engine.command.endpoint, COMPLETIONS, body(n=30)).open()
    await running.next()
    engine.process.terminate()

    async def refused() -> bool:
        return (await engine.http.post(COMPLETIONS, body("late", 1))).status == 500

    await eventually(refused)
    assert (await engine.http.get("/health")).status == 200
    got = await running.finish()
    assert (got.ended, got.text) == ("done", answer_text("hello", 30))
    assert await left(engine) == 0
    assert not engine.socket.exists()


async def test_sigterm_without_time_to_drain_cuts(sim: StartSim) -> None:
    engine = await sim("--shutdown-timeout", "0")
    running = await Stream(engine.command.endpoint, COMPLETIONS, body(n=16000)).open()
    await running.next()
    engine.process.terminate()
    assert (await running.finish()).ended == "closed"
    assert await left(engine) == 0


async def test_sigterm_while_starting(launch_sim: Callable[..., Engine]) -> None:
    engine = launch_sim("--fault", "slow_start,seconds=600")
    await eventually(lambda: _catches_sigterm(engine.process.pid))
    engine.process.terminate()
    assert await left(engine) == 0


def _catches_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("text", ["nope", "crash,exit_code", "crash,colour=red", "crash,after_s=soon", "hang,scope=x"])
def test_wrong_faults_are_named(text: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text)
    assert text.partition(",")[0] in str(caught.value)


def test_start_only_faults_are_refused_at_run_time() -> None:
    with pytest.raises(FaultError, match="at start only"):
        make_fault({"kind": "fail_start"}, at_start=False)


async def test_wrong_fault_at_run_time_changes_nothing(sim: StartSim) -> None:
    engine = await sim()
    response = await engine.http.post("/fault", {"kind": "meltdown"})
    assert response.status == 400
    assert (await engine.http.get("/fault")).json() == {"faults": [], "orphans": []}
