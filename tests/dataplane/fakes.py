"""Scripted upstreams, a recording director and a raw client, all on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from springtide.dataplane import Limits, Outcome, RelayServer, Reply, Request, Retry, Route, TcpAddress

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(i: int) -> bytes:
    return b'data: {"i": %d}\n\n' % i


def post(path: str = "/v1/completions", body: bytes = b"{}", extra: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: t\r\n%bcontent-length: %d\r\n\r\n%b" % (path.encode(), extra, len(body), body)


async def until(condition: Callable[[], object], bound_s: float = 5.0) -> None:
    """Polls until the condition holds; fails the test after the bound."""
    end = asyncio.get_running_loop().time() + bound_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, "the condition never came true"
        await asyncio.sleep(0.005)


Script = Callable[["Peer"], Awaitable[None]]


@dataclass
class Peer:
    """One connection at the fake upstream, with the request that was read from it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes = b""
    body: bytes = b""

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> None:
        """Returns once the other side hung up."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


@dataclass
class Upstream:
    """A server whose n-th request is answered by the n-th script (the last one repeats)."""

    scripts: list[Script]
    port: int = 0
    connections: int = 0
    requests: list[Peer] = field(default_factory=list)
    hangups: int = 0

    @property
    def address(self) -> TcpAddress:
        return TcpAddress("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                peer = Peer(reader, writer, head, await reader.readexactly(length))
                self.requests.append(peer)
                script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
                await script(peer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hangups += 1
        except asyncio.CancelledError:
            pass  # the end of the test; the stream server would log it
        finally:
            writer.close()


@asynccontextmanager
async def upstream(*scripts: Script) -> AsyncIterator[Upstream]:
    fake = Upstream(list(scripts))
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await fake.serve(reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def says(*pieces: bytes, close: bool = False) -> Script:
    """A script that sends the pieces one by one."""

    async def script(peer: Peer) -> None:
        for piece in pieces:
            await peer.send(piece)
            await asyncio.sleep(0)
        if close:
            peer.writer.close()

    return script


def stream_of(count: int) -> bytes:
    return SSE_HEAD + b"".join(chunk(event(i)) for i in range(count)) + chunk(DONE) + LAST


class Recorder:
    """A director that sends everything to one address (or what `choose` says) and records outcomes."""

    def __init__(self, choose: Callable[[Request], object], retry: Callable[[Outcome], Retry | None] | None = None):
        self.choose = choose
        self.retry = retry
        self.requests: list[Request] = []
        self.outcomes: list[Outcome] = []

    def direct(self, request: Request) -> Route | Reply | Awaitable[Route | Reply]:
        self.requests.append(request)
        return self.choose(request)  # type: ignore[return-value]

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        self.outcomes.append(outcome)
        return self.retry(outcome) if self.retry else None


@asynccontextmanager
async def relay(director: Recorder, limits: Limits | None = None) -> AsyncIterator[tuple[RelayServer, int]]:
    server = RelayServer(director, limits)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.close()


class Client:
    """A raw client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)

    async def exactly(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), 5)

    async def rest(self) -> bytes:
        """Everything until the other side closes."""
        return await asyncio.wait_for(self.reader.read(-1), 10)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of one answer with a Content-Length."""
        head = await self.head()
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        return int(head.split(b" ")[1]), await self.exactly(length)

    async def chunks(self) -> bytes:
        """The payload of one chunked body up to its closing chunk. Fails on a body that is cut."""
        payload = b""
        while True:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 5), 16)
            data = await self.exactly(size + 2)
            if not size:
                return payload
            payload += data[:-2]


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


def dechunk(data: bytes) -> tuple[bytes, bool]:
    """Payload of a chunked body that may be cut; says whether the closing chunk came."""
    payload = b""
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line, 16)
        if not size:
            return payload, True
        payload += data[:size]
        data = data[size + 2 :]
    return payload, False
