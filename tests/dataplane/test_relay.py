"""The relay between real sockets: streams, bodies, retries, time-outs, aborts (RT3-RT6, RT8, RT11; F3-F6, F11, F23)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from springtide.dataplane import Limits, Outcome, OutcomeKind, RelayServer, Reply, Retry, Route, TcpAddress, UnixAddress
from springtide.dataplane.exchange import Exchange
from springtide.dataplane.server import ClientConnection
from tests.dataplane.fakes import (
    DONE,
    LAST,
    SSE_HEAD,
    Peer,
    Recorder,
    chunk,
    client,
    dechunk,
    event,
    post,
    relay,
    says,
    stream_of,
    until,
    upstream,
)

ERROR = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'


def body_of(answer: bytes) -> tuple[bytes, bytes, bool]:
    """Head, payload, and whether the body ended clean."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    payload, clean = dechunk(rest)
    return head, payload, clean


def retry_to(address: TcpAddress, times: int = 1) -> Callable[[Outcome], Retry | None]:
    left = [times]

    def decide(outcome: Outcome) -> Retry | None:
        if outcome.kind is OutcomeKind.OK or not left[0]:
            return None
        left[0] -= 1
        return Retry(Route(address))

    return decide


async def test_a_stream_passes_whole_and_the_connections_are_kept() -> None:
    """RT2, RT6"""
    async with upstream(says(stream_of(5))) as up:
        director = Recorder(lambda r: Route(up.address, headers=((b"x-springtide-incarnation", b"7"),)))
        async with relay(director) as (server, port), client(port) as c:
            for _ in range(3):
                c.send(post(extra=b"x-springtide-incarnation: 666\r\nx-keep: yes\r\n"))
                head = await c.head()
                assert b"text/event-stream" in head
                assert await c.chunks() == b"".join(map(event, range(5))) + DONE
            await until(lambda: len(director.outcomes) == 3)
            assert server.pool.idle_count(up.address) == 1
        assert up.connections == 1
        assert b"x-springtide-incarnation: 7\r\n" in up.requests[0].head
        assert b"666" not in up.requests[0].head
        assert b"x-keep: yes\r\n" in up.requests[0].head
        outcome = director.outcomes[0]
        assert (outcome.kind, outcome.status, outcome.events) == (OutcomeKind.OK, 200, 5)
        assert outcome.response_started
        assert outcome.first_byte_at is not None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
async def test_any_split_of_the_upstreams_bytes(size: int) -> None:
    data = SSE_HEAD + chunk(b": ping\r\n\r\n" + event(0)[:5]) + chunk(event(0)[5:] + event(1)) + chunk(b": ping\n\n")
    data += chunk(b'data: {"i": 2}\r\n\r\n') + chunk(DONE) + LAST

    async def script(peer: Peer) -> None:
        peer.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), size):
            await peer.send(data[at : at + size])
            await asyncio.sleep(0)

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await c.head()
            expected = b": ping\r\n\r\n" + event(0) + event(1) + b": ping\n\n" + b'data: {"i": 2}\r\n\r\n' + DONE
            assert await c.chunks() == expected
            await until(lambda: director.outcomes)
            assert director.outcomes[0].events == 3


def partial(exchange: Exchange) -> bool:
    attempt = exchange.attempt
    return attempt is not None and attempt.scan is not None and attempt.scan.partial


async def test_head_leaves_in_one_write_with_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule that spares 40 ms: one write for head and first token, NODELAY on both sides."""
    writes: list[bytes] = []

    class Wrapped:
        def __init__(self, transport: asyncio.Transport) -> None:
            self.transport = transport

        def write(self, data: bytes) -> None:
            writes.append(bytes(data))
            self.transport.write(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self.transport, name)

    made = ClientConnection.connection_made
    nodelay: list[int] = []

    def connection_made(self: ClientConnection, transport: asyncio.Transport) -> None:
        made(self, transport)
        sock = transport.get_extra_info("socket")
        nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        self.transport = Wrapped(transport)  # type: ignore[assignment]

    monkeypatch.setattr(ClientConnection, "connection_made", connection_made)
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        await peer.send(chunk(event(0)[:4]))
        await asyncio.wait_for(go.wait(), 5)
        await peer.send(chunk(event(0)[4:]))
        await peer.send(chunk(event(1)) + chunk(DONE) + LAST)

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address, key="w"))
        async with relay(director) as (server, port), client(port) as c:
            c.send(post())
            await until(lambda: up.requests and any(partial(x) for x in server.exchanges))
            assert writes == []
            upstream_socket = next(iter(server.exchanges)).attempt.conn.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert upstream_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            go.set()
            await c.head()
            await c.chunks()
        assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert event(0) in writes[0]
        assert all(nodelay)


async def test_error_event_before_anything_was_sent_is_retried_unseen() -> None:
    """RT5: a killed rank answers 200, an error event and [DONE]."""
    bad = says(SSE_HEAD + chunk(b": ping\n\n") + chunk(ERROR) + chunk(DONE) + LAST)
    async with upstream(bad, says(stream_of(2))) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(TcpAddress("127.0.0.1", up.port)))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await c.head()
            assert await c.chunks() == event(0) + event(1) + DONE
        kinds = [o.kind for o in director.outcomes]
        assert kinds == [OutcomeKind.UPSTREAM_ERROR_EVENT, OutcomeKind.OK]
        assert not director.outcomes[0].response_started


async def test_error_event_without_a_retry_is_an_error_status() -> None:
    async with (
        upstream(says(SSE_HEAD + chunk(ERROR) + chunk(DONE) + LAST)) as up,
        relay(Recorder(lambda r: Route(up.address))) as (_, port),
        client(port) as c,
    ):
        c.send(post())
        status, body = await c.answer()
        assert status == 500
        assert b"EngineCore died" in body


async def test_error_event_that_blames_the_client_is_a_4xx_and_no_retry() -> None:
    bad = b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}\n\n'
    async with upstream(says(SSE_HEAD + chunk(bad) + chunk(DONE) + LAST)) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            status, body = await c.answer()
            assert status == 400
            assert b"too long" in body
        assert [o.kind for o in director.outcomes] == [OutcomeKind.OK]


@pytest.mark.parametrize("together", [True, False])
async def test_error_event_after_the_first_token_is_explicit_and_never_a_clean_end(together: bool) -> None:
    """RT5"""
    pieces = [chunk(event(1)), chunk(ERROR), chunk(DONE) + LAST]
    if together:
        pieces = [b"".join(pieces)]

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        for piece in pieces:
            await asyncio.sleep(0.02)
            await peer.send(piece)

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            _, payload, clean = body_of(await c.rest())
            assert payload.startswith(event(0) + event(1) + b'data: {"error":')
            assert b"EngineCore died" in payload
            assert b"[DONE]" not in payload
            assert not clean
        assert [o.kind for o in director.outcomes] == [OutcomeKind.UPSTREAM_ERROR_EVENT]


@pytest.mark.parametrize("end", [b"", LAST, chunk(b'data: {"half')])
async def test_a_stream_without_done_is_an_explicit_error(end: bytes) -> None:
    """RT5, F3: no silent cut, also when the upstream ends its chunked body properly."""

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await asyncio.sleep(0.02)
        await peer.send(end)
        peer.writer.close()

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            _, payload, clean = body_of(await c.rest())
            assert payload.startswith(event(0) + b'data: {"error":')
            assert b"half" not in payload
            assert not clean
        assert director.outcomes[0].kind is OutcomeKind.UPSTREAM_EOF


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", SSE_HEAD, SSE_HEAD + chunk(event(0)[:6]), SSE_HEAD + LAST])
async def test_an_early_end_before_the_first_event_is_retried(sent: bytes) -> None:
    """RT5"""
    async with upstream(says(sent, close=True), says(stream_of(1))) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(TcpAddress("127.0.0.1", up.port)))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await c.head()
            assert await c.chunks() == event(0) + DONE
        assert [o.kind for o in director.outcomes] == [OutcomeKind.UPSTREAM_EOF, OutcomeKind.OK]


async def test_hanging_up_after_done_is_a_clean_end() -> None:
    async with upstream(says(SSE_HEAD + chunk(event(0)) + chunk(DONE), close=True)) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await c.head()
            assert await c.chunks() == event(0) + DONE
        assert [o.kind for o in director.outcomes] == [OutcomeKind.OK]


async def test_streams_with_length_or_until_close() -> None:
    payload = event(0) + event(1) + DONE
    plain = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    with_length = says(plain + b"content-length: %d\r\n\r\n" % len(payload), event(0), event(1), DONE)
    async with upstream(with_length, says(plain + b"\r\n" + payload, close=True)) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            for _ in range(2):
                c.send(post())
                await c.head()
                assert await c.chunks() == payload
        assert [o.kind for o in director.outcomes] == [OutcomeKind.OK] * 2


async def test_an_http_1_0_client_gets_a_plain_body() -> None:
    async with (
        upstream(says(stream_of(2))) as up,
        relay(Recorder(lambda r: Route(up.address))) as (_, port),
        client(port) as c,
    ):
        c.send(b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
        head, _, payload = (await c.rest()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert payload == event(0) + event(1) + DONE


async def test_refusal_is_retried_and_passed_on_without_a_retry() -> None:
    """F4: a draining worker refuses, the client never sees it."""
    refusal = (
        b"HTTP/1.1 503 Service Unavailable\r\nx-springtide-refusal: draining\r\nretry-after: 3\r\n"
        b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    async with upstream(says(refusal), says(stream_of(1)), says(refusal)) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(TcpAddress("127.0.0.1", up.port)))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await c.head()
            await c.chunks()
            await until(lambda: len(director.outcomes) == 2)
            c.send(post())
            head = await c.head()
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 3" in head
            assert await c.exactly(2) == b"{}"
        assert [(o.kind, o.refusal) for o in director.outcomes] == [
            (OutcomeKind.REFUSED, "draining"),
            (OutcomeKind.OK, ""),
            (OutcomeKind.REFUSED, "draining"),
        ]
        assert up.connections == 1


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_an_engines_4xx_passes_unchanged(status: int) -> None:
    answer = b'{"object":"error","message":"no"}'
    data = b"HTTP/1.1 %d Nope\r\nx-a: b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
        status,
        len(answer),
    )
    async with upstream(says(data + answer)) as up:
        director = Recorder(
            lambda r: Route(up.address, reply_headers=((b"x-request-id", b"r1"),)), retry_to(up.address)
        )
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            head = await c.head()
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"x-a: b\r\n" in head
            assert b"x-request-id: r1\r\n" in head
            assert await c.exactly(len(answer)) == answer
        assert [(o.kind, o.status) for o in director.outcomes] == [(OutcomeKind.OK, status)]


async def test_5xx_is_retried_by_the_directors_word() -> None:
    bad = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\noops"
    good = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    async with upstream(says(bad), says(good + chunk(b'{"a"') + chunk(b":1}") + LAST), says(bad)) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(TcpAddress("127.0.0.1", up.port)))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            assert await c.answer() == (200, b'{"a":1}')
            c.send(post())
            assert await c.answer() == (500, b"oops")
        assert [o.kind for o in director.outcomes] == [
            OutcomeKind.ERROR_STATUS,
            OutcomeKind.OK,
            OutcomeKind.ERROR_STATUS,
        ]


@pytest.mark.parametrize("chunked", [True, False])
async def test_large_plain_bodies_pass_through_and_a_cut_is_never_clean(chunked: bool) -> None:
    whole = bytes(range(256)) * 4000  # more than one read
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    if chunked:
        data = (
            head
            + b"transfer-encoding: chunked\r\n\r\n"
            + b"".join(chunk(whole[i : i + 9999]) for i in range(0, len(whole), 9999))
        )
        good, cut = data + LAST, data
    else:
        data = head + b"content-length: %d\r\n\r\n" % len(whole)
        good, cut = data + whole, data + whole[:-5]
    async with upstream(says(good), says(cut, close=True)) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(up.address))
        async with relay(director, Limits(max_buffered_body_bytes=2000)) as (_, port), client(port) as c:
            c.send(post())
            got = await c.head()
            if chunked:
                assert b"chunked" in got
                assert await c.chunks() == whole
            else:
                assert b"content-length: %d\r\n" % len(whole) in got
                assert await c.exactly(len(whole)) == whole
            c.send(post())
            answer = await c.rest()
            payload = answer.partition(b"\r\n\r\n")[2]
            if chunked:
                assert dechunk(payload) == (whole, False)
            else:
                assert len(payload) < len(whole)
        assert [o.kind for o in director.outcomes] == [OutcomeKind.OK, OutcomeKind.UPSTREAM_EOF]


async def test_a_short_plain_body_that_is_cut_is_retried() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n"
    async with upstream(says(head + b'{"a"', close=True), says(head + b'{"a":1}')) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(TcpAddress("127.0.0.1", up.port)))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            assert await c.answer() == (200, b'{"a":1}')


@pytest.mark.parametrize("garbage", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    SSE_HEAD + b"zz\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000, b"HTTP/1.1 101 Switching\r\n\r\n" ])  # fmt: skip
async def test_a_malformed_answer_is_a_502(garbage: bytes) -> None:
    async with upstream(says(garbage, close=True)) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            status, body = await c.answer()
            assert status == 502
            assert b'"error"' in body
        assert director.outcomes[0].kind in (OutcomeKind.BAD_RESPONSE, OutcomeKind.UPSTREAM_EOF)


async def test_informational_answers_are_skipped() -> None:
    async with (
        upstream(says(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + stream_of(1))) as up,
        relay(Recorder(lambda r: Route(up.address))) as (_, port),
        client(port) as c,
    ):
        c.send(post())
        assert (await c.head()).startswith(b"HTTP/1.1 200")
        assert await c.chunks() == event(0) + DONE


async def test_connect_failure_is_retried_on_another_worker() -> None:
    """F11, RT5"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = TcpAddress("127.0.0.1", taken.getsockname()[1])
    async with upstream(says(stream_of(1))) as up:
        director = Recorder(lambda r: Route(dead), retry_to(up.address))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await c.head()
            assert await c.chunks() == event(0) + DONE
            c.send(post())
            assert (await c.answer())[0] == 502
        assert [o.kind for o in director.outcomes] == [
            OutcomeKind.CONNECT_FAILED,
            OutcomeKind.OK,
            OutcomeKind.CONNECT_FAILED,
        ]


async def test_a_stale_kept_alive_connection_is_replaced_unseen() -> None:
    async def answer_then_close_on_next(peer: Peer) -> None:
        await peer.send(stream_of(1))
        await peer.reader.readuntil(b"{}")  # the next request arrives, and dies with the connection
        peer.writer.close()

    async with upstream(answer_then_close_on_next, says(stream_of(2))) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director) as (_, port), client(port) as c:
            for count in (1, 2):
                c.send(post())
                await c.head()
                assert await c.chunks() == b"".join(map(event, range(count))) + DONE
        assert up.connections == 2
        assert [o.kind for o in director.outcomes] == [OutcomeKind.OK] * 2


async def test_idle_connections_close_with_their_address_and_with_time() -> None:
    async with upstream(says(stream_of(1))) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director, Limits(pool_idle_timeout_s=0.05)) as (server, port), client(port) as c:
            c.send(post())
            await c.head()
            await c.chunks()
            await until(lambda: server.pool.empty)
            await until(lambda: up.hangups == 1)
            c.send(post())
            await c.head()
            await c.chunks()
            await until(lambda: director.outcomes[1:])
            server.close_address(up.address)
            await until(lambda: up.hangups == 2)


@pytest.mark.parametrize("when", ["before", "during", "done"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_cuts_the_upstream_at_once(when: str, how: str) -> None:
    """RT8, F6"""
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        if when != "before":
            await peer.send(SSE_HEAD + chunk(event(0)) + (chunk(DONE) if when == "done" else b""))
        await peer.closed()
        cut.set()
        raise ConnectionError

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address), retry_to(up.address))
        async with relay(director) as (server, port), client(port) as c:
            c.send(post())
            await until(lambda: up.requests)
            if when != "before":
                await c.head()
            if how == "reset":
                c.writer.transport.abort()
            else:
                c.writer.close()
            await asyncio.wait_for(cut.wait(), 5)
            expected = OutcomeKind.OK if when == "done" else OutcomeKind.CLIENT_GONE
            assert [o.kind for o in director.outcomes] == [expected]
            assert not server.exchanges


async def test_a_client_that_leaves_while_the_director_waits_cancels_the_wait() -> None:
    future: list[asyncio.Future[Route]] = []
    cancelled = asyncio.Event()

    def wait(_: object) -> Awaitable[Route]:
        future.append(asyncio.get_running_loop().create_future())
        if len(future) == 1:
            return future[0]

        async def coroutine() -> Route:
            try:
                return await future[1]
            except asyncio.CancelledError:
                cancelled.set()
                raise

        return coroutine()

    director = Recorder(wait)
    async with relay(director) as (server, port):
        for _ in range(2):
            async with client(port) as c:
                c.send(post())
                await until(lambda: len(future) == len(director.requests))
                await until(lambda: server.exchanges)
            await until(lambda: not server.exchanges)
        await until(lambda: future[0].cancelled() and cancelled.is_set())
        assert director.outcomes == []


async def test_a_waiting_request_goes_on_when_the_director_answers() -> None:
    """RT4"""
    waits: list[asyncio.Future[Route | Reply]] = []

    def wait(_: object) -> Awaitable[Route | Reply]:
        waits.append(asyncio.get_running_loop().create_future())
        return waits[-1]

    async with upstream(says(stream_of(1))) as up, relay(Recorder(wait)) as (_, port), client(port) as c:
        c.send(post())
        await until(lambda: waits)
        waits[0].set_result(Route(up.address))
        await c.head()
        assert await c.chunks() == event(0) + DONE
        c.send(post())
        await until(lambda: waits[1:])
        waits[1].set_result(Reply(503, ((b"retry-after", b"9"),), b"later"))
        head = await c.head()
        assert b"retry-after: 9\r\n" in head
        assert await c.exactly(5) == b"later"
        c.send(post())
        await until(lambda: waits[2:])
        waits[2].set_exception(RuntimeError("bug"))
        assert (await c.answer())[0] == 500


async def test_a_route_given_in_the_instant_of_leaving_is_still_accounted() -> None:
    """F23: a slot that was booked for a request must be told back."""
    waits: list[asyncio.Future[Route]] = []

    def wait(_: object) -> Awaitable[Route]:
        waits.append(asyncio.get_running_loop().create_future())
        return waits[-1]

    director = Recorder(wait)
    async with relay(director) as (server, port), client(port) as c:
        c.send(post())
        await until(lambda: waits)
        waits[0].set_result(Route(TcpAddress("127.0.0.1", 9), key="w"))
        next(iter(server.exchanges)).client.eof_received()
        await until(lambda: director.outcomes)
        assert director.outcomes[0].kind is OutcomeKind.CLIENT_GONE
        assert director.outcomes[0].route.key == "w"


@pytest.mark.parametrize(
    ("name", "route", "sent", "status"),
    [
        ("first_byte", {"first_byte_timeout_s": 0.15}, b"", 504),
        ("first_byte", {"first_byte_timeout_s": 0.15}, SSE_HEAD + chunk(b": ping\n\n"), 504),
        ("total", {"total_timeout_s": 0.15}, b"", 504),
        ("idle", {"idle_timeout_s": 0.15}, SSE_HEAD + chunk(event(0)), 200),
        ("total", {"total_timeout_s": 0.3}, SSE_HEAD + chunk(event(0)), 200),
    ],
)
async def test_time_outs(name: str, route: dict[str, float], sent: bytes, status: int) -> None:
    """RT11, F5, F32: each bound by its name; the upstream is cut, the client is told."""
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(sent)
        await peer.closed()
        cut.set()
        raise ConnectionError

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address, **route))  # type: ignore[arg-type]
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            if status == 504:
                assert (await c.answer())[0] == 504
            else:
                _, payload, clean = body_of(await c.rest())
                assert b'data: {"error":' in payload
                assert not clean
            await asyncio.wait_for(cut.wait(), 5)
        assert [(o.kind, o.timeout) for o in director.outcomes] == [(OutcomeKind.TIMEOUT, name)]


async def test_abort_cuts_one_key_with_an_explicit_error() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await peer.closed()

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address, key=r.path))
        async with relay(director) as (server, port), client(port) as a, client(port) as b:
            a.send(post("/v1/a"))
            b.send(post("/v1/b"))
            await a.head()
            await b.head()
            assert server.abort("/v1/a", "drain deadline", "draining") == 1
            payload, clean = dechunk(await a.rest())
            assert b"drain deadline" in payload
            assert not clean
            assert len(server.exchanges) == 1
            assert director.outcomes[0].kind is OutcomeKind.ABORTED
            assert server.abort() == 1
            assert not server.exchanges


async def test_abort_before_the_first_token_may_be_answered_by_the_director() -> None:
    async def script(peer: Peer) -> None:
        await peer.closed()

    def refuse(outcome: Outcome) -> Retry | None:
        return (
            Retry(Reply(503, ((b"x-springtide-refusal", b"draining"),)))
            if outcome.kind is OutcomeKind.ABORTED
            else None
        )

    async with (
        upstream(script) as up,
        relay(Recorder(lambda r: Route(up.address), refuse)) as (server, port),
        client(port) as c,
    ):
        c.send(post())
        await until(lambda: up.requests)
        assert server.abort() == 1
        assert b"x-springtide-refusal: draining" in await c.head()


async def test_close_drains_then_aborts() -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await release.wait()
        await peer.send(chunk(DONE) + LAST)

    async def never(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await peer.closed()

    async with upstream(script, never) as up:
        director = Recorder(lambda r: Route(up.address))
        server = RelayServer(director)
        port = await server.start("127.0.0.1", 0)
        async with client(port) as a, client(port) as idle:
            a.send(post())
            await a.head()
            closing = asyncio.create_task(server.close(drain_s=30))
            assert await idle.rest() == b""
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
            release.set()
            assert await a.chunks() == event(0) + DONE
            assert await asyncio.wait_for(closing, 5) == 0
        server = RelayServer(director)
        port = await server.start("127.0.0.1", 0)
        async with client(port) as b:
            b.send(post())
            await b.head()
            assert await server.close() == 1
            payload, clean = dechunk(await b.rest())
            assert b"shutting down" in payload
            assert not clean


async def test_a_slow_client_holds_the_upstream_back() -> None:
    """RT-back-pressure: memory stays bounded while the client does not read."""
    sent = 0
    piece = b"data: " + b"x" * 60_000 + b"\n\n"

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.send(SSE_HEAD)
        for _ in range(600):
            await peer.send(chunk(piece))
            sent += 1
        await peer.send(chunk(DONE) + LAST)

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address, idle_timeout_s=1.5))
        async with relay(director) as (server, port), client(port) as c:
            c.send(post())
            await until(lambda: any(x.paused for x in server.connections))
            before, idle_over = -1, server.loop.time() + 2.0
            while before != sent or server.loop.time() < idle_over:  # until the upstream can push no more
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 590
            connection = next(iter(server.connections))
            assert connection.transport.get_write_buffer_size() < 1_000_000
            await c.head()
            assert await c.chunks() == piece * 600 + DONE
        assert [o.kind for o in director.outcomes] == [OutcomeKind.OK]


async def test_a_client_that_never_reads_is_dropped_after_its_bound() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        while True:
            await peer.send(chunk(b"data: " + b"x" * 60_000 + b"\n\n"))

    async with upstream(script) as up:
        director = Recorder(lambda r: Route(up.address))
        async with relay(director, Limits(stall_timeout_s=0.3)) as (server, port), client(port) as c:
            c.send(post())
            await until(lambda: director.outcomes, 15)
            assert director.outcomes[0].kind is OutcomeKind.CLIENT_GONE
            await until(lambda: not server.connections)


async def test_unix_upstream_and_a_changed_target(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("u") / "s")
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(5))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_unix_server(handle, path)
    route = Route(UnixAddress(path), target="/other?x=1", body=b"12345")
    async with relay(Recorder(lambda r: route)) as (_, port), client(port) as c:
        c.send(post())
        assert await c.answer() == (200, b"ok")
    server.close()
    assert seen[0].startswith(b"POST /other?x=1 HTTP/1.1\r\nhost: localhost\r\n")


async def test_a_director_that_raises_is_a_500() -> None:
    def boom(_: object) -> Route:
        raise RuntimeError("bug")

    async with relay(Recorder(boom)) as (_, port), client(port) as c:
        for _ in range(2):
            c.send(post())
            assert (await c.answer())[0] == 500
