"""The lean client: events, whole bodies, failures by kind, and leaving early."""

import asyncio
import socket

import pytest

from springtide.dataplane import Limits, OutcomeKind, Route, TcpAddress, UpstreamPool
from springtide.dataplane.client import Call, UpstreamFailure, call, get, post
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, Peer, chunk, event, says, stream_of, until, upstream

ERROR = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'


async def consume(request: Call, got: list[bytes]) -> None:
    async with request as answer:
        async for data in answer.events():
            got.append(data)  # noqa: PERF401 - what came before a failure counts


async def test_events_and_reuse() -> None:
    async with upstream(says(stream_of(3))) as up:
        pool = UpstreamPool(Limits())
        for _ in range(2):
            async with post(up.address, "/v1/completions", b'{"stream": true}', [(b"x-a", b"b")], pool=pool) as answer:
                assert (answer.status, answer.event_stream) == (200, True)
                assert [e async for e in answer.events()] == [b'{"i": %d}' % i for i in range(3)]
        assert up.connections == 1
        assert b"x-a: b\r\n" in up.requests[0].head
        assert up.requests[0].body == b'{"stream": true}'
        pool.close()


async def test_events_in_small_pieces() -> None:
    data = stream_of(4)
    pieces = (data[i : i + 3] for i in range(0, len(data), 3))
    async with upstream(says(*pieces)) as up, post(up.address, "/", b"") as answer:
        assert len([e async for e in answer.events()]) == 4


async def test_whole_bodies() -> None:
    async with upstream(
        says(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\nx-y: z\r\n\r\nnope"),
        says(b"HTTP/1.1 200 OK\r\n\r\nuntil close", close=True),
    ) as up:
        async with get(up.address, "/a") as answer:
            assert (answer.status, answer.header(b"x-y"), await answer.read()) == (404, b"z", b"nope")
        async with get(up.address, "/a") as answer:
            assert await answer.read() == b"until close"


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((SSE_HEAD + chunk(event(0)), chunk(ERROR) + chunk(DONE) + LAST), OutcomeKind.UPSTREAM_ERROR_EVENT),
        ((SSE_HEAD + chunk(event(0)),), OutcomeKind.UPSTREAM_EOF),
        ((SSE_HEAD + chunk(event(0)) + LAST,), OutcomeKind.UPSTREAM_EOF),
        ((SSE_HEAD + chunk(event(0)) + b"zz\r\n",), OutcomeKind.BAD_RESPONSE),
    ],
)
async def test_failures_after_an_event(pieces: tuple[bytes, ...], kind: OutcomeKind) -> None:
    async with upstream(says(*pieces, close=True)) as up:
        got: list[bytes] = []
        with pytest.raises(UpstreamFailure) as failure:
            await consume(call("POST", Route(up.address), "/", b""), got)
        assert failure.value.kind is kind
        if kind is not OutcomeKind.BAD_RESPONSE:
            assert got == [b'{"i": 0}']


async def test_failures_before_the_head() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = TcpAddress("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UpstreamFailure) as failure:
        async with get(dead, "/"):
            pass
    assert failure.value.kind is OutcomeKind.CONNECT_FAILED
    async with upstream(says(b"", close=True), says(b"what?\r\n\r\n")) as up:
        for kind in (OutcomeKind.UPSTREAM_EOF, OutcomeKind.BAD_RESPONSE):
            with pytest.raises(UpstreamFailure) as failure:
                async with get(up.address, "/"):
                    pass
            assert failure.value.kind is kind


@pytest.mark.parametrize(
    ("name", "bounds", "sent"),
    [
        ("first_byte", {"first_byte_timeout_s": 0.1}, b""),
        ("idle", {"idle_timeout_s": 0.1}, SSE_HEAD + chunk(event(0))),
        ("total", {"total_timeout_s": 0.1}, SSE_HEAD + chunk(event(0))),
    ],
)
async def test_time_outs_cut_the_upstream(name: str, bounds: dict[str, float], sent: bytes) -> None:
    """RT11"""
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(sent)
        await peer.closed()
        cut.set()

    async with upstream(script) as up:
        with pytest.raises(UpstreamFailure) as failure:
            await consume(call("POST", Route(up.address, **bounds), "/", b""), [])  # type: ignore[arg-type]
        assert (failure.value.kind, failure.value.timeout) == (OutcomeKind.TIMEOUT, name)
        await asyncio.wait_for(cut.wait(), 5)


async def test_leaving_early_and_cancellation_cut_the_upstream() -> None:
    """RT8"""
    cuts = 0

    async def script(peer: Peer) -> None:
        nonlocal cuts
        await peer.send(SSE_HEAD + chunk(event(0)))
        await peer.closed()
        cuts += 1

    async with upstream(script) as up:
        async with post(up.address, "/", b"") as answer:
            async for _ in answer.events():
                break
        await until(lambda: cuts == 1)
        task = asyncio.create_task(consume(post(up.address, "/", b""), []))
        await until(lambda: len(up.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: cuts == 2)


async def test_a_stale_connection_is_replaced() -> None:
    async def answer_then_close_on_next(peer: Peer) -> None:
        await peer.send(stream_of(1))
        await peer.reader.readuntil(b"{}")
        peer.writer.close()

    async with upstream(answer_then_close_on_next, says(stream_of(1))) as up:
        pool = UpstreamPool(Limits())
        for _ in range(2):
            async with post(up.address, "/", b"{}", pool=pool) as answer:
                assert len([e async for e in answer.events()]) == 1
        assert up.connections == 2
        pool.close()


async def test_a_consumer_that_is_behind_holds_the_upstream_back() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.send(SSE_HEAD)
        for _ in range(600):
            await peer.send(chunk(b"data: " + b"x" * 60_000 + b"\n\n"))
            sent += 1
        await peer.send(chunk(DONE) + LAST)

    async with upstream(script) as up, post(up.address, "/", b"") as answer:
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 590
        assert len([e async for e in answer.events()]) == 600
