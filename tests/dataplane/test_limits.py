"""Bad input: every limit answers 4xx and closes; nothing crashes, nothing is smuggled."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from springtide.dataplane import Limits, RelayServer, Reply, Request, TcpAddress, UnixAddress, parse_address
from springtide.dataplane.server import ClientConnection
from tests.dataplane.fakes import Recorder, client, post, relay, until

LIMITS = Limits(
    max_head_bytes=2000, max_headers=10, max_body_bytes=1000, head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=0.5
)


def echo(request: Request) -> Reply:
    return Reply(200, (), b"%b %b" % (request.path.encode("latin-1"), request.body))


HEAD = b"POST /p HTTP/1.1\r\nhost: t\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\n\n", 400),
        (b"GET / HTTP/1.1\r\nhost: t\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: t\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: t\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nhost: t\r\nx: " + b"a" * 3000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 3000, 431),
        (b"GET / HTTP/1.1\r\nhost: t\r\n" + b"a: b\r\n" * 20 + b"\r\n", 431),
        (HEAD + b"content-length: 2000\r\n\r\n", 413),
        (HEAD + b"content-length: 2000\r\nexpect: 100-continue\r\n\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + (b"190\r\n" + b"x" * 400 + b"\r\n") * 3, 413),
        (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: xchunked\r\n\r\n", 400),
        (HEAD + b"content-length: -1\r\n\r\n", 400),
        (HEAD + b"content-length: 0x10\r\n\r\n", 400),
        (HEAD + b"content-length : 3\r\n\r\nabc", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"expect: cookies\r\ncontent-length: 3\r\n\r\n", 417),
        (b"POST /p HTTP/1.1\r\nhost: t\r\nx: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nho", 408),
        (HEAD + b"content-length: 5\r\n\r\nab", 408),
    ],
)
async def test_bad_requests(data: bytes, status: int) -> None:
    director = Recorder(echo)
    async with relay(director, LIMITS) as (server, port):
        async with client(port) as c:
            c.send(data)
            answer = await c.rest()
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.count(b"\r\n\r\n") == 1
            assert b"connection: close" in answer
            assert b'{"error":{"message":' in answer
        assert director.requests == []
        async with client(port) as c:
            c.send(post(body=b"fine"))
            assert await c.answer() == (200, b"/v1/completions fine")
        await until(lambda: not server.connections)


async def test_dripping_a_head_does_not_extend_its_time() -> None:
    async with relay(Recorder(echo), LIMITS) as (_, port), client(port) as c:
        c.send(b"GET /")
        reading = asyncio.create_task(c.rest())
        while not reading.done():
            try:
                c.send(b"x")
            except ConnectionError:
                break
            await asyncio.sleep(0.03)
        assert (await reading).startswith(b"HTTP/1.1 408")


async def test_idle_connections_close_silently() -> None:
    async with relay(Recorder(echo), LIMITS) as (_, port), client(port) as c:
        assert await c.rest() == b""


async def test_expect_continue() -> None:
    async with relay(Recorder(echo), LIMITS) as (_, port), client(port) as c:
        c.send(HEAD + b"content-length: 3\r\nexpect: 100-continue\r\n\r\n")
        assert await c.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        c.send(b"abc")
        assert await c.answer() == (200, b"/p abc")


async def test_pipelined_requests_are_served_in_order() -> None:
    gate = asyncio.Event()

    async def slowly(request: Request) -> Reply:
        await gate.wait()
        return echo(request)

    director = Recorder(slowly)
    async with relay(director, LIMITS) as (_, port), client(port) as c:
        c.send(post("/1", b"a") + post("/2", b"b"))
        c.send(post("/3", b"c"))
        await until(lambda: director.requests)
        assert len(director.requests) == 1
        gate.set()
        for path, body in ((b"/1", b"a"), (b"/2", b"b"), (b"/3", b"c")):
            assert await c.answer() == (200, path + b" " + body)


async def test_too_much_pipelining_is_dropped_and_the_connection_closed() -> None:
    gate = asyncio.Event()

    async def slowly(request: Request) -> Reply:
        await gate.wait()
        return echo(request)

    director = Recorder(slowly)
    async with relay(director, LIMITS) as (_, port), client(port) as c:
        c.send(post("/1", b"a"))
        await until(lambda: director.requests)
        for _ in range(50):
            c.send(post("/2", b"b" * 100))
        await until(lambda: not director.requests[0].keep_alive)
        gate.set()
        answer = await c.rest()
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b"connection: close" in answer
        assert len(director.requests) == 1


async def test_an_offer_to_upgrade_is_declined_by_plain_service() -> None:
    async with relay(Recorder(echo), LIMITS) as (_, port), client(port) as c:
        c.send(
            b"POST /p HTTP/1.1\r\nhost: t\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
            b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\ncontent-length: 2\r\n\r\nhi"
        )
        assert await c.answer() == (200, b"/p hi")


async def test_forms_of_the_target() -> None:
    director = Recorder(echo)
    async with relay(director, LIMITS) as (_, port), client(port) as c:
        for target in (b"/a?x=1", b"http://h:1/a?x=1"):
            c.send(b"GET %b HTTP/1.1\r\nhost: t\r\n\r\n" % target)
            assert (await c.answer())[0] == 200
        assert [(r.path, r.query) for r in director.requests] == [("/a", "x=1")] * 2
        c.send(b"HEAD /a HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        answer = await c.rest()
        assert answer.endswith(b"\r\n\r\n")


async def test_connections_are_bounded() -> None:
    async with relay(Recorder(echo), Limits(max_connections=1)) as (server, port), client(port):
        await until(lambda: server.connections)
        async with client(port) as c:
            assert (await c.rest()).startswith(b"HTTP/1.1 503")


async def test_listening_on_a_unix_socket(tmp_path: Path) -> None:
    server = RelayServer(Recorder(echo))
    assert await server.start(path=tmp_path / "s") == 0
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    writer.write(post(body=b"u"))
    assert b"/v1/completions u" in await asyncio.wait_for(reader.readuntil(b" u"), 5)
    writer.close()
    await server.close()


PIECES = st.sampled_from(
    [b"GET", b"POST", b" /x", b" HTTP/1.1", b"\r\n", b"\n", b"host: t", b"content-length: 3", b"content-length: 9",
     b"transfer-encoding: chunked", b"0\r\n\r\n", b"3\r\nabc\r\n", b"abc", b": ", b"\x00", b"\xff",
     b"expect: 100-continue",
     b"connection: upgrade", b"upgrade: x", b"HTTP/1.0"]
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(PIECES, PIECES, st.binary(max_size=8)), max_size=30), st.integers(1, 20))
async def test_fuzz_never_crashes(pieces: list[bytes], size: int) -> None:
    """Whatever comes, the parser answers or waits; the next connection is served."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with relay(Recorder(echo), Limits(linger_s=0.05)) as (_, port):
        data = b"".join(pieces)
        async with client(port) as c:
            for at in range(0, len(data), size):
                c.send(data[at : at + size])
                await asyncio.sleep(0)
            if c.writer.can_write_eof():
                c.writer.write_eof()
            try:
                answer = await c.rest()
            except ConnectionError:
                answer = b""
            assert not answer or answer.startswith(b"HTTP/1.1 ")
        async with client(port) as c:
            c.send(post(body=b"ok"))
            assert await c.answer() == (200, b"/v1/completions ok")
    assert errors == []


def test_addresses() -> None:
    assert parse_address("127.0.0.1:80") == TcpAddress("127.0.0.1", 80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    assert parse_address("unix:/a/b") == UnixAddress("/a/b")
    for bad in ("", "host", "host:", ":1", "h:0", "h:70000", "unix:"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(bad)


class _Gone:
    """A transport whose peer has reset the connection."""

    def __init__(self, error: Exception | None, closing: bool) -> None:
        self.error = error
        self.closing = closing
        self.aborted = False

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), OSError(107, "not connected")])
@pytest.mark.parametrize("closing", [False, True])
async def test_a_refusal_to_a_client_that_has_gone_is_no_exception(error: Exception, closing: bool) -> None:
    """A client that resets while it is refused leaves no trace-back, and its connection does not linger."""
    server = RelayServer(Recorder(lambda r: Reply(200)))
    server.loop = asyncio.get_running_loop()
    connection, transport = ClientConnection(server), _Gone(error, closing)
    connection.transport = transport  # type: ignore[assignment]
    connection.data_received(b"\x16\x03\x01 no HTTP at all")
    assert connection.closing
    assert transport.aborted is not closing
