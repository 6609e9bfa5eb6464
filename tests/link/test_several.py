"""One shim and several processes of a router; and a shim that is another one behind the same address."""

import asyncio

from springtide.dataplane import RelayServer, Route
from springtide.link import OFFER, Links, LinkServer
from tests.dataplane.fakes import DONE, SSE_HEAD, Peer, Recorder, chunk, client, event, post, relay, says, upstream
from tests.dataplane.fakes import stream_of as stream
from tests.link.chain import chain, ended, until


async def test_each_process_of_a_router_has_a_link_of_its_own() -> None:
    """RT5: one of them dies; streams of the other's link do not notice."""
    hold = asyncio.Event()

    async def half(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await hold.wait()
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    async with upstream(says(stream(1)), says(stream(1)), half) as engine, chain(engine) as c:
        await c.linked()
        links = Links()
        async with relay(Recorder(lambda request: Route(c.shim_address))) as (other, port):
            other.pool.links = links
            async with client(port) as first:
                first.send(post())
                await ended(first)
            await until(lambda: links.up(c.shim_address))
            async with client(port) as mine, client(c.port) as theirs:
                for one in (mine, theirs):
                    one.send(post())
                    await one.head()
                assert c.links_behind.counts.seen().links == 2
                c.links.close()
                await until(lambda: c.links_behind.counts.seen().links == 1)
                hold.set()
                assert (await mine.chunks()).endswith(DONE)
            links.close()


async def test_another_shim_behind_the_same_address() -> None:
    """F1 RT5: its link is a new one, made by its own offer."""
    async with upstream(says(stream(1))) as engine, chain(engine) as c:
        await c.linked()
        (old,) = c.links._up.values()
        await c.shim.close()
        await until(lambda: old.closed)
        behind = RelayServer(Recorder(lambda request: Route(engine.address, reply_headers=OFFER)))
        taken = LinkServer(behind)
        behind.upgrades = taken.upgrade
        await behind.start("127.0.0.1", c.shim_address.port)
        try:
            for _ in range(2):
                async with client(c.port) as one:
                    one.send(post())
                    assert (await ended(one)).endswith(DONE)
                await until(lambda: c.links.up(c.shim_address))
            assert taken.counts.seen().carried.opened == 1
        finally:
            c.links.close()
            await behind.close()
