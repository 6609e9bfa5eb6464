"""The real shim process behind a link: counts, refusals, drains and deaths are those of single connections."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from springtide.dataplane import INCARNATION_HEADER, OutcomeKind, RelayServer, Route, TcpAddress, parse_address
from springtide.link import Links
from tests.dataplane.fakes import Recorder, client, dechunk, post
from tests.link.chain import ended, until
from tests.nodeagent.conftest import marker, short_dir, start_shim  # noqa: F401 - fixtures
from tests.nodeagent.processes import RunningShim, eventually

Start = Callable[..., RunningShim]
SLOW = ("--decode-base-ms", "20")


class Linked:
    """A router's relay with a link to one shim."""

    def __init__(self, shim: RunningShim) -> None:
        self.shim = shim
        address = parse_address(shim.base.removeprefix("http://"))
        assert isinstance(address, TcpAddress)
        self.address = address
        self.incarnation = b"7"
        self.director = Recorder(lambda r: Route(address, headers=((INCARNATION_HEADER, self.incarnation),)))
        self.relay = RelayServer(self.director)
        self.links = Links()
        self.relay.pool.links = self.links
        self.port = 0

    async def count(self, name: str) -> int:
        """A figure of the shim's status."""
        return int((await self.shim.status()).get(name, 0))

    def holds(self, name: str, wanted: int) -> Callable[[], object]:
        """For `eventually`."""

        async def check() -> bool:
            return await self.count(name) == wanted

        return check

    def ask(self, tokens: int) -> bytes:
        """A streamed request."""
        body = b'{"prompt": "p", "stream": true, "max_tokens": %d}' % tokens
        return post(body=body, extra=b"content-type: application/json\r\n")


@contextlib.asynccontextmanager
async def linked(shim: RunningShim) -> AsyncIterator[Linked]:
    """With the link up."""
    w = Linked(shim)
    w.port = await w.relay.start("127.0.0.1", 0)
    try:
        async with client(w.port) as first:
            first.send(w.ask(1))
            await ended(first)
        await until(lambda: w.links.up(w.address))
        yield w
    finally:
        w.links.close()
        await w.relay.close()


async def test_counts_and_cancellation(start_shim: Start) -> None:  # noqa: F811
    """RT6 RT8 F6 F23: in-flight is the stream's lifetime over the link, too; a client that leaves is counted out."""
    async with linked(await start_shim(*SLOW).serving()) as w, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(w.port)) for _ in range(5)]
        for one in clients:
            one.send(w.ask(2000))
            await one.head()
        await eventually(w.holds("inFlight", 5))
        for one in clients[:3]:
            one.writer.transport.abort()
        await eventually(w.holds("inFlight", 2))
        assert await w.count("clientGoneTotal") == 3
        for one in clients[3:]:
            one.writer.transport.abort()
        await eventually(w.holds("inFlight", 0))
        async with client(w.port) as one:
            one.send(w.ask(3))
            assert (await ended(one)).endswith(b"data: [DONE]\n\n")
        assert await w.count("totalServed") == 2


async def test_only_routers_are_offered_a_link(start_shim: Start) -> None:  # noqa: F811
    """Rule 14: a client that names no incarnation sees an answer without any offer."""
    shim = await start_shim().serving()
    async with linked(shim) as w, client(w.address.port) as plain:
        plain.send(w.ask(2))
        assert b"upgrade" not in (await ended(plain)).lower()
        plain.send(post(body=b'{"prompt": "p", "max_tokens": 1}', extra=b"x-springtide-incarnation: 7\r\n"))
        assert b"\r\nupgrade: springtide-link/1\r\n" in await ended(plain)


async def test_refusals_and_drain(start_shim: Start) -> None:  # noqa: F811
    """RT5: incarnation, full, paused and draining refuse on a stream; a drain's deadline ends streams explicitly."""
    shim = await start_shim(*SLOW, maxInFlight=1).serving()
    async with linked(shim) as w, client(w.port) as running:

        async def refused() -> str:
            async with client(w.port) as one:
                one.send(w.ask(1))
                assert (await one.answer())[0] == 503
            return w.director.outcomes[-1].refusal

        w.incarnation = b"6"
        assert await refused() == "incarnation"
        w.incarnation = b"7"
        running.send(w.ask(5000))
        await running.head()
        assert await refused() == "full"
        await shim.admission("PAUSED")
        assert await refused() == "paused"
        await shim.admission("DRAINING", 2)
        assert await refused() == "draining"
        await shim.admission("DRAINING", 3, abortInFlight=True)
        payload, whole = dechunk(await running.rest())
        assert (b"worker_drained" in payload, whole) == (True, False)
        await eventually(w.holds("inFlight", 0))
        assert w.links.up(w.address)
        assert await w.count("refusedTotal") == 4


async def test_a_killed_shim(start_shim: Start, short_dir: Path) -> None:  # noqa: F811
    """F1 F3: every stream of the link ends as an upstream failure at once; new ones cannot connect."""
    shim = await start_shim(*SLOW).serving()
    async with linked(shim) as w, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(w.port)) for _ in range(4)]
        for one in clients:
            one.send(w.ask(5000))
            await one.head()
        os.kill(shim.process.pid, signal.SIGKILL)
        for payload, whole in map(dechunk, await asyncio.gather(*(one.rest() for one in clients))):
            assert (b"upstream_eof" in payload, whole) == (True, False)
        await eventually(lambda: shim.process.poll() is not None)  # its listening socket ends after its connections
        async with client(w.port) as late:
            late.send(w.ask(1))
            assert (await late.answer())[0] == 502
        kinds = [o.kind for o in w.director.outcomes[1:]]
        assert kinds == [OutcomeKind.UPSTREAM_EOF] * 4 + [OutcomeKind.CONNECT_FAILED]
        assert w.links.empty
