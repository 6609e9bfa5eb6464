"""What links have carried, as both of their sides count it."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from nodeagent.metrics import AgentMetrics
from nodeagent.shim.state import link_counts
from springtide.link.counts import Carried, Seen
from springtide.link.exposed import LinkFamilies
from tests.dataplane.fakes import DONE, client, post, says, stream_of, upstream
from tests.link.chain import chain, ended, until
from tests.link.wires import ends


async def test_both_sides_count_the_same() -> None:
    """CM7: bytes and frames of one side's one direction are those of the other's; streams are counted once."""
    async with upstream(says(stream_of(5))) as engine, chain(engine) as c:
        await c.linked()
        for _ in range(3):
            async with client(c.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(DONE)
        here, there = c.links.counts, c.links_behind.counts
        await until(lambda: here.seen().carried.bytes_in == there.seen().carried.bytes_out)
        await until(lambda: here.seen().carried.bytes_out == there.seen().carried.bytes_in)
        router, shim = here.seen(), there.seen()
        assert (router.links, router.streams) == (shim.links, shim.streams) == (1, 1)
        assert (router.carried.frames_in, router.carried.frames_out) == (
            shim.carried.frames_out,
            shim.carried.frames_in,
        )
        assert router.carried.frames_in >= 3
        assert (router.carried.opened, shim.carried.opened) == (1, 1)
        (link,) = c.links._up.values()
        link.abort()
        await until(lambda: there.seen().links == 0)
        assert (here.seen().ended, there.seen().ended) == ({"aborted": 1}, {"lost": 1})
        assert here.seen().carried.bytes_in == router.carried.bytes_in  # what was carried stays counted


async def test_a_link_that_is_left_is_counted_once() -> None:
    opening, _, _, _ = ends()
    stream, _ = opening.open()
    opening.leave()
    stream.abort()
    await until(lambda: opening.closed)
    opening.connection_lost(None)
    assert opening.counts.seen().ended == {"left": 1}


def text_of(families: LinkFamilies) -> set[str]:
    class Shown(Collector):
        def collect(self) -> list[Metric]:
            return list(families)

    registry = CollectorRegistry()
    registry.register(Shown())
    return set(generate_latest(registry).decode().splitlines())


SEEN = Seen(2, 7, Carried(1, 20, 3, 40, 5, 6), {"lost": 1, "unread": 2})


def test_what_prometheus_sees() -> None:
    families = LinkFamilies("x_")
    families.add((), SEEN)
    assert {
        "x_links 2.0",
        "x_link_streams 7.0",
        'x_link_bytes_total{direction="in"} 20.0',
        'x_link_frames_total{direction="in"} 1.0',
        'x_link_bytes_total{direction="out"} 40.0',
        'x_link_frames_total{direction="out"} 3.0',
        "x_link_streams_opened_total 5.0",
        "x_link_streams_refused_total 6.0",
        'x_links_ended_total{reason="lost"} 1.0',
        'x_links_ended_total{reason="unread"} 2.0',
    } <= text_of(families)


def test_an_agent_shows_its_shims() -> None:
    """By pool and worker, from the shim's own message."""
    metrics = AgentMetrics()
    metrics.links = {("p", "w"): link_counts(SEEN)}
    text = generate_latest(metrics.registry).decode()
    assert 'springtide_agent_link_bytes_total{direction="out",pool="p",worker="w"} 40.0' in text
    assert 'springtide_agent_links_ended_total{pool="p",reason="unread",worker="w"} 2.0' in text
