"""What a peer that reads nothing, or says too much, can cost: a bounded amount, then its own link and nothing else."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from springtide.dataplane import OutcomeKind, RelayServer, Retry, Route, TcpAddress, error_reply
from springtide.link import Links, LinkServer
from springtide.link import connection as link_connection
from springtide.link import server as link_server
from springtide.link.connection import Link
from springtide.link.frames import (
    CREDIT,
    DATA,
    FLOOD,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    KIND_SHIFT,
    LINK_PATH,
    LOST,
    MALFORMED,
    MAX_UNREAD_BYTES,
    PING,
    PONG,
    RESET,
    UNREAD,
    WINDOW_BYTES,
    frame,
)
from tests.dataplane.fakes import DONE, SSE_HEAD, Peer, Recorder, chunk, client, event, post, relay, says, stream_of
from tests.dataplane.fakes import upstream as engine_of
from tests.link.chain import ended, until
from tests.link.wires import ends

ASK = f"GET {LINK_PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: springtide-link/1\r\n\r\n".encode()
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: springtide-link/1\r\n\r\n"
OFFERING = SSE_HEAD[:-2] + b"connection: upgrade\r\nupgrade: springtide-link/1\r\n\r\n"
BIG = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % (2 * WINDOW_BYTES)
CREDIT_1 = b"\0\0\0\1"
ANSWERS = (event(1) + DONE, event(7) + DONE)
"""Of the good worker, or of the bad shim over a connection that is no link."""


# ---------------------------------------------------------------- one end, without sockets


async def test_frames_other_than_data_for_a_peer_that_reads_nothing() -> None:
    """Refusals, cancellations and windows that wait are bounded; then link and streams end, with a reason."""
    opening, wire, _, _ = ends()
    made = [opening.open() for _ in range(2)]
    opening.pause_writing()
    sent = 0
    while not opening.going:
        opening.send(frame(RESET, 1))
        sent += HEAD_BYTES
        assert sent <= MAX_UNREAD_BYTES + HEAD_BYTES
        if sent % 800 == 0:
            await asyncio.sleep(0)
    for _ in range(1000):
        opening.send(frame(RESET, 1))  # no further ones, while it is still to end
    await until(lambda: opening.closed)
    assert wire.closed
    assert len(wire.sent) <= MAX_UNREAD_BYTES + 200
    assert b"reads nothing" in wire.take()
    assert [far.lost[0].args for _, far in made] == [made[0][1].lost[0].args] * 2  # type: ignore[union-attr]
    assert opening.counts.seen().ended == {UNREAD: 1}


async def test_a_connection_that_takes_everything_again_owes_nothing() -> None:
    """The bound is for what waits, not for a link's life."""
    opening, wire, _, _ = ends()
    for _ in range(3):
        opening.pause_writing()
        for _ in range(MAX_UNREAD_BYTES // HEAD_BYTES):
            opening.send(frame(RESET, 1))
        await asyncio.sleep(0)
        opening.resume_writing()
    for _ in range(3):
        for _ in range(MAX_UNREAD_BYTES // HEAD_BYTES):
            opening.send(frame(RESET, 1))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(wire.sent) == 6 * MAX_UNREAD_BYTES
    assert not opening.closed


async def test_pings_of_a_peer_that_reads_nothing_are_answered_once() -> None:
    """One answer waits, however many looks and questions there were."""
    _, _, taking, wire = ends()
    taking.pause_writing()
    for at in range(1000):
        taking.look(float(at), 1e9)
        taking.data_received(frame(PING, 0, b"12345678") * 10)
        await asyncio.sleep(0)
    assert not wire.sent
    taking.resume_writing()
    await asyncio.sleep(0)
    assert wire.take() == frame(PONG, 0, b"12345678")


@pytest.mark.parametrize(
    ("one", "many"),
    [
        (frame(PING, 0, b"12345678"), 300),
        (frame(PONG, 0, b"12345678"), 300),
        (frame(GOAWAY, 0, b"x"), 300),
        (frame(RESET, 1), 40_000),
        (frame(PING, 0, b"12345678") + frame(RESET, 1), 300),
    ],
    ids=["ping", "pong", "goaway", "reset", "mixed"],
)
async def test_more_frames_than_anybody_needs(one: bytes, many: int) -> None:
    """A flood ends its link: counted between two looks, so that a long life is no flood."""
    _, _, taking, wire = ends()
    taking.data_received(frame(DATA, 1, b"x"))
    for at in range(5):  # half of it, again and again
        taking.look(float(at), 1e9)
        taking.data_received(one * (many // 2))
        taking.data_received(frame(DATA, 2 + at, b"x"))
        assert not taking.closed
    taking.look(9.0, 1e9)
    taking.data_received(one * (many // 2))
    taking.data_received(one * (many // 2))
    assert taking.closed
    assert b"too many frames" in wire.take()
    assert taking.counts.seen().ended == {FLOOD: 1}


async def test_windows_one_byte_wide() -> None:
    """A reader that grants single bytes costs a frame for each, and is ended as a flood."""
    opening, wire, _, _ = ends()
    stream, far = opening.open()
    stream.write(bytes(3 * WINDOW_BYTES))
    await asyncio.sleep(0)
    assert len(wire.take()) < WINDOW_BYTES + 100
    while not opening.closed:
        opening.data_received(frame(CREDIT, 1, CREDIT_1) * 1000)
        await asyncio.sleep(0)
        assert len(wire.take()) <= 1000 * (HEAD_BYTES + 1) + 200
    assert opening.counts.seen().ended == {FLOOD: 1}
    assert far.lost


async def test_a_peer_that_takes_nothing_for_long_is_gone() -> None:
    """However much it says meanwhile."""
    opening, _, _, _ = ends()
    _, far = opening.open()
    opening.pause_writing()
    for at in range(100):
        opening.data_received(frame(PONG, 0, b"12345678"))
        opening.look(at / 5, 15.0)
        if opening.closed:
            break
    assert opening.counts.seen().ended == {UNREAD: 1}
    assert far.lost


async def test_a_half_closed_link_is_closed() -> None:
    """A peer that says that it is done, and reads nothing: what waits for it is not waited for."""
    opening, wire, _, _ = ends()
    stream, far = opening.open()
    opening.pause_writing()
    stream.write(b"x")
    assert opening.eof_received() is False
    assert (opening.closed, wire.closed) == (True, True)
    assert far.lost
    assert opening.counts.seen().ended == {LOST: 1}


async def test_a_stream_ends_once() -> None:
    """DATA after CLOSE is no stream of this protocol, also while what came before still waits."""
    _, _, taking, wire = ends()
    taking.on_open = lambda stream: stream.pause_reading()
    taking.data_received(frame(DATA, 1, b"x") + frame(2, 1) + frame(DATA, 1, b"y"))
    assert taking.closed
    assert b"after its end" in wire.take()


async def test_a_reason_is_one_line_of_text(caplog: pytest.LogCaptureFixture) -> None:
    """What a peer says stands in the log without its line breaks and escapes, and not a thousand times."""
    _, _, taking, _ = ends()
    for _ in range(100):
        taking.data_received(frame(GOAWAY, 0, b"ok\n2026 ERROR \x1b[31mforged"))
    assert [r.getMessage() for r in caplog.records] == [
        "link with a peer: the other side ends it: ok?2026 ERROR ?[31mforged"
    ]


# ---------------------------------------------------------------- a hostile router


class Hostile:
    """A raw connection with a small receive buffer, from which nothing is read but by order."""

    def __init__(self, port: int) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.setblocking(False)
        self.port = port
        self.loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """With the link up."""
        await self.loop.sock_connect(self.sock, ("127.0.0.1", self.port))
        await self.loop.sock_sendall(self.sock, ASK)
        got = b""
        while b"\r\n\r\n" not in got:
            got += await self.loop.sock_recv(self.sock, len(SWITCH) - len(got))
        assert got == SWITCH

    async def send(self, data: bytes) -> None:
        """Some bytes; nothing where the other side has ended it."""
        with contextlib.suppress(ConnectionError):
            await self.loop.sock_sendall(self.sock, data)

    async def rest(self) -> bytes:
        """All that comes until the other side is done."""
        got = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(self.loop.sock_recv(self.sock, 1 << 20), 30):
                got += data
        return got


class Shim:
    """A shim's relay whose requests to `/none` are refused by itself."""

    def __init__(self, server: RelayServer, port: int, links: LinkServer, asked: list[str]) -> None:
        self.server, self.port, self.links, self.asked = server, port, links, asked

    def link(self) -> Link:
        """Its only link."""
        (link,) = self.links.counts._open
        return link


@contextlib.asynccontextmanager
async def shim(engine: TcpAddress, dead_s: float = 45.0) -> AsyncIterator[Shim]:
    """On a real socket."""
    asked: list[str] = []

    def direct(request: object) -> object:
        path: str = request.path  # type: ignore[attr-defined]
        asked.append(path)
        return error_reply(404, "no such thing", "invalid_request_error", "none") if path == "/none" else Route(engine)

    async with relay(Recorder(direct)) as (server, port):
        links = LinkServer(server, dead_s=dead_s)
        server.upgrades = links.upgrade
        yield Shim(server, port, links, asked)


@contextlib.asynccontextmanager
async def hostile(port: int) -> AsyncIterator[Hostile]:
    """Closed at the end."""
    peer = Hostile(port)
    try:
        await peer.start()
        yield peer
    finally:
        peer.sock.close()


async def blocked_by(peer: Hostile, s: Shim) -> int:
    """Opens streams, reads none of their answers, until the shim's connection takes nothing more. Gives how many."""
    link = s.link()
    for number in range(1, 400):
        await peer.send(frame(DATA, number, post()))
        await asyncio.sleep(0)
        if link.blocked:
            return number
    await until(lambda: link.blocked)
    return 399


async def test_a_router_that_opens_streams_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """refusals that it does not read are bounded; then its link is ended, its requests are aborted, and the shim
    serves on."""
    async with engine_of(says(BIG + bytes(2 * WINDOW_BYTES))) as engine, shim(engine.address) as s:
        async with hostile(s.port) as peer:
            opened = await blocked_by(peer, s)
            link = s.link()
            monkeypatch.setattr(link_server, "MAX_STREAMS", opened)
            for first in range(opened + 1, opened + 80_000, 500):
                await peer.send(b"".join(frame(DATA, number, b"x") for number in range(first, first + 500)))
                if link.closed:
                    break
            await until(lambda: link.closed)
            assert s.links.counts.seen().ended == {UNREAD: 1}
            await until(lambda: not s.server.exchanges)
        assert s.links.counts.seen().carried.refused <= MAX_UNREAD_BYTES // HEAD_BYTES + 30_000  # and one read
        async with client(s.port) as one:
            one.send(post("/none"))
            assert b"404" in await one.head()
    assert s.links.counts.seen().links == 0


async def test_a_router_that_reads_nothing_for_long() -> None:
    """without any further word of it, too."""
    async with engine_of(says(BIG + bytes(2 * WINDOW_BYTES))) as engine, shim(engine.address, dead_s=1.0) as s:
        async with hostile(s.port) as peer:
            await blocked_by(peer, s)
            link = s.link()
            for _ in range(3000):
                await peer.send(frame(PONG, 0, bytes(8)))  # alive all the time
                if link.closed:
                    break
                await asyncio.sleep(0.05)
            assert s.links.counts.seen().ended == {UNREAD: 1}
        await until(lambda: not s.server.exchanges)


async def test_requests_in_a_row_on_a_stream_whose_answers_are_not_taken() -> None:
    """What is answered at once is answered for one window; then the next request waits."""
    ask = b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n"
    async with engine_of(says(stream_of(1))) as engine, shim(engine.address) as s, hostile(s.port) as peer:
        link = s.link()
        for _ in range(8):
            await peer.send(frame(DATA, 1, ask * 200))
        await until(lambda: link.streams and link.streams[1]._holding)
        before = len(s.asked)
        for _ in range(8):
            await peer.send(frame(DATA, 1, ask * 200))
        await until(lambda: link.streams[1]._paused)  # it is not even read any more
        assert len(s.asked) == before < 1600
        assert link.streams[1].get_write_buffer_size() < 4096
        await peer.send(frame(CREDIT, 1, WINDOW_BYTES.to_bytes(4, "big")))
        await until(lambda: len(s.asked) > before)


async def test_a_router_that_pings_as_fast_as_it_can() -> None:
    """It is ended with a reason; other links do not notice."""
    async with (
        engine_of(says(stream_of(1))) as engine,
        shim(engine.address) as s,
        hostile(s.port) as peer,
        hostile(s.port) as quiet,
    ):
        await peer.send(frame(PING, 0, bytes(8)) * 100_000)
        assert b"too many frames" in await peer.rest()
        await quiet.send(frame(DATA, 1, b"GET /none HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
        await until(lambda: s.asked)
        assert s.links.counts.seen().ended == {FLOOD: 1}
        assert s.links.counts.seen().links == 1


async def test_a_link_that_nobody_uses_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects, pings and never asks for anything does not hold a connection for ever."""
    monkeypatch.setattr(link_server, "_UNUSED_S", 0.5)
    async with engine_of(says(stream_of(1))) as engine, shim(engine.address) as s, hostile(s.port) as peer:
        await peer.send(frame(PING, 0, bytes(8)))
        got = await peer.rest()
        assert got.endswith(frame(GOAWAY))
        assert s.links.counts.seen().ended == {"left": 1}


# ---------------------------------------------------------------- a hostile shim


class BadShim:
    """Offers a link, accepts it, says `says` on it, and reads nothing of it but the first request."""

    def __init__(self, says: bytes) -> None:
        self.says = says
        self.plain = self.links = 0
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.saying: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if LINK_PATH.encode() in head:
                    self.links += 1
                    writer.write(SWITCH)
                    if self.says:
                        await reader.readexactly(HEAD_BYTES)  # the first stream
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                    while self.says:
                        writer.write(self.says)
                        await writer.drain()
                    return
                self.plain += 1
                length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if b"content-length:" in x)
                await reader.readexactly(length)
                writer.write(OFFERING + chunk(event(7)) + chunk(DONE) + b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def bad_shim(says: bytes = b"") -> AsyncIterator[BadShim]:
    """On a real socket that takes little."""
    bad = BadShim(says)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.bind(("127.0.0.1", 0))
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await bad.serve(reader, writer)

    server = await asyncio.start_server(handle, sock=sock, limit=4096)
    bad.port = sock.getsockname()[1]
    try:
        yield bad
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for writer in bad.writers:
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


class Router:
    """A router's relay that tries the bad shim first and then a good one."""

    def __init__(self, server: RelayServer, port: int, links: Links, bad: TcpAddress, director: Recorder) -> None:
        self.server, self.port, self.links, self.bad, self.director = server, port, links, bad, director

    async def linked(self) -> None:
        """A first request brings the offer."""
        async with client(self.port) as first:
            first.send(post())
            assert (await ended(first)).endswith(event(7) + DONE)
        await until(lambda: self.links.up(self.bad))


@contextlib.asynccontextmanager
async def routed(bad: BadShim, good: TcpAddress, dead_s: float = 20.0) -> AsyncIterator[Router]:
    """On real sockets."""
    address = TcpAddress("127.0.0.1", bad.port)
    again = lambda outcome: Retry(Route(good)) if outcome.route.address == address else None  # noqa: E731
    director = Recorder(lambda request: Route(address), lambda o: again(o) if o.kind is not OutcomeKind.OK else None)
    links = Links(dead_s)
    async with relay(director) as (server, port):
        server.pool.links = links
        try:
            yield Router(server, port, links, address, director)
        finally:
            links.close()


async def test_a_shim_that_takes_no_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    """RT5: what it does not read is bounded; then the link ends and what runs on it goes another way, unseen."""
    monkeypatch.setattr(link_connection, "MAX_UNREAD_BYTES", 5 * HEAD_BYTES)
    async with (
        engine_of(says(stream_of(2))) as engine,
        bad_shim() as bad,
        routed(bad, engine.address) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        await r.linked()
        (link,) = r.links.counts._open
        clients = [await stack.enter_async_context(client(r.port)) for _ in range(60)]
        for one in clients:
            one.send(post(body=bytes(4 * WINDOW_BYTES)))
        await until(lambda: link.blocked)
        leaving, staying = clients[:50], clients[50:]
        for one in leaving:
            one.writer.transport.abort()
        await until(lambda: link.closed)
        for one in staying:
            assert (await ended(one)).endswith(ANSWERS)
        assert r.links.counts.seen().ended == {UNREAD: 1}


async def test_a_shim_that_reads_nothing_for_long() -> None:
    """RT5: new requests take connections of their own; what waits is retried once the link is ended."""
    async with (
        engine_of(says(stream_of(2))) as engine,
        bad_shim() as bad,
        routed(bad, engine.address, dead_s=3.0) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        await r.linked()
        (link,) = r.links.counts._open
        clients = [await stack.enter_async_context(client(r.port)) for _ in range(60)]
        for one in clients:
            one.send(post(body=bytes(4 * WINDOW_BYTES)))
        await until(lambda: link.blocked)
        await until(lambda: not r.links.up(r.bad))
        async with client(r.port) as one:
            one.send(post())
            assert (await ended(one)).endswith(event(7) + DONE)  # by the bad shim, over a connection of its own
        await until(lambda: link.closed)
        for one in clients:
            assert (await ended(one)).endswith(ANSWERS)
        assert set(r.links.counts.seen().ended) <= {UNREAD, "silent"}
        assert not r.links.up(r.bad)


@pytest.mark.parametrize(
    ("flood", "why"),
    [
        (frame(PING, 0, bytes(8)) * 100, FLOOD),
        (frame(CREDIT, 1, CREDIT_1), MALFORMED),
        (frame(DATA, 9, bytes(1000)), MALFORMED),
        (HEAD.pack(9, 1 << KIND_SHIFT | 5), MALFORMED),
    ],
    ids=["pings", "windows", "stream", "frame"],
)
async def test_a_shim_that_says_what_nobody_asked(flood: bytes, why: str) -> None:
    """RT5: it costs that link; the request goes another way, and the shim is not asked for another link at once."""
    async with engine_of(says(stream_of(2))) as engine, bad_shim(flood) as bad, routed(bad, engine.address) as r:
        await r.linked()
        for _ in range(2):
            async with client(r.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(ANSWERS)
        await until(lambda: r.links.counts.seen().ended == {why: 1})
        async with client(r.port) as one:
            one.send(post())
            assert (await ended(one)).endswith(ANSWERS)
        assert bad.links == 1


async def test_a_shim_whose_answer_is_none() -> None:
    """RT5: it costs that stream; the link stays."""
    async with (
        engine_of(says(stream_of(2))) as engine,
        bad_shim(frame(DATA, 1, b"x" * 40_000)) as bad,
        routed(bad, engine.address) as r,
    ):
        await r.linked()
        async with client(r.port) as one:
            one.send(post())
            assert (await ended(one)).endswith(event(1) + DONE)
        assert r.links.counts.seen().ended == {}


async def test_a_shim_that_accepts_and_is_gone() -> None:
    """Its answer and its end in one read: no link is taken for up."""

    async def serve(peer: Peer) -> None:
        if LINK_PATH.encode() in peer.head:
            peer.writer.write(SWITCH)
            peer.writer.close()
        else:
            await peer.send(OFFERING + chunk(event(7)) + chunk(DONE) + b"0\r\n\r\n")

    async with engine_of(serve) as shim_, relay(Recorder(lambda r: Route(shim_.address))) as (server, port):
        server.pool.links = links = Links()
        for _ in range(3):
            async with client(port) as one:
                one.send(post())
                assert (await ended(one)).endswith(event(7) + DONE)
        await until(lambda: not links._asking)
        await until(lambda: not links.up(shim_.address))
        assert links.empty
        links.close()
