"""The listening side: connections of clients, their limits, and an orderly end."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from springtide.http2 import frames
from springtide.http2.connection import Connection, Joiner
from springtide.http2.frames import PREFACE, ConnectionFault, ErrorCode, StreamFault, frame
from springtide.http2.headers import Headers, check_request, check_trailers
from springtide.http2.limits import Http2Limits
from springtide.http2.stream import Stream, StreamHandler

log = logging.getLogger(__name__)

Accept = Callable[[Stream, Headers], StreamHandler]
"""Called with each new stream. Must not raise; may answer at once."""


class ServerConnection(Connection):
    """One client."""

    ends_with_answer = True

    def __init__(self, server: "Http2Server") -> None:
        super().__init__(server.joiner, server.limits)
        self.server = server
        self.draining = False
        self._preface = 0  # bytes of it that came
        self._born_at = self.loop.time()
        self.peer = ""
        self.relay: object = None
        """Whatever the owner keeps for this connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else "unix"
        server.connections.add(self)
        super().connection_made(transport)
        if server.closing or len(server.connections) > server.limits.max_connections:
            self.fault(ErrorCode.ENHANCE_YOUR_CALM if not server.closing else ErrorCode.NO_ERROR, "no more connections")
        server.wake_sweep()

    def data_received(self, data: bytes) -> None:
        if self._preface < len(PREFACE) and not self.closing:
            wanted = PREFACE[self._preface : self._preface + len(data)]
            if not data.startswith(wanted):
                self.fault(ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 (gRPC)")
                return
            self._preface += len(wanted)
            data = data[len(wanted) :]
            if not data:
                self.heard = True
                return
        super().data_received(data)

    def lost(self, error: Exception | None) -> None:
        super().lost(error)
        self.server.connections.discard(self)
        self.server.gone(self)

    def check(self, now: float) -> None:
        if not self._settled and not self.closing and now - self._born_at > self.limits.preface_timeout_s:
            self.fault(ErrorCode.SETTINGS_TIMEOUT, "no preface came")
        super().check(now)

    def on_header_list(self, stream: Stream | None, stream_id: int, fields: Headers, ends: bool) -> None:
        """A request, or a request's trailers."""
        if stream is not None:
            if stream.ended_in:
                raise StreamFault(ErrorCode.STREAM_CLOSED, "HEADERS after the end of a stream")
            if not ends:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            check_trailers(fields)
            stream.end_in()
            return
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client's stream has an odd number")
        if stream_id <= self.last_id:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "HEADERS of a closed stream")
        self.last_id = stream_id
        check_request(fields)
        if len(self.streams) >= self.limits.max_streams or (self.draining and stream_id > self._last_taken):
            raise StreamFault(ErrorCode.REFUSED_STREAM, "too many streams")
        stream = Stream(self, stream_id)
        self.streams[stream_id] = stream
        stream.handler = self.server.accept(stream, fields)
        if ends and not stream.closed:
            stream.end_in()

    # ------------------------------------------------------------ an orderly end

    _last_taken = frames.MAX_STREAM_ID

    def drain(self) -> None:
        """Tells the client to open no more streams here. Those under way when it hears so are still taken."""
        if self.draining or self.closing:
            return
        self.draining = True
        self.emit(frames.goaway_frame(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR, "shutting down"))
        self.emit(frame(frames.PING, 0, 0, b"lastcall"))

    def on_pong(self) -> None:
        if self.draining and self._last_taken == frames.MAX_STREAM_ID:
            self._last_taken = self.last_id
            self.emit(frames.goaway_frame(self.last_id, ErrorCode.NO_ERROR, "shutting down"))
            self._end_if_idle()

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.draining and not self.closing and not self.streams and self._last_taken != frames.MAX_STREAM_ID:
            self.flush()
            self.shut()


class Http2Server:
    """Listens, and hands each new stream to `accept`. `gone` is told when a connection has ended."""

    SWEEP_INTERVAL_S = 0.5

    def __init__(
        self,
        accept: Accept,
        limits: Http2Limits | None = None,
        gone: Callable[[ServerConnection], None] = lambda connection: None,
    ) -> None:
        self.accept = accept
        self.gone = gone
        self.limits = limits or Http2Limits()
        self.loop = asyncio.get_running_loop()
        self.joiner = Joiner(self.loop)
        self.connections: set[ServerConnection] = set()
        self.closing = False
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None

    async def start(
        self,
        host: str | None = None,
        port: int = 0,
        *,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> int:
        """Listens on a TCP address or a given listening socket; gives the bound port. Raises OSError."""
        where = {"sock": sock} if sock is not None else {"host": host, "port": port}
        server = await self.loop.create_server(lambda: ServerConnection(self), backlog=1024, ssl=tls, **where)
        self._servers.append(server)
        name = server.sockets[0].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    @property
    def streams(self) -> int:
        """Open ones."""
        return sum(len(connection.streams) for connection in self.connections)

    async def close(
        self,
        drain_s: float = 0.0,
        cut: Callable[[], None] = lambda: None,
        running: Callable[[], int] | None = None,
    ) -> None:
        """Takes no more connections and streams, and waits up to `drain_s` for those that run (`running` says how many
        are worth it; None: all). Then `cut` may end the rest with an answer, and what is left is cut."""
        self.closing = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drain()
        end = self.loop.time() + drain_s
        while (running() if running is not None else self.streams) and self.loop.time() < end:
            await asyncio.sleep(0.02)
        cut()
        end = self.loop.time() + (0.5 if self.connections else 0.0)
        await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.fault(ErrorCode.NO_ERROR, "shutting down")
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.lost(None)
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._servers.clear()
        await asyncio.sleep(0)

    # One sweep in place of timers.

    def wake_sweep(self) -> None:
        """Starts the sweep if it sleeps."""
        if self._sweep is None:
            self._sweep = self.loop.call_later(self.SWEEP_INTERVAL_S, self._run_sweep)

    def _run_sweep(self) -> None:
        self._sweep = None
        now = self.loop.time()
        for connection in list(self.connections):
            connection.check(now)
        if self.connections:
            self.wake_sweep()
