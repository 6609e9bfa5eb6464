"""The listening side: client connections, their limits, and the relay as a whole.

A connection serves one request after another. Bytes that come while a request runs (pipelining) wait, up to the size of
a head; more than that is dropped and the connection closes after the answer. Reading never stops while a request runs,
so that a client that leaves is seen at once.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import cast

from springtide.dataplane.exchange import Exchange
from springtide.dataplane.framing import Body, FramingError
from springtide.dataplane.heads import HeadError, RequestHeads, ResponseHeads, body_of, encode_reply
from springtide.dataplane.inbox import Inbox, PassInbox
from springtide.dataplane.messages import Address, Director, Limits, Request, error_reply
from springtide.dataplane.upstream import UpstreamPool, set_nodelay

log = logging.getLogger(__name__)

_NEVER = float("inf")
_TYPES = {413: "request_too_large", 431: "request_too_large", 408: "request_timeout", 503: "overloaded"}


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "body",
        "buffer",
        "closing",
        "deadline",
        "exchange",
        "paused",
        "paused_at",
        "peer",
        "received",
        "request",
        "server",
        "transport",
    )

    transport: asyncio.Transport
    linked = False
    """A stream of a link: see `pass_on`."""

    def __init__(self, server: "RelayServer") -> None:
        self.server = server
        self.buffer = b""
        self.request: Request | None = None  # its head is read, its body is on the way
        self.body: Body | None = None
        self.received: bytes | bytearray = b""  # of the body
        self.exchange: Exchange | None = None
        self.closing = False
        self.paused = False
        self.paused_at = 0.0
        self.deadline = _NEVER
        self.peer = ""

    # ------------------------------------------------------------ transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        server = self.server
        set_nodelay(transport)
        self.transport.set_write_buffer_limits(high=server.limits.write_high_water_bytes)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else "unix"
        server.connections.add(self)
        server.wake_sweep()
        if server.closing or len(server.connections) > server.limits.max_connections:
            self._refuse(503, "too many connections" if not server.closing else "shutting down")
        else:
            self.deadline = server.loop.time() + server.limits.idle_timeout_s

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        if self.exchange is not None:
            if len(self.buffer) + len(data) > self.server.limits.max_head_bytes:
                self.buffer = b""
                self.exchange.request.keep_alive = False
            elif self.exchange.request.keep_alive:
                self.buffer += data
            return
        if self.paused and self.request is None:
            # Who takes no answers is given no further ones.
            self.buffer += data
            if len(self.buffer) > self.server.limits.max_head_bytes:
                self.transport.pause_reading()
            return
        try:
            self._feed(data)
        except HeadError as error:
            self._refuse(error.status, str(error))
        except FramingError as error:
            self._refuse(400, f"malformed body: {error}")

    def eof_received(self) -> bool:
        self._gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._gone()

    def pause_writing(self) -> None:
        self.paused = True
        self.paused_at = self.server.loop.time()
        if self.exchange is not None:
            self.exchange.hold_back(True)

    def resume_writing(self) -> None:
        self.paused = False
        if self.exchange is not None:
            self.exchange.hold_back(False)
        elif self.buffer:
            self.transport.resume_reading()
            self.server.loop.call_soon(self._next)

    # ------------------------------------------------------------ requests

    def _feed(self, data: bytes) -> None:
        if self.request is None:
            if not self.buffer:
                # The usual read is one whole request, with a head that was read before.
                end = data.find(b"\r\n\r\n") + 4
                known, length = self.server.request_heads.find(data[:end])
                whole = len(data) - end == length <= self.server.limits.max_body_bytes
                if known is not None and whole and known.simple:
                    request = known.request(self.peer, self.server.loop.time())
                    request.body = data[end:]
                    self.deadline = _NEVER
                    self.exchange = exchange = Exchange(self.server, self, request)
                    self.server.exchanges.add(exchange)
                    exchange.start()
                    return
            begun = bool(self.buffer)
            if begun:
                data = self.buffer + data
                self.buffer = b""
            rest = self._read_head(data, begun)
            if rest is None:
                return
            data = rest
        self._read_body(data)

    def _read_head(self, data: bytes, begun: bool) -> bytes | None:
        limits = self.server.limits
        if data[:1] in (b"\r", b"\n"):
            data = data.lstrip(b"\r\n")  # left over from clients that end a body with an empty line
            if not data:
                return None
        if not data[:1].isalpha():
            raise HeadError(400, "malformed request: this port speaks plain HTTP/1.1")
        end = data.find(b"\r\n\r\n") + 4
        if end < 4 or end > limits.max_head_bytes:
            if len(data) > limits.max_head_bytes:
                raise HeadError(431, f"the head is longer than {limits.max_head_bytes} bytes")
            if b"\n\n" in data or b"\n\r\n" in data.replace(b"\r\n", b""):
                raise HeadError(400, "malformed request: lines must end with CRLF")
            if not begun:  # from its first byte on, a head has a fixed time: dripping bytes gains nothing
                self.deadline = self.server.loop.time() + limits.head_timeout_s
            self.buffer = data
            return None
        known, length = self.server.request_heads.find(data[:end])
        if known is None:
            known = self.server.request_heads.read(data[:end])
            length = known.length
        if length > limits.max_body_bytes:
            raise HeadError(413, f"the body has {length} bytes; at most {limits.max_body_bytes} are taken")
        request = known.request(self.peer, self.server.loop.time())
        body = body_of(length)
        self.request, self.body = request, body
        rest = data[end:]
        if not body.done:
            self.deadline = request.started_at + limits.body_timeout_s
            expect = request.header(b"expect")
            if expect is not None:
                if expect.lower() != b"100-continue":
                    raise HeadError(417, "the only expectation that is met is 100-continue")
                if not rest:
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return rest

    def _read_body(self, data: bytes) -> None:
        request, body = self.request, self.body
        assert request is not None
        assert body is not None
        if not body.done:
            payload = body.feed(data)
            if payload:
                self._keep(payload)
            data = body.rest
        if not body.done:
            return
        request.body, self.received = bytes(self.received), b""
        self.request = self.body = None
        self.deadline = _NEVER
        self.buffer = data[: self.server.limits.max_head_bytes]
        if len(data) > len(self.buffer):
            self.buffer, request.keep_alive = b"", False
        upgrades = self.server.upgrades
        if upgrades is not None and request.method == "GET" and upgrades(self, request):
            return
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self.exchange = exchange = Exchange(self.server, self, request)
        self.server.exchanges.add(exchange)
        exchange.start()

    def _keep(self, payload: bytes) -> None:
        if not self.received:
            self.received = payload
        else:
            if not isinstance(self.received, bytearray):
                self.received = bytearray(self.received)
            self.received += payload
        if len(self.received) > self.server.limits.max_body_bytes:
            raise HeadError(413, f"the body is longer than {self.server.limits.max_body_bytes} bytes")

    # ------------------------------------------------------------ for the exchange

    def write(self, data: bytes) -> None:
        """Writes towards the client."""
        if data:
            self.transport.write(data)

    @property
    def inbox(self) -> Inbox:
        """For what comes for this client while its stream runs."""
        return self.server.inbox

    def steady_write(self) -> Callable[[bytes], None]:
        """What writes the chunks of a stream that runs; on a link, of one whole event each."""
        return self.transport.write

    def pass_on(self, data: bytes, count: int) -> None:
        """Writes one chunk of `count` whole events; a link says so to the relay at its other end."""
        self.transport.write(data)

    def exchange_done(self, close: bool) -> None:
        """The answer is written; `close` ends the connection after what is buffered has left."""
        self.exchange = None
        if close or self.transport.is_closing():
            self._close()
            return
        if self.buffer:
            # From the loop, so that a long pipeline neither nests nor keeps others waiting.
            self.server.loop.call_soon(self._next)

    def _next(self) -> None:
        if self.exchange is None and not self.closing and not self.paused and self.request is None:
            data, self.buffer = self.buffer, b""
            if data:
                self.data_received(data)

    def close_if_idle(self) -> None:
        """Closes a connection between two requests."""
        if self.exchange is None and not self.closing:
            self._close()

    # ------------------------------------------------------------ ends

    def _close(self) -> None:
        self.closing = True
        self.deadline = self.server.loop.time() + self.server.limits.idle_timeout_s
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers an error, then drops what still comes for a moment: a reset would take the answer with it."""
        self.closing = True
        self.buffer = b""
        self.received = b""
        self.request = self.body = None
        self.deadline = self.server.loop.time() + self.server.limits.linger_s
        reply = error_reply(status, message, _TYPES.get(status, "invalid_request_error"), status, close=True)
        self.transport.write(encode_reply(reply, "GET", keep_alive=False))
        if self.transport.is_closing():
            return
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except (OSError, RuntimeError):  # the client was faster
            self.transport.abort()

    def _gone(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            self.closing = True
            exchange.gone()
            self.transport.abort()

    def check(self, now: float) -> None:
        """Looks at the time-outs; called by the server's sweep."""
        if self.paused and now - self.paused_at > self.server.limits.stall_timeout_s:
            self._gone()
            self.transport.abort()
        elif self.deadline == _NEVER:
            if self.exchange is None:  # since the last sweep
                self.deadline = now + self.server.limits.idle_timeout_s
        elif now > self.deadline:
            if self.closing:
                self.transport.abort()
            elif self.buffer or self.request is not None:
                self._refuse(408, "the request did not arrive in time")
            else:
                self._close()


class RelayServer:
    """A relay: listens, asks its director, moves bytes.

    Phases: `start` (any number of listeners), then `close`. `exchanges` and `connections` are what runs now.
    """

    SWEEP_INTERVAL_S = 0.2

    def __init__(self, director: Director, limits: Limits | None = None) -> None:
        self.director = director
        self.limits = limits or Limits()
        self.pool = UpstreamPool(self.limits)
        self.inbox = PassInbox(self)
        self.inboxes: list[Inbox] = [self.inbox]
        """All that keep reads for this relay's clients."""
        self.request_heads = RequestHeads(self.limits.max_headers)
        self.response_heads = ResponseHeads()
        self.upgrades: Callable[[ClientConnection, Request], bool] | None = None
        """Asked of each GET: True where it has taken the connection over for another protocol."""
        self.connections: set[ClientConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.closing = False
        self.loop: asyncio.AbstractEventLoop
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None

    async def start(
        self,
        host: str | None = None,
        port: int = 0,
        *,
        sock: socket.socket | None = None,
        path: Path | None = None,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> int:
        """Listens on a TCP address, a given listening socket, or a unix path. Gives the bound TCP port (0 for unix).
        With `tls` a client has the time of a head to shake hands.

        Raises OSError when the address is in use.
        """
        self.loop = asyncio.get_running_loop()
        factory: Callable[[], ClientConnection] = lambda: ClientConnection(self)  # noqa: E731
        if path is not None:
            server = await self.loop.create_unix_server(factory, str(path), backlog=1024)
        elif sock is not None:
            server = await self.loop.create_server(factory, sock=sock, backlog=1024)
        else:
            server = await self.loop.create_server(
                factory,
                host,
                port,
                backlog=1024,
                reuse_port=reuse_port or None,
                ssl=tls,
                ssl_handshake_timeout=self.limits.head_timeout_s if tls is not None else None,
            )
        self._servers.append(server)
        name = server.sockets[0].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    def abort(self, key: object = None, message: str = "the request was aborted", code: str = "aborted") -> int:
        """Cuts the running exchanges of one route key (None: all) with an explicit error. Gives how many."""
        chosen = [x for x in self.exchanges if key is None or x.key() == key]
        for exchange in chosen:
            exchange.abort(message, code)
        return len(chosen)

    def close_address(self, address: Address) -> None:
        """Closes kept-alive connections to an upstream that is out of use."""
        self.pool.close_address(address)

    async def close(self, drain_s: float = 0.0) -> int:
        """Stops listening, waits up to `drain_s` for running exchanges, aborts the rest. Gives how many it aborted."""
        self.closing = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        end = self.loop.time() + drain_s if self._servers else 0.0
        while self.exchanges and self.loop.time() < end:
            await asyncio.sleep(0.02)
        aborted = self.abort(message="the server is shutting down", code="shutting_down") if self.exchanges else 0
        end = self.loop.time() + 1.0 if self._servers else 0.0
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()
        self.pool.close()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._servers.clear()
        await asyncio.sleep(0)
        return aborted

    # One sweep in place of timers: nothing is allocated per request or token for time-outs.

    def wake_sweep(self) -> None:
        """Starts the sweep if it sleeps."""
        if self._sweep is None:
            self._sweep = self.loop.call_later(self.SWEEP_INTERVAL_S, self._run_sweep)

    def _run_sweep(self) -> None:
        for inbox in self.inboxes:
            inbox.empty()  # whose token is there is not idle
        now = self.loop.time()
        for exchange in list(self.exchanges):
            exchange.check(now)
        for connection in list(self.connections):
            connection.check(now)
        self.pool.sweep(now)
        self._sweep = None
        if self.connections or not self.pool.empty:
            self.wake_sweep()
