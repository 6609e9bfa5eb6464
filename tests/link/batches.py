"""A router's relay and a shim's with a link between them, without sockets: a test says what comes when."""

import asyncio
import random
from collections.abc import Iterator
from typing import cast

from springtide.dataplane import Limits
from springtide.dataplane.upstream import Upstream
from springtide.link import LinkServer
from springtide.link.client import ClientLink, Links
from springtide.link.frames import HEAD, HEAD_BYTES, KIND_SHIFT, LENGTH_MASK
from springtide.link.pace import Pace
from springtide.link.server import ServerLink
from tests.dataplane.fakes import post
from tests.dataplane.passes import ENGINE, NEVER_KEPT, One, World, passes, pipe_of, upstream_of
from tests.link.wires import Wire


class AtOnce(Pace):
    """A pace that keeps no reads."""

    skip = NEVER_KEPT


def frames_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Stream, kind and payload of each."""
    at = 0
    while at < len(data):
        number, word = HEAD.unpack_from(data, at)
        at += HEAD_BYTES
        size = word & LENGTH_MASK
        yield number, word >> KIND_SHIFT, data[at : at + size]
        at += size
    assert at == len(data)


class Routed(World):
    """The router's relay; its engines are the streams of `link`, to which the test gives bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.links = Links()
        self.link = ClientLink(self.links, ENGINE)
        self.wire = Wire()
        self.link.connection_made(cast(asyncio.BaseTransport, self.wire))
        self.links._up[ENGINE] = self.link
        self.server.pool.links = self.links

    def ask(self, body: bytes) -> One:
        """A request over the link."""
        client = self.client()
        client.data_received(post(body=body))
        conn = cast(Upstream, self.link.streams[self.link.last_id].protocol)
        return One(body, client, conn)

    async def close(self) -> None:
        self.links.close()
        await super().close()


class Shim(World):
    """The shim's relay behind a link, in front of engines on pipes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server.limits = self.server.pool._limits = Limits(max_idle_per_address=1000)
        self.behind = LinkServer(self.server, join_s=0.0)
        if not self.kept:
            self.behind.pace = AtOnce(self.server.loop, 0.0)
        self.link = ServerLink(self.behind, self.server, "router")
        self.wire = Wire()
        self.link.connection_made(cast(asyncio.BaseTransport, self.wire))

    def engines_ready(self, count: int) -> None:
        """Kept connections, so that no request waits for one."""
        for _ in range(count):
            self.engines.append(conn := upstream_of(self.server.pool))
            self.server.pool.put(conn, 0.0)

    def engine_of(self, body: bytes) -> Upstream:
        """The connection that this request went to."""
        (conn,) = [x for x in self.engines if bytes(pipe_of(x).written).endswith(b"\r\n\r\n" + body)]
        return conn

    async def close(self) -> None:
        self.link.abort()
        await super().close()


class Both:
    """Both, and the wires between them. `rng`: how their bytes are cut into reads; None: one frame, one read."""

    def __init__(self, kept: bool, rng: random.Random | None = None) -> None:
        self.router, self.shim = Routed(kept), Shim(kept)
        self.rng = rng

    def _cut(self, data: bytes) -> Iterator[bytes]:
        if self.rng is None:
            for number, kind, payload in frames_of(data):
                yield HEAD.pack(number, kind << KIND_SHIFT | len(payload)) + payload
            return
        at = 0
        while at < len(data):
            size = self.rng.choice((5, 40, 400, 4000, 100_000))
            yield data[at : at + size]
            at += size

    async def pump(self) -> None:
        """Carries what was written on either side until nothing is."""
        quiet = 0
        while quiet < 3:
            up, down = self.router.wire.take(), self.shim.wire.take()
            quiet = 0 if up or down else quiet + 1
            for read in self._cut(up):
                self.shim.link.data_received(read)
            for read in self._cut(down):
                self.router.link.data_received(read)
                if self.rng is None or self.rng.random() < 0.2:
                    await passes(2)
            await passes(2)

    async def ask(self, count: int) -> list[One]:
        """Streams: the router's client, with the shim's engine."""
        self.shim.engines_ready(count)
        ones = [self.router.ask(b"%d" % n) for n in range(count)]
        await self.pump()
        return [One(one.body, one.client, self.shim.engine_of(one.body)) for one in ones]

    async def close(self) -> None:
        await self.router.close()
        await self.shim.close()
