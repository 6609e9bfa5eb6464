"""The shim as a real process in front of the simulated engine: routes, refusals, counts, drains."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from tests.nodeagent.processes import RunningShim, eventually, expected, stream_words, unix_call

Start = Callable[..., RunningShim]
SLOW = ("--decode-base-ms", "20")


async def _complete(base: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(f"{base}/v1/completions", json={"prompt": "p", "max_tokens": 2}, headers=headers)


async def _in_flight(shim: RunningShim) -> int:
    return int((await shim.status()).get("inFlight", 0))


def _holds(shim: RunningShim, n: int) -> Callable[[], Any]:
    async def check() -> bool:
        return await _in_flight(shim) == n

    return check


async def test_token_routes_and_nothing_else(start_shim: Start) -> None:
    """No admin route of the engine is reachable through the data port."""
    shim = await start_shim().serving()
    words, errors, done = await stream_words(shim.base, "hello", 20)
    assert ("".join(words), errors, done) == (expected("hello", 20), [], True)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{shim.base}/v1/models")).json()["data"][0]["id"] == "sim"
        for path in ("/health", "/metrics", "/sleep", "/v1/status", "/fault", "/pause"):
            assert (await client.post(f"{shim.base}{path}")).status_code == 404, path
        wrong = await client.get(f"{shim.base}/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert (await client.post(f"{shim.base}/tokenize", json={"prompt": "abc"})).status_code == 200
    assert (await shim.status())["totalServed"] == "2"


async def test_control_socket_is_private(start_shim: Start) -> None:
    """Only the user of the agent can open the control socket."""
    shim = await start_shim().listening()
    assert shim.control.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("admission", "reason"), [("STARTING", "starting"), ("PAUSED", "paused"), ("DRAINING", "draining")]
)
async def test_closed_admissions_refuse(start_shim: Start, admission: str, reason: str) -> None:
    """A refusal names its reason and is retryable; the engine never sees the request."""
    shim = await start_shim().serving()
    await shim.admission(admission)
    answer = await _complete(shim.base)
    assert (answer.status_code, answer.headers["x-springtide-refusal"]) == (503, reason)
    assert answer.json()["error"]["code"] == reason
    assert int(answer.headers["retry-after"]) >= 1
    metrics = (await unix_call(shim.engine, "GET", "/metrics")).text
    assert 'prompt_tokens_total{engine="0",model_name="sim"} 0' in metrics
    await shim.admission("OPEN")
    assert (await _complete(shim.base)).status_code == 200


async def test_another_incarnation_is_refused(start_shim: Start) -> None:
    """A request that was meant for an earlier engine of this worker goes elsewhere."""
    shim = await start_shim().serving()
    answer = await _complete(shim.base, **{"x-springtide-incarnation": "6"})
    assert (answer.status_code, answer.headers["x-springtide-refusal"]) == (503, "incarnation")
    assert (await _complete(shim.base, **{"x-springtide-incarnation": "7"})).status_code == 200


async def test_full_is_refused_until_one_leaves(start_shim: Start) -> None:
    """At most max_in_flight requests are inside; the bound can be changed while it runs."""
    shim = await start_shim(*SLOW, maxInFlight=2).serving()
    running = [asyncio.create_task(stream_words(shim.base, f"r{i}", 60)) for i in range(2)]
    await eventually(_holds(shim, 2))
    answer = await _complete(shim.base)
    assert (answer.status_code, answer.headers["x-springtide-refusal"]) == (503, "full")
    await shim.admission("OPEN", maxInFlight=3)
    assert (await _complete(shim.base)).status_code == 200
    assert [(len(words), done) for words, _, done in await asyncio.gather(*running)] == [(60, True)] * 2


async def test_counts_are_exact_over_many_streams_and_disconnects(start_shim: Start) -> None:
    """RT3, F23: in-flight is the stream's lifetime; a client that leaves is counted out and aborted (F6)."""
    shim = await start_shim("--decode-base-ms", "10").serving()
    stay = [asyncio.create_task(stream_words(shim.base, f"stay{i}", 50)) for i in range(30)]
    leave = [asyncio.create_task(stream_words(shim.base, f"leave{i}", 5000)) for i in range(20)]
    await eventually(_holds(shim, 50))
    for task in leave:
        task.cancel()
    for i, (words, errors, done) in enumerate(await asyncio.gather(*stay)):
        assert ("".join(words), errors, done) == (expected(f"stay{i}", 50), [], True)
    await eventually(_holds(shim, 0))
    status = await shim.status()
    assert (status["totalServed"], status["clientGoneTotal"], status["idleS"] >= 0) == ("30", "20", True)

    async def engine_idle() -> bool:
        metrics = (await unix_call(shim.engine, "GET", "/metrics")).text
        return 'num_requests_running{engine="0",model_name="sim"} 0' in metrics

    await eventually(engine_idle)


async def test_drain_finishes_what_runs(start_shim: Start) -> None:
    """F1: a draining shim refuses new requests, finishes running ones, and tells the waiter when it is empty."""
    shim = await start_shim(*SLOW).serving()
    running = [asyncio.create_task(stream_words(shim.base, f"d{i}", 40)) for i in range(5)]
    await eventually(_holds(shim, 5))
    version = (await shim.admission("DRAINING", 2)).json()["version"]
    assert (await _complete(shim.base)).headers["x-springtide-refusal"] == "draining"
    status = await shim.status(f"?after={version}&wait_s=20")
    assert status.get("inFlight", "0") == "0"
    assert status["version"] > version
    ends = await asyncio.gather(*running)
    assert [(len(words), errors, done) for words, errors, done in ends] == [(40, [], True)] * 5


async def test_drain_with_abort_ends_streams_with_an_explicit_error(start_shim: Start) -> None:
    """DESIGN rule 6: a stream is cut with an error event and without [DONE], never silently."""
    shim = await start_shim(*SLOW).serving()
    running = [asyncio.create_task(stream_words(shim.base, f"a{i}", 5000)) for i in range(3)]
    await eventually(_holds(shim, 3))

    async def all_decode() -> bool:
        lines = (await unix_call(shim.engine, "GET", "/metrics")).text.splitlines()
        return any(line.startswith("vllm:generation_tokens_total") and float(line.split()[-1]) > 20 for line in lines)

    await eventually(all_decode)
    await shim.admission("DRAINING", 2, abortInFlight=True)
    for i, (words, errors, done) in enumerate(await asyncio.gather(*running)):
        assert "".join(words) == expected(f"a{i}", len(words))
        assert ([error["type"] for error in errors], done) == (["worker_drained"], False)
    assert (await shim.status())["abortedTotal"] == "3"


async def test_orders_of_an_older_generation_are_refused(start_shim: Start) -> None:
    """An order that was overtaken changes nothing."""
    shim = await start_shim().serving()
    await shim.admission("DRAINING", 5)
    late = await shim.admission("OPEN", 4)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "older_generation")
    assert (await shim.status())["admission"] == "SHIM_ADMISSION_DRAINING"
    assert (await shim.admission("OPEN", 5)).status_code == 200


async def test_status_waits_for_a_change(start_shim: Start) -> None:
    """The long poll answers when the version grows, and after its bound otherwise."""
    shim = await start_shim().serving()
    version = int((await shim.status())["version"])
    waiting = asyncio.create_task(shim.status(f"?after={version}&wait_s=20"))
    unchanged = await shim.status(f"?after={version}&wait_s=0.05")
    assert int(unchanged["version"]) == version
    await shim.admission("PAUSED")
    assert (await waiting)["admission"] == "SHIM_ADMISSION_PAUSED"


async def test_bad_control_requests_are_answered(start_shim: Start) -> None:
    """A wrong body, a wrong word, an unknown route and a quit too early are errors, not crashes."""
    shim = await start_shim().listening()
    for target, body, status in (
        ("/v1/admission", {"admission": 77, "generation": 1}, 400),
        ("/v1/admission", {"generation": "x"}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/quit", {}, 409),
    ):
        assert (await unix_call(shim.control, "POST", target, body)).status_code == status, target
    assert (await unix_call(shim.control, "GET", "/v1/status?after=x")).status_code == 400
    assert shim.process.poll() is None


async def test_sigterm_stops_the_engine_and_leaves(start_shim: Start) -> None:
    """SIGINT and SIGHUP are not for a shim; SIGTERM stops its engine and ends it with 0."""
    shim = await start_shim().serving()
    os.kill(shim.process.pid, signal.SIGINT)
    os.kill(shim.process.pid, signal.SIGHUP)
    assert (await _complete(shim.base)).status_code == 200
    os.kill(shim.process.pid, signal.SIGTERM)
    await eventually(lambda: shim.process.poll() is not None)
    assert shim.process.returncode == 0
    assert not shim.control.exists()


async def test_ports_in_use_are_passed_over_and_an_empty_range_ends_the_shim(start_shim: Start) -> None:
    """NA3, F36: the shim holds the port that it found; a range without a free one is a clear error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shim = start_shim(portFirst=port, portLast=port)
        await eventually(lambda: shim.process.poll() is not None)
        assert shim.process.returncode == 3
        assert f"every port of {port}-{port} on 127.0.0.1 is in use" in (shim.folder / "shim.log").read_text()
        wider = await start_shim(portFirst=port, portLast=port + 20).listening()
        assert port < (await wider.status())["port"] <= port + 20


async def test_a_bad_launch_file_is_named(start_shim: Start) -> None:
    """Exit code 2 and one line that names the field."""
    shim = start_shim(controlPath="")
    await eventually(lambda: shim.process.poll() is not None)
    assert shim.process.returncode == 2
    assert "control_path" in (shim.folder / "shim.log").read_text()
