"""Connections to upstreams (a shim, an engine) and the pool that keeps them.

A connection carries one exchange at a time. Its bytes go to the `Sink` that holds it: read by read, or, while a stream
runs, with the other reads of a pass (`inbox`).
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from springtide.dataplane.inbox import LARGE_BYTES, Inbox
from springtide.dataplane.messages import Address, Limits, TcpAddress

Job = tuple[Callable[[bytes], None], bytes]
"""What is to be done with which bytes: who looks at several reads before anything is written says it so."""


class LocalFault(ConnectionAbortedError):
    """Not the upstream failed but whoever used the connection."""


class Sink(Protocol):
    """Who uses a connection."""

    def upstream_data(self, data: bytes) -> None:
        """One read."""
        ...

    def upstream_read(self, data: bytes) -> Job:
        """One read of several that came together. Looks at it, and gives what is to be done before anything else
        happens to this connection."""
        ...

    def upstream_events(self, data: bytes, count: int) -> Job:
        """Over a link: one chunk of `count` whole events, none of them an error, a comment or the end. Gives what
        is to be done, as `upstream_read`."""
        ...

    def upstream_lost(self, error: Exception | None) -> None:
        """The upstream closed or reset the connection. Not called after the sink let go of it."""
        ...


def set_nodelay(transport: asyncio.BaseTransport) -> None:
    """Tokens are small writes: without this, Nagle and a delayed ACK cost 40 ms each. No-op on unix sockets."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Upstream(asyncio.Protocol):
    """One connection. `served` counts exchanges begun on it; `idle_since` is the loop's clock."""

    __slots__ = ("address", "held", "idle_since", "inbox", "linked", "pool", "served", "sink", "transport")

    transport: asyncio.Transport

    def __init__(self, pool: "UpstreamPool", address: Address) -> None:
        self.pool = pool
        self.address = address
        self.sink: Sink | None = None
        self.served = 0
        self.held = False
        self.idle_since = 0.0
        self.linked = False  # a stream of a link
        self.inbox: Inbox | None = None
        """Where what comes is kept until there is time for all of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        set_nodelay(transport)

    def data_received(self, data: bytes) -> None:
        inbox, sink = self.inbox, self.sink
        if inbox is not None:
            if inbox.skip:
                inbox.skip -= 1
            elif len(data) < LARGE_BYTES:
                if not inbox.reads:
                    inbox.wake()
                inbox.reads.append((self, sink, data))
                return
            else:
                inbox.empty()
                if self.sink is not sink:  # its answer ended with what came before
                    sink = None
        if sink is not None:
            sink.upstream_data(data)
        else:
            self.out_of_step()

    def out_of_step(self, _: bytes = b"") -> None:
        """Something came for nobody, or for one that has left: whatever it is, the connection ends. A `Job`'s."""
        self.pool.forget(self)
        self.transport.abort()

    def give_up(self, _: bytes = b"") -> None:
        """Its user failed on what came: it ends. A `Job`'s."""
        self.connection_lost(LocalFault("what came could not be used"))
        self.transport.abort()

    def events_received(self, data: bytes, count: int) -> Job:
        """From a link: see `Sink`."""
        sink = self.sink
        return (self.out_of_step, data) if sink is None else sink.upstream_events(data, count)

    def eof_received(self) -> bool:
        # Not left to the transport, which would first try to write out what is still buffered.
        self.connection_lost(None)
        self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.inbox is not None:
            self.inbox.empty()  # what came before
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.upstream_lost(exc)
        else:
            self.pool.forget(self)

    def hold_back(self, paused: bool) -> None:
        """Reads no more, or again."""
        self.held = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def drop(self) -> None:
        """Cuts the connection at once. For an engine this is what aborts its request."""
        self.sink = self.inbox = None
        self.transport.abort()

    def release(self, now: float) -> None:
        """Gives the connection back for the next exchange. `now`: the loop's clock."""
        self.sink = self.inbox = None
        self.pool.put(self, now)


class Links(Protocol):
    """Links to upstreams: one connection each that carries many exchanges (springtide.link)."""

    def up(self, address: Address) -> bool:
        """True where exchanges with this address go over a link."""
        ...

    def open(self, pool: "UpstreamPool", address: Address) -> Upstream:
        """A stream of the link as a connection of `pool`. Only while `up`."""
        ...

    def offered(self, address: Address) -> None:
        """An answer from this address offers a link."""
        ...

    def leave(self, address: Address) -> None:
        """The address is out of use."""
        ...


class UpstreamPool:
    """Kept-alive connections by address, last in, first out. Bounded per address and by idle time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.links: Links | None = None
        """Where there are some, exchanges go over them; whoever sets this closes them."""
        self._idle: dict[Address, deque[Upstream]] = {}
        self._closed = False

    def take(self, address: Address) -> Upstream | None:
        """An idle connection, a stream of a link, or None."""
        links = self.links
        linked = links is not None and links.up(address)
        idle = self._idle.get(address)
        while idle:
            conn = idle.pop()
            if not idle:
                del self._idle[address]
            if conn.linked != linked:
                conn.transport.abort()
            elif not conn.transport.is_closing():
                return conn
        return links.open(self, address) if links is not None and linked else None

    def offered(self, address: Address) -> None:
        """An answer from this address offers a link."""
        if self.links is not None:
            self.links.offered(address)

    async def connect(self, address: Address) -> Upstream:
        """A fresh connection. Raises OSError. Cancellation leaves no socket behind."""
        loop = asyncio.get_running_loop()
        conn = Upstream(self, address)
        try:
            if isinstance(address, TcpAddress):
                await loop.create_connection(lambda: conn, address.host, address.port)
            else:
                await loop.create_unix_connection(lambda: conn, address.path)
        except asyncio.CancelledError:
            if hasattr(conn, "transport"):
                conn.transport.abort()
            raise
        return conn

    def put(self, conn: Upstream, now: float) -> None:
        """Keeps a connection whose answer ended clean; closes it where the pool is full. `now`: the loop's clock."""
        left = conn.linked and (self.links is None or not self.links.up(conn.address))
        if self._closed or left or conn.transport.is_closing():
            conn.transport.abort()
            return
        idle = self._idle.get(conn.address)
        if idle is None:
            idle = self._idle[conn.address] = deque()
        conn.idle_since = now
        if conn.held:
            conn.hold_back(False)  # else its end would go unseen
        idle.append(conn)
        if len(idle) > self._limits.max_idle_per_address:
            idle.popleft().transport.abort()

    def forget(self, conn: Upstream) -> None:
        """Takes a dead connection out."""
        idle = self._idle.get(conn.address)
        if idle is not None:
            try:
                idle.remove(conn)
            except ValueError:
                return
            if not idle:
                del self._idle[conn.address]

    def close_address(self, address: Address) -> None:
        """Closes the idle connections to an address that is out of use; running exchanges are left alone."""
        self._drop_idle(address)
        if self.links is not None:
            self.links.leave(address)

    def _drop_idle(self, address: Address) -> None:
        for conn in self._idle.pop(address, ()):
            conn.transport.abort()

    def sweep(self, now: float) -> None:
        """Closes connections that were idle too long. `now` is the loop's clock."""
        oldest = now - self._limits.pool_idle_timeout_s
        for address in list(self._idle):
            idle = self._idle[address]
            while idle and idle[0].idle_since < oldest:
                idle.popleft().transport.abort()
            if not idle:
                del self._idle[address]

    @property
    def empty(self) -> bool:
        """True while no connection is kept."""
        return not self._idle

    def idle_count(self, address: Address) -> int:
        """Idle connections to `address`."""
        return len(self._idle.get(address, ()))

    def close(self) -> None:
        """Closes all idle connections; those still in use close when they are given back."""
        self._closed = True
        for address in list(self._idle):
            self._drop_idle(address)
