"""Probes against canned answers: the HTTP client's bounds, metrics text, and SGLang's surface (no SGLang runs here)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeagent.engines.adapter import EngineLoad, ReadyReason
from nodeagent.engines.http import EngineHttp, NoAnswer, NotListening
from nodeagent.engines.metrics_text import highest, read_metrics, total
from nodeagent.engines.registry import engine_adapter
from springtide.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented

Answers = Mapping[str, tuple[int, bytes]]


@asynccontextmanager
async def canned(folder: Path, answers: Answers) -> AsyncIterator[tuple[EngineHttp, list[str]]]:
    """A server that answers `METHOD /path` from a table (404 otherwise), and what it was asked."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
        body = await reader.readexactly(size)
        method, path, _ = head.split(maxsplit=2)
        asked.append(f"{method} {path} {body.decode()}".strip())
        status, answer = answers.get(f"{method} {path}", (404, b""))
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))
        await writer.drain()
        writer.close()

    async with raw_server(folder, serve) as http:
        yield http, asked


@asynccontextmanager
async def raw_server(
    folder: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[EngineHttp]:
    path = folder / "canned"
    server = await asyncio.start_unix_server(serve, path)
    try:
        yield EngineHttp(f"unix:{path}", timeout_s=5.0, max_body_bytes=10_000)
    finally:
        server.close()


async def answer_with(folder: Path, raw: bytes, close: bool = True, timeout_s: float = 5.0) -> object:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        if close:
            writer.close()
        else:
            await reader.read()  # until the client gives up

    async with raw_server(folder, serve) as http:
        return await http.get("/x", timeout_s)


async def test_nobody_there(folder: Path) -> None:
    http = EngineHttp(f"unix:{folder}/none")
    with pytest.raises(NotListening, match="nobody listens"):
        await http.get("/health")
    assert (await engine_adapter("vllm").ready(http)).reason is ReadyReason.NOT_LISTENING


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "ended early"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "ended early"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", "ended early"),
        (b"SSH-2.0-nonsense\r\n\r\n", "no valid HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 20000\r\n\r\n" + b"x" * 20_000, "larger than"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", "larger than"),
    ],
)
async def test_broken_answers_are_no_answers(folder: Path, raw: bytes, said: str) -> None:
    with pytest.raises(NoAnswer, match=said):
        await answer_with(folder, raw)


async def test_an_answer_that_does_not_come(folder: Path) -> None:
    with pytest.raises(NoAnswer, match=r"within 0\.2 s"):
        await answer_with(folder, b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab", close=False, timeout_s=0.2)


async def test_whole_answers_in_each_framing(folder: Path) -> None:
    for raw in (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nok",
    ):
        response = await answer_with(folder, raw)
        assert (response.status, response.body, response.json()) == (200, b"ok", None)  # type: ignore[attr-defined]


def test_metrics_text() -> None:
    text = '# HELP a b\na{x="1",y="} 7"} 2\na{x="2"} 3.0 1700000000\nb 0.25\nb{r="1"} 0.75\nc NaN\nd\ne{broken\nab 9\n'
    samples = read_metrics(text, {"a", "b", "c", "d", "e"})
    assert samples == {"a": [2.0, 3.0], "b": [0.25, 0.75]}
    assert (total(samples, "a"), total(samples, "c"), highest(samples, "b"), highest(samples, "z")) == (
        5,
        None,
        0.75,
        None,
    )


async def test_missing_metrics_are_unknown_not_zero(folder: Path) -> None:
    """DESIGN rule 1."""
    for name in ("vllm", "sglang", "llamacpp", "sim"):
        async with canned(folder, {}) as (http, _):
            assert await engine_adapter(name).load(http) == EngineLoad()
            assert await engine_adapter(name).idle(http) is None
        async with canned(folder, {"GET /metrics": (200, b"vllm:num_requests_running 0\n")}) as (http, _):
            assert (await engine_adapter(name).load(http)).waiting is None
            assert await engine_adapter(name).idle(http) is None


SGLANG_METRICS = b"""sglang:num_running_reqs{tp_rank="0",dp_rank="0"} 3.0
sglang:num_queue_reqs{tp_rank="0",dp_rank="0"} 1.0
sglang:token_usage{tp_rank="0",dp_rank="0"} 0.5
sglang:generation_tokens_total{model_name="demo"} 77.0
"""
SGLANG_IDLE = b"sglang:num_running_reqs 0.0\nsglang:num_queue_reqs 0.0\n"


async def test_sglang_load(folder: Path) -> None:
    async with canned(folder, {"GET /metrics": (200, SGLANG_METRICS)}) as (http, _):
        load = await engine_adapter("sglang").load(http)
    assert load == EngineLoad(running=3, waiting=1, kv_use=0.5, generation_tokens_total=77)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"GET /ready": (200, b"")}, ReadyReason.READY),
        ({"GET /ready": (503, b""), "GET /health": (200, b"")}, ReadyReason.PAUSED),
        ({"GET /ready": (503, b""), "GET /health": (503, b"")}, ReadyReason.UNHEALTHY),
        ({"GET /health": (200, b"")}, ReadyReason.READY),
        ({}, ReadyReason.UNHEALTHY),
    ],
)
async def test_sglang_readiness_without_generating(folder: Path, answers: Answers, reason: ReadyReason) -> None:
    """NA16: no generating probe."""
    async with canned(folder, answers) as (http, asked):
        assert (await engine_adapter("sglang").ready(http)).reason is reason
    assert all(path in ("GET /ready", "GET /health") for path in asked)


async def test_sglang_never_releases_a_busy_engine(folder: Path) -> None:
    """NA8: on a busy one the call would end the server."""
    adapter = engine_adapter("sglang")
    for metrics in (SGLANG_METRICS, b""):
        async with canned(folder, {"GET /metrics": (200, metrics)}) as (http, asked):
            with pytest.raises(FailedPrecondition, match="not idle"):
                await adapter.release(http, 1)
            assert not any(request.startswith("POST") for request in asked)
    answers = {"GET /metrics": (200, SGLANG_IDLE), "POST /release_memory_occupation": (200, b"")}
    async with canned(folder, answers) as (http, asked):
        await adapter.release(http, 1)
        assert asked[-1] == 'POST /release_memory_occupation {"tags":["kv_cache","weights"]}'
        with pytest.raises(Unimplemented, match="--enable-memory-saver"):
            await adapter.restore(http)


async def test_sglang_verbs(folder: Path) -> None:
    answers = {
        "POST /abort_request": (200, b""),
        "POST /pause_generation": (200, b""),
        "POST /continue_generation": (200, b""),
        "POST /flush_cache": (400, b""),
    }
    adapter = engine_adapter("sglang")
    async with canned(folder, answers) as (http, asked):
        await adapter.abort_all(http)
        await adapter.pause(http, "keep")
        await adapter.resume(http)
        with pytest.raises(FailedPrecondition):
            await adapter.flush_cache(http)
        with pytest.raises(InvalidArgument, match="abort or keep"):
            await adapter.pause(http, "wait")
    assert asked[:3] == [
        'POST /abort_request {"abort_all":true}',
        'POST /pause_generation {"mode":"in_place"}',
        "POST /continue_generation {}",
    ]


async def test_refused_verbs_quote_the_engine(folder: Path) -> None:
    async with canned(folder, {"POST /resume": (500, b"no way")}) as (http, _):
        with pytest.raises(Unavailable, match=r"resume \(500\): no way"):
            await engine_adapter("vllm").resume(http)


async def test_vllm_is_not_released_while_busy(folder: Path) -> None:
    answers = {
        "GET /health": (200, b""),
        "GET /metrics": (200, b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"),
    }
    async with canned(folder, answers) as (http, asked):
        with pytest.raises(FailedPrecondition):
            await engine_adapter("vllm").release(http, 1)
    assert not any(line.startswith("POST") for line in asked)


async def test_vllm_without_metrics_state_still_tells_sleep_from_pause(folder: Path) -> None:
    sleeping = {"GET /health": (200, b""), "GET /is_sleeping": (200, b'{"is_sleeping":true}')}
    async with canned(folder, sleeping) as (http, _):
        assert (await engine_adapter("vllm").ready(http)).reason is ReadyReason.SLEEPING
    paused = {**sleeping, "GET /is_paused": (200, b'{"is_paused":true}')}
    async with canned(folder, paused) as (http, _):
        assert (await engine_adapter("vllm").ready(http)).reason is ReadyReason.PAUSED
