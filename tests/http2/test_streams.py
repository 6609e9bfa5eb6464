"""Streams, windows and settings as RFC 9113 has them."""

import asyncio

import pytest

from springtide.http2 import ErrorCode, Http2Limits, encode_headers, frames
from tests.dataplane.fakes import until
from tests.http2.fakes import REQUEST, Echo, client, serving


async def test_requests_one_after_another_and_side_by_side() -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1)
        head, body, trailers = await c.answer(1)
        assert (head, body, trailers) == ([(b":status", b"200")], b"", [(b"grpc-status", b"0")])
        c.request(3, end=False)
        c.request(5, end=False)
        c.data(3, b"a")
        c.data(5, b"b", end=True)
        assert (await c.answer(5))[1] == b"b"
        c.data(3, b"c", end=True)
        assert (await c.answer(3))[1] == b"ac"
        assert not s.server.streams
        assert s.streams[0].fields == REQUEST


async def test_frames_of_one_loop_pass_are_one_write() -> None:
    """RT: joined writes."""
    async with serving() as s, client(s.port) as c:
        for stream in range(1, 21, 2):
            c.request(stream, end=False)
        await until(lambda: len(s.streams) == 10)
        [connection] = s.server.connections
        assert connection.transport is not None
        sizes: list[int] = []

        connection.transport = _Recording(connection.transport, sizes)  # type: ignore[assignment]
        for echo in s.streams:
            echo.stream.send(b"token")
        assert not sizes
        await until(lambda: sizes)
        assert sizes == [10 * (9 + 5)]


async def test_nothing_to_say_is_no_frame() -> None:
    """Proxies hang up on empty DATA frames, with all calls of the connection."""
    async with serving() as s, client(s.port) as c:
        c.request(1, end=False)
        await until(lambda: s.streams)
        [connection] = s.server.connections
        assert connection.transport is not None
        sizes: list[int] = []
        connection.transport = _Recording(connection.transport, sizes)  # type: ignore[assignment]
        s.streams[0].stream.send(b"")
        s.streams[0].stream.send(b"token")
        await until(lambda: sizes)
        assert sizes == [9 + 5]


class _Recording:
    def __init__(self, transport: asyncio.Transport, sizes: list[int]) -> None:
        self._transport = transport
        self._sizes = sizes

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._sizes.append(len(data))
        self._transport.write(data)


async def test_header_blocks_that_are_known_mean_what_the_table_says_now() -> None:
    """Equal blocks of indexed fields mean the same only while the table does not change: as the decoder has it."""
    other = [(name, b"/y" if name == b":path" else value) for name, value in REQUEST]
    wanted = [REQUEST, REQUEST, REQUEST, other, other, REQUEST, REQUEST]
    wanted += [[*REQUEST, (b"x-number", b"%d" % number)] for number in (1, 1, 2, 1)]
    wanted += [REQUEST, REQUEST]
    async with serving() as s, client(s.port) as c:
        for number, fields in enumerate(wanted):
            c.request(2 * number + 1, fields)
        await until(lambda: len(s.streams) == len(wanted))
        assert [echo.fields for echo in s.streams] == wanted
        [connection] = s.server.connections
        assert len(connection._known_blocks) <= 8


async def test_padding_priority_continuation_and_trailers_of_a_request() -> None:
    async with serving() as s, client(s.port) as c:
        block = c.encoder.encode([*REQUEST, (b"x-long", b"y" * 300)])
        priority = b"\0\0\0\0\x10"
        c.send(
            frames.frame(
                frames.HEADERS, frames.PADDED | frames.WITH_PRIORITY, 1, b"\x03" + priority + block[:7] + b"000"
            ),
            frames.frame(frames.CONTINUATION, 0, 1, block[7:20]),
            frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:]),
            frames.frame(frames.PRIORITY, 0, 1, priority),
            frames.frame(99, 0, 1, b"unknown types are ignored"),
            frames.frame(frames.DATA, frames.PADDED, 1, b"\x02abc00"),
            frames.header_frames(1, c.encoder.encode([(b"x-trailer", b"1")]), True, 16384),
        )
        assert (await c.answer(1))[1] == b"abc"
        assert s.streams[0].fields[-1] == (b"x-long", b"y" * 300)


async def test_ping_and_settings_are_acknowledged() -> None:
    async with serving() as s, client(s.port) as c:
        c.send(frames.frame(frames.PING, 0, 0, b"12345678"))
        seen = [await c.any() for _ in range(4)]
        assert [(f.kind, f.flags) for f in seen[2:]] == [(frames.SETTINGS, frames.ACK), (frames.PING, frames.ACK)]
        assert seen[3].payload == b"12345678"


async def test_windows_of_stream_and_connection_bound_what_is_sent() -> None:
    payload = bytes(range(256)) * 600  # 153,600 bytes
    async with serving() as s, client(s.port, initial_window_size=1000) as c:
        c.request(1, end=False)
        for at in range(0, len(payload), 16000):
            c.data(1, payload[at : at + 16000])
        c.data(1, b"", end=True)
        got = bytearray()
        await c.next(frames.HEADERS)
        got += (await c.next(frames.DATA)).payload
        assert len(got) == 1000
        c.send(frames.window_frame(1, 500))
        got += (await c.next(frames.DATA)).payload
        assert len(got) == 1500
        c.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1_000_000}))  # opens all streams by the difference
        while len(got) < frames.DEFAULT_WINDOW:
            got += (await c.next(frames.DATA)).payload
        assert len(got) == frames.DEFAULT_WINDOW  # of the connection
        c.send(frames.window_frame(0, 1_000_000))
        while len(got) < len(payload):
            got += (await c.next(frames.DATA)).payload
        assert got == payload
        assert (await c.next(frames.HEADERS)).flags & frames.END_STREAM
        assert s.streams[0].holds == [True, False]


async def test_a_shrunken_window_may_be_negative() -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1, end=False)
        c.data(1, b"x" * 100, end=False)
        await until(lambda: s.streams and len(s.streams[0].got) == 100)
        s.streams[0].stream.send(b"y" * 100)
        await c.next(frames.DATA)
        c.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
        await c.next(frames.SETTINGS)
        await until(lambda: s.streams[0].stream.send_window == -100)
        s.streams[0].stream.send(b"z")
        c.send(frames.window_frame(1, 101))
        assert (await c.next(frames.DATA)).payload == b"z"


async def test_streams_share_the_connections_window_in_turn() -> None:
    async with serving() as s, client(s.port) as c:
        for stream in (1, 3):
            c.request(stream, end=False)
        await until(lambda: len(s.streams) == 2)
        c.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 500_000}))
        await c.next(frames.SETTINGS)
        await until(lambda: s.streams[1].stream.send_window == 500_000)
        for echo in s.streams:
            echo.stream.send(b"x" * 200_000)  # the first one takes the connection's whole window
        got = 0
        while got < frames.DEFAULT_WINDOW:
            got += len((await c.next(frames.DATA)).payload)
        sizes = {1: 0, 3: 0}
        c.send(frames.window_frame(0, 100_000))
        while sum(sizes.values()) < 100_000:
            frame = await c.next(frames.DATA)
            sizes[frame.stream] += len(frame.payload)
        assert min(sizes.values()) > 40_000


async def test_what_a_peer_sends_is_given_back_to_its_windows() -> None:
    limits = Http2Limits(stream_window_bytes=20_000, connection_window_bytes=66_000)
    async with serving(limits) as s, client(s.port) as c:
        c.request(1, end=False)
        window, sent = 20_000, 0
        while sent < 100_000:
            size = min(window, 10_000)
            c.data(1, b"x" * size)
            sent, window = sent + size, window - size
            while window < 10_000:
                frame = await c.next(frames.WINDOW_UPDATE)
                window += frame.number if frame.stream == 1 else 0
        assert len(s.streams[0].got) <= sent
        c.data(1, b"", end=True)


async def test_a_connection_without_data_is_asked_and_given_up() -> None:
    limits = Http2Limits(keepalive_s=0.0, keepalive_timeout_s=0.1)
    async with serving(limits) as s, client(s.port) as c:
        s.server.SWEEP_INTERVAL_S = 0.05
        ping = await c.next(frames.PING)
        assert not ping.flags
        c.send(frames.frame(frames.PING, frames.ACK, 0, ping.payload))
        await c.next(frames.PING)  # it was heard, and is asked again
        await until(lambda: not s.server.connections)  # no answer this time


async def test_an_orderly_end_takes_what_is_under_way() -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1, end=False)
        await until(lambda: s.streams)
        closing = asyncio.create_task(s.server.close(drain_s=5.0))
        goaway = await c.next(frames.GOAWAY)
        assert (goaway.number, int.from_bytes(goaway.payload[:4], "big")) == (0, frames.MAX_STREAM_ID)
        c.request(3)  # was under way when the client heard
        ping = await c.next(frames.PING)
        c.send(frames.frame(frames.PING, frames.ACK, 0, ping.payload))
        seen = [await c.next() for _ in range(3)]
        assert [f.kind for f in seen] == [frames.HEADERS, frames.HEADERS, frames.GOAWAY]
        assert int.from_bytes(seen[2].payload[:4], "big") == 3
        c.request(5)
        assert (await c.next(frames.RST_STREAM)).number == ErrorCode.REFUSED_STREAM
        c.data(1, b"late", end=True)
        assert (await c.answer(1))[1] == b"late"
        await closing
        assert await c.gone() <= 0


async def test_an_end_without_patience_cuts() -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1, end=False)
        await until(lambda: s.streams)
        await s.server.close(drain_s=0.05)
        assert s.streams[0].resets
        assert await c.gone() == ErrorCode.NO_ERROR


async def test_a_client_that_leaves_resets_its_streams() -> None:
    async with serving() as s:
        async with client(s.port) as c:
            c.request(1, end=False)
            await until(lambda: s.streams)
        await until(lambda: s.streams[0].resets)
        assert not s.server.connections


async def test_a_reset_by_the_client_ends_its_stream_alone() -> None:
    async with serving() as s, client(s.port) as c:
        c.request(1, end=False)
        c.request(3, end=False)
        c.send(frames.reset_frame(1, ErrorCode.CANCEL))
        c.data(1, b"crossed")  # DATA that was under way is ignored
        c.data(3, b"x", end=True)
        assert (await c.answer(3))[1] == b"x"
        assert s.streams[0].resets == [ErrorCode.CANCEL]
        s.streams[0].stream.send(b"nobody reads this")
        s.streams[0].stream.finish(b"")


@pytest.mark.parametrize("early", [True, False])
async def test_an_answer_before_the_end_of_the_request(early: bool) -> None:
    class Hasty(Echo):
        def data(self, payload: bytes, flow_bytes: int) -> None:
            self.stream.send_headers(encode_headers([(b":status", b"200")]), end_stream=True)

    async with serving(make=Hasty if early else Echo) as s, client(s.port) as c:
        c.request(1, end=False)
        c.data(1, b"x", end=not early)
        assert (await c.next()).kind == frames.HEADERS
        if early:
            reset = await c.next()
            assert (reset.kind, reset.number) == (frames.RST_STREAM, ErrorCode.NO_ERROR)
            assert not s.server.streams


async def test_large_header_blocks_go_in_several_frames() -> None:
    class Wordy(Echo):
        def ended(self) -> None:
            self.stream.send_headers(encode_headers([(b":status", b"200"), (b"x", b"y" * 40_000)]), end_stream=True)

    async with serving(make=Wordy) as s, client(s.port) as c:
        c.request(1)
        first = await c.next()
        parts = [first, await c.next(), await c.next()]
        assert [p.kind for p in parts] == [frames.HEADERS, frames.CONTINUATION, frames.CONTINUATION]
        assert [bool(p.flags & frames.END_HEADERS) for p in parts] == [False, False, True]
        fields = c.decoder.decode(b"".join(p.payload for p in parts), raw=True)
        assert dict(fields)[b"x"] == b"y" * 40_000
