"""The router's side: one link per shim, made as soon as an answer of that shim offers it.

Until the link is up, while it is in doubt, when it is full and where there is none, requests take connections of their
own: an older shim never offers, and a newer router never asks.
"""

import asyncio
import logging
from typing import cast

from springtide.dataplane.messages import Address, TcpAddress
from springtide.dataplane.upstream import Sink, Upstream, UpstreamPool
from springtide.link.connection import Link
from springtide.link.counts import Counts
from springtide.link.frames import (
    FLOOD,
    LINK_PATH,
    LINK_PROTOCOL,
    LOST,
    MALFORMED,
    MAX_STREAM_ID,
    MAX_STREAMS,
    SILENT,
    UNREAD,
)
from springtide.link.pace import Pace
from springtide.link.stream import Stream

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_REFUSED_FOR_S = 30.0
_MAX_ANSWER_BYTES = 16 * 1024
_PING_S = 2.0
_PING_IDLE_S = 10.0
_DOUBT_S = 1.5
_IDLE_S = 60.0
_LOOK_S = 0.2
_DISTRUSTED = frozenset((FLOOD, MALFORMED, SILENT, UNREAD))
DEAD_S = 20.0


class StreamUpstream(Upstream):
    """A stream of a link as a connection of a pool. Events go to its sink with no call in between."""

    __slots__ = ("_sink", "_stream")

    def __init__(self, pool: UpstreamPool, address: Address, stream: Stream) -> None:
        self._stream = stream
        super().__init__(pool, address)
        self.linked = True
        self.transport = cast(asyncio.Transport, stream)

    @property
    def sink(self) -> Sink | None:
        return self._sink

    @sink.setter
    def sink(self, sink: Sink | None) -> None:
        self._sink = sink
        self._stream.on_events = self.events_received if sink is None else sink.upstream_events


class ClientLink(Link):
    """A link that opens streams."""

    def __init__(self, links: "Links", address: Address) -> None:
        super().__init__(links.pace, links.counts, str(address))
        self.address = address
        self._links = links
        self._asked_s = 0.0  # how long it had been silent when it was asked whether it lives
        self.used_at = self.loop.time()

    @property
    def usable(self) -> bool:
        """False while new requests had better go another way."""
        in_doubt = (self._asked_s > 0 and self.silent_s - self._asked_s >= _DOUBT_S) or self.stalled_s >= _DOUBT_S
        return not self.going and not in_doubt and len(self.streams) < MAX_STREAMS

    def open(self, pool: UpstreamPool) -> Upstream:
        """A new stream as a connection of the pool."""
        self.last_id += 1
        self.carried.opened += 1
        if self.last_id >= MAX_STREAM_ID:
            self.leave()
        stream = Stream(self, self.last_id)
        conn = stream.protocol = StreamUpstream(pool, self.address, stream)
        self.streams[stream.id] = stream
        return conn

    def on_goaway(self, reason: str) -> None:
        super().on_goaway(reason)
        if reason:  # it was not content
            self._links.distrust(self.address)
        self._links.forget(self)
        self.loop.call_soon(self._close_if_done)

    def lost(self, error: Exception, reason: str = LOST) -> None:
        if reason in _DISTRUSTED:
            self._links.distrust(self.address)
        super().lost(error, reason)

    def on_lost(self) -> None:
        self._links.forget(self)

    def check(self, now: float) -> None:
        """Pings what is silent, ends what is dead, leaves what is idle."""
        if self.look(now, self._links.dead_s):
            self._asked_s = 0.0
        elif self.closed:
            return
        elif not self._asked_s and self.silent_s >= (_PING_S if self.streams else _PING_IDLE_S):
            self._asked_s = self.silent_s
            self.ping()
        if self.streams:
            self.used_at = now
        elif now - self.used_at > _IDLE_S:
            self._links.forget(self)
            self.leave()


class _Asking(asyncio.Protocol):
    """A connection that asks for the link."""

    transport: asyncio.Transport

    def __init__(self, host: bytes) -> None:
        self._host = host
        self.data = b""
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """How long the answer's head is."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.transport.write(
            b"GET %b HTTP/1.1\r\nhost: %b\r\nconnection: upgrade\r\nupgrade: %b\r\n\r\n"
            % (LINK_PATH.encode(), self._host, LINK_PROTOCOL)
        )

    def data_received(self, data: bytes) -> None:
        self.data += data
        end = self.data.find(b"\r\n\r\n") + 4
        if self.answer.done():
            return
        if end >= 4:
            self.answer.set_result(end)
        elif len(self.data) > _MAX_ANSWER_BYTES:
            self.answer.set_exception(ConnectionError("the answer's head is too long"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionError("the connection was closed"))


def _accepts(head: bytes) -> bool:
    lines = head.lower().split(b"\r\n")
    return lines[0].startswith(b"http/1.1 101") and b"upgrade: " + LINK_PROTOCOL in lines


class Links:
    """The links of one router by the shim's address. `dead_s`: how long one may say or read nothing. Lives on one event
    loop, and looks after its links as long as there are some."""

    def __init__(self, dead_s: float = DEAD_S) -> None:
        self.dead_s = dead_s
        self.counts = Counts()
        self.pace = Pace(asyncio.get_running_loop(), 0.0)
        self._up: dict[Address, ClientLink] = {}
        self._leaving: set[ClientLink] = set()
        self._asking: dict[Address, asyncio.Task[None]] = {}
        self._refused: dict[Address, float] = {}
        self._looking: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ for pools

    def up(self, address: Address) -> bool:
        """True where requests to this address go over a link."""
        link = self._up.get(address)
        return link is not None and link.usable

    def open(self, pool: UpstreamPool, address: Address) -> Upstream:
        """A stream as a connection of `pool`. Only while `up`."""
        return self._up[address].open(pool)

    def offered(self, address: Address) -> None:
        """An answer from this address offers a link."""
        loop = self.pace.loop
        if address in self._up or address in self._asking or self._refused.get(address, 0.0) > loop.time():
            return
        self._asking[address] = loop.create_task(self._ask(loop, address))

    def leave(self, address: Address) -> None:
        """The address is out of use: its link closes when its streams are over."""
        self._refused.pop(address, None)
        asking = self._asking.pop(address, None)
        if asking is not None:
            asking.cancel()
        link = self._up.pop(address, None)
        if link is not None:
            self._leaving.add(link)
            link.leave()

    def _look(self) -> None:
        self._looking = None
        now = self.pace.loop.time()
        for link in (*self._up.values(), *self._leaving):
            link.check(now)
        self._look_again()

    def _look_again(self) -> None:
        if self._looking is None and not self.empty:
            self._looking = self.pace.loop.call_later(_LOOK_S, self._look)

    @property
    def empty(self) -> bool:
        """True while there is nothing to look after."""
        return not self._up and not self._leaving

    def close(self) -> None:
        """Ends all links."""
        for task in self._asking.values():
            task.cancel()
        for link in (*self._up.values(), *self._leaving):
            link.abort()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    # ------------------------------------------------------------ making them

    async def _ask(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        asking = _Asking(str(address).encode() if isinstance(address, TcpAddress) else b"localhost")
        try:
            async with asyncio.timeout(_CONNECT_S):
                if isinstance(address, TcpAddress):
                    await loop.create_connection(lambda: asking, address.host, address.port)
                else:
                    await loop.create_unix_connection(lambda: asking, address.path)
                end = await asking.answer
            head, rest = asking.data[:end], asking.data[end:]
            if not _accepts(head):
                raise ConnectionError(f"the answer was {head.splitlines()[0]!r}")
            if asking.transport.is_closing():
                raise ConnectionError("it accepted and closed the connection")
            link = ClientLink(self, address)
            asking.transport.set_protocol(link)
            link.connection_made(asking.transport)
            self._up[address] = link
            self._look_again()
            if rest:
                link.data_received(rest)
        except (OSError, TimeoutError) as error:
            self.distrust(address)
            log.info("no link to %s: %s", address, error)
            _drop(asking)
        except asyncio.CancelledError:
            _drop(asking)
            raise
        finally:
            if self._asking.get(address) is asyncio.current_task():
                del self._asking[address]

    def distrust(self, address: Address) -> None:
        """Whoever offers and then declines, or does not keep to what was agreed, is not asked with every answer."""
        self._refused[address] = self.pace.loop.time() + _REFUSED_FOR_S

    def forget(self, link: ClientLink) -> None:
        """A link takes no new streams any more."""
        if self._up.get(link.address) is link:
            del self._up[link.address]
        if link.closed:
            self._leaving.discard(link)
        else:
            self._leaving.add(link)


def _drop(asking: _Asking) -> None:
    if not asking.answer.done():
        asking.answer.cancel()
    elif not asking.answer.cancelled():
        asking.answer.exception()  # seen
    if hasattr(asking, "transport"):
        asking.transport.abort()
