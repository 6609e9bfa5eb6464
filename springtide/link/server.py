"""The shim's side: a connection of the data port that asks for it becomes a link. Each of its streams is served as a
connection of its own would be: same director, same limits, same answers.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from springtide.dataplane.inbox import Inbox
from springtide.dataplane.messages import Request
from springtide.dataplane.server import ClientConnection, RelayServer
from springtide.link.connection import Link
from springtide.link.counts import Counts
from springtide.link.frames import LINK_PATH, LINK_PROTOCOL, MAX_STREAMS, RESET, frame
from springtide.link.pace import JOIN_S, Pace
from springtide.link.stream import Stream

DEAD_S = 45.0
"""Routers ping a silent link every ten seconds."""
_UNUSED_S = 180.0
"""Routers leave a link that has no stream for a minute."""
_PEER = "link"
_SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: %b\r\n\r\n" % LINK_PROTOCOL


def is_linked(request: Request) -> bool:
    """Whether a request came over a link."""
    return request.client.startswith(_PEER)


class StreamConnection(ClientConnection):
    """A stream of a link as one of the server's connections."""

    __slots__ = ()
    linked = True

    @property
    def inbox(self) -> Inbox:
        return cast(Stream, self.transport).link.pace

    def steady_write(self) -> Callable[[bytes], None]:
        return cast(Stream, self.transport).write_events  # on the path of every token: no call in between

    def pass_on(self, data: bytes, count: int) -> None:
        cast(Stream, self.transport).write_events(data, count)


class ServerLink(Link):
    """A link whose streams the peer opens."""

    def __init__(self, links: "LinkServer", server: RelayServer, peer: str) -> None:
        super().__init__(links.pace, links.counts, peer)
        self._server = server
        self._dead_s = links.dead_s
        self._used_at = self.loop.time()
        self.peer = (f"{_PEER}:{peer}", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.pace.listen(transport)

    def opened(self, number: int) -> Stream | None:
        self.last_id = number
        if self.going or len(self.streams) >= MAX_STREAMS:
            self.carried.refused += 1
            self.send(frame(RESET, number))
            return None
        self.carried.opened += 1
        stream = self.streams[number] = Stream(self, number)
        connection = stream.protocol = StreamConnection(self._server)
        connection.connection_made(cast(asyncio.BaseTransport, stream))
        return stream

    def on_lost(self) -> None:
        self._server.connections.discard(self)

    # ------------------------------------------------------------ as one of the server's connections

    def check(self, now: float) -> None:
        """A router that is gone without a word is gone; who has no use for a link needs none."""
        self.look(now, self._dead_s)
        if self.streams:
            self._used_at = now
        elif now - self._used_at > _UNUSED_S:
            self.leave()

    def close_if_idle(self) -> None:
        """The server is closing: running requests finish, the rest goes elsewhere."""
        self.leave()


class LinkServer:
    """Takes links for one relay. Made early in a process's life: see `pace._incoming`. `dead_s`: how long a router may
    say or read nothing."""

    def __init__(self, server: RelayServer, join_s: float = JOIN_S, dead_s: float = DEAD_S) -> None:
        self._server = server
        self.dead_s = dead_s
        self.counts = Counts()
        self.pace = Pace(asyncio.get_running_loop(), join_s)
        server.inboxes.append(self.pace)

    def upgrade(self, connection: ClientConnection, request: Request) -> bool:
        """Takes over a connection whose request asks for it. False: it is an ordinary request."""
        server = self._server
        if request.path != LINK_PATH or request.header(b"upgrade") != LINK_PROTOCOL or server.closing:
            return False
        transport = connection.transport
        link = ServerLink(self, server, connection.peer)
        rest, connection.buffer = connection.buffer, b""
        server.connections.discard(connection)
        server.connections.add(link)  # type: ignore[arg-type]  # its sweep looks after links, too
        transport.write(_SWITCH)
        transport.set_protocol(link)
        link.connection_made(transport)
        if rest:
            link.data_received(rest)
        return True
