"""Malformed and hostile peers: a clear error code, bounded work and memory, and nobody else is disturbed."""

import asyncio
from collections.abc import Callable

import pytest
from hpack.hpack import encode_integer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from springtide.http2 import ErrorCode, Http2Limits, frames
from springtide.http2.frames import frame
from springtide.http2.headers import Headers
from tests.dataplane.fakes import until
from tests.http2.fakes import REQUEST, Client, Echo, client, serving

Act = Callable[[Client], None]


def numbered(value: int) -> bytes:
    return value.to_bytes(4, "big")


CONNECTION_FAULTS: list[tuple[str, Act, ErrorCode]] = [
    ("a frame that is too large", lambda c: c.send(b"\xff\xff\xff\0\0\0\0\0\1"), ErrorCode.FRAME_SIZE_ERROR),
    ("DATA of stream 0", lambda c: c.data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    ("DATA of an idle stream", lambda c: c.data(7, b"x"), ErrorCode.PROTOCOL_ERROR),
    ("HEADERS of stream 0", lambda c: c.request(0), ErrorCode.PROTOCOL_ERROR),
    ("an even stream", lambda c: c.request(2), ErrorCode.PROTOCOL_ERROR),
    ("too much padding", lambda c: c.send(frame(frames.HEADERS, 0xD, 1, b"\x05abc")), ErrorCode.PROTOCOL_ERROR),
    ("a stray CONTINUATION", lambda c: c.send(frame(frames.CONTINUATION, 4, 1)), ErrorCode.PROTOCOL_ERROR),
    (
        "an interrupted block",
        lambda c: c.send(frame(frames.HEADERS, 0, 1), frame(frames.PING, 0, 0, b"12345678")),
        ErrorCode.PROTOCOL_ERROR,
    ),
    ("broken HPACK", lambda c: c.send(frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff")), ErrorCode.COMPRESSION_ERROR),
    (
        "a table that grows",
        lambda c: c.send(frame(frames.HEADERS, 4, 1, b"\x3f\xff\xff\x03")),
        ErrorCode.COMPRESSION_ERROR,
    ),
    ("a short PING", lambda c: c.send(frame(frames.PING, 0, 0, b"x")), ErrorCode.FRAME_SIZE_ERROR),
    ("a PING of a stream", lambda c: c.send(frame(frames.PING, 0, 1, b"12345678")), ErrorCode.PROTOCOL_ERROR),
    ("SETTINGS of a stream", lambda c: c.send(frame(frames.SETTINGS, 0, 1)), ErrorCode.PROTOCOL_ERROR),
    ("broken SETTINGS", lambda c: c.send(frame(frames.SETTINGS, 0, 0, b"12345")), ErrorCode.FRAME_SIZE_ERROR),
    ("a full acknowledgement", lambda c: c.send(frame(frames.SETTINGS, 1, 0, b"123456")), ErrorCode.FRAME_SIZE_ERROR),
    ("a huge window", lambda c: c.send(frames.settings_frame({4: 2**31})), ErrorCode.FLOW_CONTROL_ERROR),
    ("a small frame size", lambda c: c.send(frames.settings_frame({5: 100})), ErrorCode.PROTOCOL_ERROR),
    ("a strange ENABLE_PUSH", lambda c: c.send(frames.settings_frame({2: 2})), ErrorCode.PROTOCOL_ERROR),
    (
        "many settings",
        lambda c: c.send(frame(frames.SETTINGS, 0, 0, b"\0\x04\0\0\0\1" * 40)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    ("PUSH_PROMISE", lambda c: c.send(frame(frames.PUSH_PROMISE, 4, 1, numbered(2))), ErrorCode.PROTOCOL_ERROR),
    ("RST_STREAM of an idle stream", lambda c: c.send(frames.reset_frame(9, 8)), ErrorCode.PROTOCOL_ERROR),
    ("RST_STREAM of stream 0", lambda c: c.send(frames.reset_frame(0, 8)), ErrorCode.PROTOCOL_ERROR),
    ("a short RST_STREAM", lambda c: c.send(frame(frames.RST_STREAM, 0, 1, b"x")), ErrorCode.FRAME_SIZE_ERROR),
    ("a window of nothing", lambda c: c.send(frames.window_frame(0, 0)), ErrorCode.PROTOCOL_ERROR),
    ("a window overflow", lambda c: c.send(frames.window_frame(0, 2**31 - 1)), ErrorCode.FLOW_CONTROL_ERROR),
    ("a window of an idle stream", lambda c: c.send(frames.window_frame(9, 1)), ErrorCode.PROTOCOL_ERROR),
    ("a short WINDOW_UPDATE", lambda c: c.send(frame(frames.WINDOW_UPDATE, 0, 0, b"x")), ErrorCode.FRAME_SIZE_ERROR),
    ("a short PRIORITY", lambda c: c.send(frame(frames.PRIORITY, 0, 1, b"x")), ErrorCode.FRAME_SIZE_ERROR),
    ("a short GOAWAY", lambda c: c.send(frame(frames.GOAWAY, 0, 0, b"x")), ErrorCode.PROTOCOL_ERROR),
    (
        "a stream of its own",
        lambda c: c.send(frame(frames.HEADERS, 0x24, 1, numbered(1) + b"\0")),
        ErrorCode.PROTOCOL_ERROR,
    ),
]


@pytest.mark.parametrize(("act", "code"), [f[1:] for f in CONNECTION_FAULTS], ids=[f[0] for f in CONNECTION_FAULTS])
async def test_faults_of_the_connection(act: Act, code: ErrorCode) -> None:
    async with serving() as s, client(s.port) as c, client(s.port) as other:
        act(c)
        assert await c.gone() == code
        other.request(1)
        assert (await other.answer(1))[2] == [(b"grpc-status", b"0")]


def altered(*changes: tuple[bytes, bytes]) -> Headers:
    return [*REQUEST, *changes]


STREAM_FAULTS: list[tuple[str, Headers]] = [
    ("no path", [h for h in REQUEST if h[0] != b":path"]),
    ("two paths", [(b":path", b"/y"), *REQUEST]),
    ("a late pseudo-header", altered((b":scheme", b"http"))),
    ("an unknown pseudo-header", [(b":what", b"x"), *REQUEST]),
    ("an upper-case name", altered((b"Upper", b"x"))),
    ("a space in a name", altered((b"a b", b"x"))),
    ("an empty name", altered((b"", b"x"))),
    ("connection", altered((b"connection", b"close"))),
    ("transfer-encoding", altered((b"transfer-encoding", b"chunked"))),
    ("te other than trailers", altered((b"te", b"gzip"))),
    ("a line break in a value", altered((b"x", b"a\r\nb: c"))),
    ("CONNECT with a protocol", [(b":protocol", b"websocket"), *REQUEST]),
]


@pytest.mark.parametrize("fields", [f[1] for f in STREAM_FAULTS], ids=[f[0] for f in STREAM_FAULTS])
async def test_malformed_requests_are_reset_alone(fields: Headers) -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1, fields)
        reset = await c.next(frames.RST_STREAM)
        assert (reset.stream, reset.number) == (1, ErrorCode.PROTOCOL_ERROR)
        assert not s.streams
        c.request(3)
        assert (await c.answer(3))[2]


async def test_faults_of_a_stream() -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1, end=False)
        c.send(frames.window_frame(1, 2**31 - 1))
        assert (await c.next(frames.RST_STREAM)).number == ErrorCode.FLOW_CONTROL_ERROR
        c.request(3, end=False)
        c.send(frames.window_frame(3, 0))
        assert (await c.next(frames.RST_STREAM)).number == ErrorCode.PROTOCOL_ERROR
        c.request(5, end=False)
        c.send(frames.header_frames(5, c.encoder.encode([(b"x", b"y")]), False, 16384))
        assert (await c.next(frames.RST_STREAM)).number == ErrorCode.PROTOCOL_ERROR
        c.request(1)  # numbers do not come back
        assert (await c.next(frames.RST_STREAM)).number == ErrorCode.STREAM_CLOSED
        assert [len(echo.resets) for echo in s.streams] == [1, 1, 1]


async def test_streams_beyond_the_bound_are_refused() -> None:
    async with serving(Http2Limits(max_streams=2)) as s, client(s.port) as c:
        settings_ = await c.next(frames.SETTINGS)
        assert dict(frames.read_settings(settings_.payload))[frames.MAX_CONCURRENT_STREAMS] == 2
        for stream in (1, 3, 5):
            c.request(stream, end=False)
        refused = await c.next(frames.RST_STREAM)
        assert (refused.stream, refused.number) == (5, ErrorCode.REFUSED_STREAM)
        c.data(1, b"", end=True)
        await c.answer(1)
        c.request(7)
        await c.answer(7)


async def test_connections_beyond_the_bound_are_refused() -> None:
    async with serving(Http2Limits(max_connections=1)) as s, client(s.port) as c:
        await c.next(frames.SETTINGS)
        async with client(s.port) as other:
            assert await other.gone() == ErrorCode.ENHANCE_YOUR_CALM
        c.request(1)
        await c.answer(1)


async def test_more_data_than_the_window_is_a_fault() -> None:
    class Greedy(Echo):
        def data(self, payload: bytes, flow_bytes: int) -> None:
            self.got += payload

    limits = Http2Limits(stream_window_bytes=20_000, connection_window_bytes=70_000)
    async with serving(limits, Greedy) as s, client(s.port) as c:
        c.request(1, end=False)
        c.data(1, b"x" * 16_000)
        c.data(1, b"x" * 16_000)
        reset = await c.next(frames.RST_STREAM)
        assert (reset.stream, reset.number) == (1, ErrorCode.FLOW_CONTROL_ERROR)
        for stream in (3, 5, 7):
            c.request(stream, end=False)
            c.data(stream, b"x" * 16_000)
        assert len(s.streams[0].got) == 16_000
        c.request(9, end=False)
        c.data(9, b"x" * 16_000)
        c.data(9, b"x" * 4_000)
        assert await c.gone() == ErrorCode.FLOW_CONTROL_ERROR


FLOODS: list[tuple[str, Callable[[int], bytes]]] = [
    ("PING", lambda i: frame(frames.PING, 0, 0, b"12345678")),
    ("PONG", lambda i: frame(frames.PING, 1, 0, b"12345678")),
    ("SETTINGS", lambda i: frame(frames.SETTINGS, 0, 0)),
    ("SETTINGS ACK", lambda i: frame(frames.SETTINGS, 1, 0)),
    ("PRIORITY", lambda i: frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\1")),
    ("WINDOW_UPDATE", lambda i: frames.window_frame(0, 1)),
    ("empty DATA", lambda i: frame(frames.DATA, 0, 1)),
    ("DATA of a closed stream", lambda i: frame(frames.DATA, 0, 3, b"x")),
    ("unknown frames", lambda i: frame(200, 0, 0)),
    ("GOAWAY", lambda i: frames.goaway_frame(0, 0)),
]


@pytest.mark.parametrize("make", [f[1] for f in FLOODS], ids=[f[0] for f in FLOODS])
async def test_floods_of_frames_that_carry_nothing(make: Callable[[int], bytes]) -> None:
    limits = Http2Limits(calm_burst=500, calm_per_s=1.0)
    async with serving(limits) as s, client(s.port) as c:
        c.request(1, end=False)
        c.request(3, end=False)
        c.send(frames.reset_frame(3, 8))
        for i in range(1500):
            c.send(make(i))
        assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
        assert len(s.streams[0].resets) == 1


async def test_rapid_reset() -> None:
    """CVE-2023-44487."""
    limits = Http2Limits(calm_burst=1000, calm_per_s=1.0)
    async with serving(limits) as s, client(s.port) as c:
        for stream in range(1, 2001, 2):
            c.request(stream, end=False)
            c.send(frames.reset_frame(stream, ErrorCode.CANCEL))
        assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
        assert len(s.streams) <= 102
        assert all(echo.resets for echo in s.streams)


async def test_resets_that_a_peer_provokes() -> None:
    """CVE-2025-8671: the server is made to do the resetting."""
    limits = Http2Limits(calm_burst=1000, calm_per_s=1.0)
    async with serving(limits) as s, client(s.port) as c:
        for stream in range(1, 2001, 2):
            c.request(stream, end=False)
            c.send(frames.window_frame(stream, 0))
        assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
        assert len(s.streams) <= 102


async def test_a_calm_client_may_cancel_all_it_has() -> None:
    async with serving() as s, client(s.port) as c:
        for stream in range(1, 1001, 2):
            c.request(stream, end=False)
        for stream in range(1, 1001, 2):
            c.send(frames.reset_frame(stream, ErrorCode.CANCEL))
        c.request(1001)
        await c.answer(1001)
        assert len(s.streams) == 501


async def test_continuation_flood() -> None:
    """CVE-2024-27316 and its kind: endless blocks, also of empty frames."""
    for piece in (b"", b"\x00\x01a\x01b" * 3000):
        async with serving() as s, client(s.port) as c:
            c.send(frame(frames.HEADERS, 0, 1))
            for _ in range(40):
                c.send(frame(frames.CONTINUATION, 0, 1, piece))
            assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
            assert not s.streams


async def test_hpack_bomb() -> None:
    """A block of 16 KiB that would become 64 MiB."""
    big = b"\x40\x01a" + bytes(encode_integer(4000, 7)) + b"x" * 4000
    async with serving() as s, client(s.port) as c:
        c.send(frame(frames.HEADERS, 5, 1, big + b"\xbe" * 12_000))
        assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
        assert not s.streams


async def test_requests_of_a_thousand_indexed_fields() -> None:
    """One byte to send, some microseconds to read: such requests draw on the bucket, too."""
    limits = Http2Limits(calm_burst=200, calm_per_s=1.0, max_header_bytes=64 * 1024)
    async with serving(limits) as s, client(s.port) as c:
        block = c.encoder.encode([*REQUEST, (b"x", b"y")])
        c.send(frame(frames.HEADERS, 5, 1, block))
        for stream in range(3, 41, 2):
            c.send(frame(frames.HEADERS, 5, stream, c.encoder.encode(REQUEST) + b"\xbe" * 1000))
        assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
        assert len(s.streams) < 6


async def test_slow_header_blocks_and_missing_prefaces() -> None:
    limits = Http2Limits(header_timeout_s=0.1, preface_timeout_s=0.1)
    async with serving(limits) as s:
        s.server.SWEEP_INTERVAL_S = 0.05
        async with client(s.port) as c, client(s.port, greet=False) as silent:
            c.send(frame(frames.HEADERS, 0, 1))
            assert await c.gone() == ErrorCode.ENHANCE_YOUR_CALM
            silent.send(frames.PREFACE[:10])
            assert await silent.gone() == ErrorCode.SETTINGS_TIMEOUT
        await until(lambda: not s.server.connections)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\xa5", b"PRI * HTTP/1.1"])
async def test_other_protocols(first: bytes) -> None:
    async with serving() as s, client(s.port, greet=False) as c:
        c.send(first)
        frame_ = await c.next(frames.GOAWAY)
        assert frame_.number == ErrorCode.PROTOCOL_ERROR
        assert b"HTTP/2" in frame_.payload


async def test_a_client_that_does_not_read_is_given_up() -> None:
    """PING without reading the answers: memory stays bounded."""
    limits = Http2Limits(max_unread_bytes=20_000, write_high_water_bytes=1000, calm_burst=10**9)
    async with serving(limits) as s, client(s.port) as c:
        c.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: s.server.connections)
        flood = frame(frames.PING, 0, 0, b"12345678") * 5000
        try:
            for _ in range(2000):
                c.send(flood)
                await asyncio.wait_for(c.writer.drain(), 5)
                if not s.server.connections:
                    break
        except ConnectionError:
            pass
        assert not s.server.connections


async def test_a_stream_that_is_not_read_is_cut_after_the_stall_time() -> None:
    limits = Http2Limits(stall_timeout_s=0.1)
    async with serving(limits) as s, client(s.port, initial_window_size=10) as c:
        s.server.SWEEP_INTERVAL_S = 0.05
        c.request(1, end=False)
        await until(lambda: s.streams)
        s.streams[0].stream.send(b"x" * 20_000)
        assert s.streams[0].holds == [True]
        assert (await c.next(frames.RST_STREAM)).number == ErrorCode.CANCEL
        assert s.streams[0].resets == [ErrorCode.CANCEL]
        assert not s.server.streams


# ------------------------------------------------------------ fuzz

_ids = st.sampled_from([0, 1, 1, 3, 5, 7, 2, 2**31 - 1])
_block = st.sampled_from(
    [b"\x82\x87\x84", b"\x83\x86\x84\x41\x01t", b"\x83\x86\x84\x00\x02te\x08trailers", b"\x00", b""]
)
_frames = st.one_of(
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), _ids, st.binary(max_size=40)),
    st.builds(frame, st.just(frames.HEADERS), st.sampled_from([0, 1, 4, 5, 0xD, 0x25]), _ids, _block),
    st.builds(frame, st.just(frames.DATA), st.sampled_from([0, 1, 8, 9]), _ids, st.binary(max_size=60)),
    st.builds(frames.window_frame, _ids, st.integers(0, 2**31 - 1)),
    st.builds(frame, st.just(frames.SETTINGS), st.just(0), st.just(0), st.binary(max_size=18)),
    st.binary(max_size=30),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(_frames, max_size=12), cut=st.integers(1, 50))
def test_anything_at_all_is_survived(pieces: list[bytes], cut: int) -> None:
    """No exception of ours, no stream left behind, and the next client is served."""

    async def run() -> None:
        async with serving() as s, client(s.port) as c:
            data = b"".join(pieces)
            for at in range(0, len(data), cut * 7):
                c.send(data[at : at + cut * 7])
            c.writer.write_eof()
            code = await c.gone()
            assert code != ErrorCode.INTERNAL_ERROR
            await until(lambda: not s.server.connections)
            assert all(echo.stream.closed for echo in s.streams)
            async with client(s.port) as other:
                other.request(1)
                await other.answer(1)

    asyncio.run(run())


async def test_a_conversation_cut_at_every_byte() -> None:
    """Frame borders are nowhere in particular."""
    plain = Client(asyncio.StreamReader(), _Sink())  # type: ignore[arg-type]
    plain.greet(initial_window_size=70_000)
    plain.request(1, end=False)
    plain.data(1, b"abc")
    plain.send(frame(frames.PING, 0, 0, b"12345678"))
    plain.data(1, b"", end=True)
    whole = bytes(plain.writer.written)  # type: ignore[attr-defined]
    async with serving() as s:
        for at in range(1, len(whole)):
            async with client(s.port, greet=False) as c:
                c.send(whole[:at])
                await c.writer.drain()
                await asyncio.sleep(0)
                c.send(whole[at:])
                assert (await c.answer(1))[1] == b"abc"
        async with client(s.port, greet=False) as c:
            for byte in whole:
                c.send(bytes((byte,)))
                await asyncio.sleep(0)
            assert (await c.answer(1))[1] == b"abc"


class _Sink:
    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data
