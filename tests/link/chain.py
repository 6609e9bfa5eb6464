"""A router's relay and a shim's relay on real sockets, with a link between them, in front of a scripted engine."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from springtide.dataplane import Limits, Outcome, RelayServer, Reply, Request, Retry, Route, TcpAddress
from springtide.link import OFFER, Links, LinkServer, is_linked
from tests.dataplane.fakes import Client, Recorder, Upstream, client, post, relay
from tests.dataplane.fakes import until as until_within


async def until(condition: Callable[[], object], bound_s: float = 30.0) -> None:
    """As long as a busy machine may take."""
    await until_within(condition, bound_s)


@dataclass
class Chain:
    """`router` asks `shim` asks `engine`."""

    router: RelayServer
    port: int
    links: Links
    shim: RelayServer
    shim_address: TcpAddress
    engine: Upstream
    outcomes: list[Outcome]
    """Of the router's attempts."""
    ended: list[Outcome]
    """Of the shim's."""
    links_behind: LinkServer
    """The shim's."""
    over_link: list[bool] = field(default_factory=list)
    """Of each request at the shim: whether it came over the link."""

    async def linked(self) -> None:
        """Makes a first request, with whose answer the shim offers its link, and waits for it to be up."""
        async with client(self.port) as first:
            first.send(post())
            await ended(first)
        await until(lambda: self.links.up(self.shim_address))


async def ended(one: Client) -> bytes:
    """The whole answer, whatever its framing."""
    head = await one.head()
    if b"transfer-encoding: chunked" in head:
        return head + await one.chunks()
    length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
    return head + await one.exactly(length)


@contextlib.asynccontextmanager
async def chain(
    engine: Upstream,
    *,
    offers: bool = True,
    asks: bool = True,
    limits: Limits | None = None,
    refuse: Callable[[Request], Reply | None] = lambda request: None,
    retry: Callable[[Outcome], Retry | None] | None = None,
    route: Callable[[TcpAddress], Route] = Route,
    dead_s: float = 20.0,
) -> AsyncIterator[Chain]:
    """`offers`: the shim knows links; `asks`: the router does."""
    over_link: list[bool] = []

    def direct(request: Request) -> object:
        over_link.append(is_linked(request))
        reply_headers = () if is_linked(request) or not offers else OFFER
        return refuse(request) or Route(engine.address, key="counted", reply_headers=reply_headers)

    behind = Recorder(direct)
    async with relay(behind) as (shim, shim_port):
        links_behind = LinkServer(shim)
        if offers:
            shim.upgrades = links_behind.upgrade
        address = TcpAddress("127.0.0.1", shim_port)
        links = Links(dead_s)
        before = Recorder(lambda request: route(address), retry)
        async with relay(before, limits) as (router, port):
            if asks:
                router.pool.links = links
            try:
                outcomes = before.outcomes, behind.outcomes
                yield Chain(router, port, links, shim, address, engine, *outcomes, links_behind, over_link)
            finally:
                links.close()
