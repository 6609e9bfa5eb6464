"""A relay without sockets: a test says which reads come in which pass of the loop, and sees what each client got."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from springtide.dataplane import Outcome, RelayServer, Reply, Request, Retry, Route, TcpAddress
from springtide.dataplane.messages import Address, Answer, ShapeError
from springtide.dataplane.server import ClientConnection
from springtide.dataplane.upstream import Upstream, UpstreamPool
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, chunk, dechunk, post

ENGINE = TcpAddress("127.0.0.1", 1)
ERROR = b'data: {"error":{"message":"rank died","type":"InternalServerError","code":500}}\n\n'
NEVER_KEPT = 1 << 60
"""As an inbox's `skip`: every read is handed out at once."""


async def passes(count: int = 6) -> None:
    """Some passes of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def token(stream: int, i: int, more: bytes = b"") -> bytes:
    """One token's event."""
    return b'data: {"s": %d, "i": %d%b}\n\n' % (stream, i, more)


class Pipe:
    """A transport: keeps what was written; its end is told from the loop, as a real one's."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        self.written = bytearray()
        self.writes = 0
        self.closing = False
        self.reading = True
        self.on_write: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        if not self.closing and data:
            self.written += data
            self.writes += 1
            self.on_write()

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    close = abort

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """No limits."""

    def can_write_eof(self) -> bool:
        return False

    def take(self) -> bytes:
        """What was written since the last time."""
        data = bytes(self.written)
        self.written.clear()
        return data


def upstream_of(pool: UpstreamPool, address: Address = ENGINE) -> Upstream:
    """A connection on a pipe."""
    conn = Upstream(pool, address)
    conn.connection_made(cast(asyncio.BaseTransport, Pipe(conn)))
    return conn


def pipe_of(conn: Upstream | ClientConnection) -> Pipe:
    return cast(Pipe, conn.transport)


class Shape:
    """A shaper whose events say what happens: `end` closes the stream, `bad` fails, `raise` is a fault of its own."""

    def __init__(self) -> None:
        self.ended = False
        self.fed = b""

    def feed(self, events: bytes) -> bytes:
        assert not self.ended, "nothing is shaped after the end"
        self.fed += events
        if b'"bad"' in events:
            raise ShapeError("no token of ours")
        if b'"raise"' in events:
            raise RuntimeError("a fault of the shaper")
        self.ended = b'"end"' in events
        return b"" if b'"quiet"' in events else events.replace(b'"i"', b'"shaped"')


class Told:
    """A director that records; `route` and `retry` may be set."""

    def __init__(self) -> None:
        self.route: Callable[[Request], Route | Reply] = lambda request: Route(ENGINE)
        self.retry: Callable[[Outcome], Retry | None] = lambda outcome: None
        self.outcomes: dict[bytes, list[Outcome]] = {}

    def direct(self, request: Request) -> Answer:
        return self.route(request)

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        self.outcomes.setdefault(request.body, []).append(outcome)
        return self.retry(outcome)


@dataclass
class One:
    """One stream: its client, and the engine's connection that serves it."""

    body: bytes
    client: ClientConnection
    conn: Upstream

    def reads(self, *reads: bytes) -> None:
        """What comes from the engine, now."""
        for data in reads:
            if not pipe_of(self.conn).closing:
                self.conn.data_received(data)

    @property
    def got(self) -> bytes:
        """What the client has of the body, without its framing."""
        whole = bytes(pipe_of(self.client).written)
        return dechunk(whole[whole.find(b"\r\n\r\n") + 4 :])[0] if whole else b""

    @property
    def clean(self) -> bool:
        """The client's body has its end."""
        whole = bytes(pipe_of(self.client).written)
        return dechunk(whole[whole.find(b"\r\n\r\n") + 4 :])[1]


@dataclass
class World:
    """A relay; `kept`: whether reads of one pass are kept and handed out together."""

    kept: bool = True
    director: Told = field(default_factory=Told)
    engines: list[Upstream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = RelayServer(self.director)
        self.server.loop = asyncio.get_running_loop()
        if not self.kept:
            self.server.inbox.skip = NEVER_KEPT
        self.server.pool.connect = self._connect  # type: ignore[method-assign]

    async def _connect(self, address: Address) -> Upstream:
        self.engines.append(conn := upstream_of(self.server.pool, address))
        return conn

    def client(self) -> ClientConnection:
        """One that has said nothing yet."""
        client = ClientConnection(self.server)
        client.connection_made(cast(asyncio.BaseTransport, Pipe(client)))
        return client

    def ask(self, body: bytes) -> One:
        """A request on its way, over a kept connection."""
        conn = upstream_of(self.server.pool)
        self.engines.append(conn)
        self.server.pool.put(conn, 0.0)
        client = self.client()
        client.data_received(post(body=body))
        assert conn.sink is not None
        return One(body, client, conn)

    async def running(self, count: int) -> list[One]:
        """Streams of which the client has the first two tokens, and whose further reads are kept."""
        ones = [self.ask(b"%d" % n) for n in range(count)]
        for n, one in enumerate(ones):
            one.reads(SSE_HEAD + chunk(token(n, 0)), chunk(token(n, 1)))
            assert one.conn.inbox is self.server.inbox
        await passes()
        return ones

    def outcome(self, one: One) -> Outcome:
        """The one outcome of a stream."""
        (outcome,) = self.director.outcomes[one.body]
        return outcome

    async def close(self) -> None:
        """Ends it, and looks that nothing is left."""
        await self.server.close()
        await passes()
        assert not self.server.inbox.reads
        assert not self.server.exchanges
        assert self.server.pool.empty
        assert all(pipe_of(conn).closing for conn in self.engines), "a connection is left"


def begun(stream: int) -> bytes:
    """What a client of a `running` stream has."""
    return token(stream, 0) + token(stream, 1)


# ---------------------------------------------------------------- random streams


@dataclass
class Script:
    """What one engine says, cut into reads, and how it ends: `kept` (alive), `eof`, or the client's `leaves`."""

    reads: list[bytes]
    end: str


def random_script(rng: random.Random, stream: int, shaped: bool) -> Script:
    """A stream of some tokens that ends in one of many ways, in reads that are mostly one token each."""
    chunks = []
    for i in range(rng.randint(2, 30)):
        kind = rng.random()
        event = token(stream, i, rng.choice((b"", b', "t": "' + b"x" * rng.choice((1, 100, 5000)) + b'"')))
        if kind < 0.05:
            event = b": ping\n\n" + event
        elif kind < 0.10:
            event = event.replace(b"\n\n", b"\r\n\r\n")
        elif kind < 0.15:
            event = token(stream, i, b', "t": "an error"')
        elif kind < 0.20:
            event += token(stream, i, b', "t": "second"')
        elif kind < 0.25:
            cut = rng.randint(1, len(event) - 1)
            chunks.append(chunk(event[:cut]))
            event = event[cut:]
        elif kind < 0.28 and shaped:
            event = token(stream, i, b', "quiet": 1')
        chunks.append(chunk(event))
    how = rng.choice(("done", "done", "done", "one", "error", "early", "eof", "leaves", "bad", "end", "torn"))
    end = "kept"
    if how in ("done", "one", "leaves"):
        chunks += [chunk(DONE) + LAST] if how == "one" else [chunk(DONE), LAST]
        end = how if how == "leaves" else end
    elif how == "error":
        chunks += [chunk(ERROR), chunk(token(stream, 97)), chunk(DONE), LAST]
    elif how == "early":
        chunks += [LAST]
    elif how == "torn":
        chunks += [b"zz\r\n", chunk(token(stream, 98))]
    else:
        if how != "eof":
            chunks += [chunk(token(stream, 96, b', "%b": 1' % how.encode())), chunk(token(stream, 95))]
        end = "eof"
    reads = [SSE_HEAD + chunks[0]]
    for piece in chunks[1:]:
        if rng.random() < 0.1:
            reads[-1] += piece
        elif rng.random() < 0.1:
            cut = rng.randint(1, len(piece) - 1)
            reads += [piece[:cut], piece[cut:]]
        else:
            reads.append(piece)
    return Script(reads, end)


async def play(
    scripts: list[Script], ones: list[One], rng: random.Random, between: Callable[[], Awaitable[None]]
) -> None:
    """Every script's reads for its stream, in an order that is `rng`'s alone; `between` some of them as well."""
    left = [list(script.reads) for script in scripts]
    open_ = list(range(len(scripts)))
    while open_:
        for _ in range(rng.choice((1, 3, 20, 60))):
            if not open_:
                break
            n = rng.choice(open_)
            burst = rng.choice((1, 1, 1, 2, 5))
            reads, left[n] = left[n][:burst], left[n][burst:]
            leaves = scripts[n].end == "leaves" and rng.random() < 0.2
            ones[n].reads(*reads)
            if leaves:
                ones[n].client.eof_received()
            if not left[n] or leaves:
                open_.remove(n)
                if scripts[n].end == "eof" and not pipe_of(ones[n].conn).closing:
                    ones[n].conn.eof_received()
        await between()
