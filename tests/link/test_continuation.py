"""Links that are lost under streams of a router: each stream goes on elsewhere, exact (RT5, RT6, F1, F3)."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from router.config import Timeouts
from router.http_front import HttpFront
from router.upstream import Continuing, Dispatcher
from springtide.dataplane import RelayServer, Route, TcpAddress
from springtide.link import OFFER, LinkServer, is_linked
from springtide.link.server import ServerLink
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingTable
from tests.continuation.test_exact import CHAT, TEXT, request
from tests.continuation.world import _sim, ask, same
from tests.dataplane.fakes import Recorder
from tests.link.chain import until

WORKERS = 4


@dataclass
class Linked:
    """A router and its workers' shims."""

    port: int
    dispatcher: Dispatcher
    shims: list[RelayServer] = field(default_factory=list)

    def links(self) -> list[ServerLink]:
        """The shims' ends of all links."""
        every: list[object] = [x for shim in self.shims for x in shim.connections]
        return [x for x in every if isinstance(x, ServerLink)]

    @property
    def in_flight(self) -> int:
        return sum(seat.own for seat in self.dispatcher.admission.fleet.all())


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[Linked]:
    """Four shims in front of one simulated engine, and a router that has a link to each."""
    async with contextlib.AsyncExitStack() as stack:
        engine = TcpAddress("127.0.0.1", await _sim(stack, ("--decode-base-ms", "2")))
        dispatcher = Dispatcher(Timeouts(), 20, continuing=Continuing(max_continuations=100))
        stack.callback(dispatcher.close)
        plain, offering = Route(engine), Route(engine, reply_headers=OFFER)
        world = Linked(0, dispatcher)
        table = {}
        for number in range(WORKERS):
            shim = RelayServer(Recorder(lambda r: plain if is_linked(r) else offering))
            shim.upgrades = LinkServer(shim).upgrade
            port = await shim.start("127.0.0.1", 0)
            stack.push_async_callback(shim.close)
            world.shims.append(shim)
            table[f"w{number}"] = RoutedWorker(f"w{number}", "p", 1, f"127.0.0.1:{port}")
        pool = RoutedPool("p", "m", max_waiting=1000, waiting_timeout_s=20.0, max_workers=WORKERS, engine="sim")
        dispatcher.snapshot(RoutingTable("s", 1, {"p": pool}, table))
        relay = RelayServer(HttpFront(dispatcher))
        dispatcher.use(relay.pool)
        world.port = await relay.start("127.0.0.1", 0)
        stack.push_async_callback(relay.close)
        await asyncio.gather(*(ask(world.port, TEXT, request(TEXT, max_tokens=30)) for _ in range(4 * WORKERS)))
        await until(lambda: len(world.links()) == WORKERS)
        yield world


async def test_links_cut_under_running_streams() -> None:
    """Sixty streams while links are cut at random: all are what they are undisturbed, nothing is left behind."""
    rng = random.Random(7)
    async with linked() as w:
        asked = [
            (path, request(path, n, max_tokens=40, stream_options={"include_usage": True}))
            for n in range(30)
            for path in (CHAT, TEXT)
        ]
        undisturbed = await asyncio.gather(*(ask(w.port, path, body) for path, body in asked))
        assert all(told.done for told in undisturbed)
        cut = 0

        async def cutting() -> None:
            nonlocal cut
            while True:
                await asyncio.sleep(0.02)
                links = [link for link in w.links() if link.streams]
                if links:
                    rng.choice(links).transport.abort()
                    cut += 1

        blows = asyncio.ensure_future(cutting())
        again = await asyncio.gather(*(ask(w.port, path, body) for path, body in asked))
        blows.cancel()
        assert cut >= 3
        continued = sum(
            sample.value
            for metric in w.dispatcher.metrics.continuations.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
        assert continued >= 3
        for told, before in zip(again, undisturbed, strict=True):
            same(told, before)
        assert w.in_flight == 0
        await until(lambda: not any(shim.exchanges for shim in w.shims))
