"""The link end to end: what goes over it is what would go over a connection of its own."""

import asyncio
import itertools
import logging
import random

import pytest

from springtide.dataplane import Limits, OutcomeKind, Retry, Route, error_reply
from springtide.link import Links
from springtide.link import client as link_client
from springtide.link.frames import DATA, GOAWAY, LINK_PATH, RESET, WINDOW_BYTES, frame
from springtide.link.stream import Stream
from tests.dataplane.fakes import (
    DONE,
    LAST,
    SSE_HEAD,
    Peer,
    chunk,
    client,
    dechunk,
    event,
    post,
    says,
    stream_of,
    upstream,
)
from tests.link.chain import chain, ended, until

ERROR = b'data: {"error":{"message":"rank died","type":"InternalServerError","code":500}}\n\n'
BIG = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


async def test_streams_share_one_connection_once_it_is_offered() -> None:
    """RT1 RT5: the first answer offers the link; from then on requests and their streams go over it, byte for byte."""
    async with upstream(says(stream_of(5))) as engine, chain(engine) as c:
        await c.linked()
        for _ in range(3):
            async with client(c.port) as one:
                one.send(post())
                answer = await ended(one)
                assert answer.endswith(b'data: {"i": 4}\n\ndata: [DONE]\n\n')
                assert b"upgrade" not in answer.lower()
        assert c.over_link == [False, True, True, True]
        await until(lambda: len(c.ended) == 4)
        assert [o.kind for o in c.outcomes + c.ended] == [OutcomeKind.OK] * 8
        assert len(c.shim.connections) <= 3  # the link, its one stream that is kept, and what the first request had


async def test_many_at_once() -> None:
    """RT5: a hundred and twenty streams on one link, each whole and its own."""

    async def number(peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        for i in range(5):
            await peer.send(chunk(b'data: {"of": "%b", "i": %d}\n\n' % (peer.body, i)))
            await asyncio.sleep(0)
        await peer.send(chunk(DONE) + LAST)

    async with upstream(number) as engine, chain(engine) as c:
        await c.linked()

        async def ask(n: int) -> None:
            async with client(c.port) as one:
                one.send(post(body=b"%d" % n))
                whole = b"".join(b'data: {"of": "%d", "i": %d}\n\n' % (n, i) for i in range(5)) + DONE
                assert (await ended(one)).endswith(b"\r\n\r\n" + whole)

        await asyncio.gather(*(ask(n) for n in range(120)))
        assert all(c.over_link[1:])
        assert not c.router.exchanges
        await until(lambda: not c.shim.exchanges)


@pytest.mark.parametrize(
    "answer",
    [
        BIG % 5 + b"hello",
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 Oops\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
        SSE_HEAD + chunk(event(0)) + chunk(ERROR) + chunk(DONE) + LAST,
        SSE_HEAD + chunk(b": ping\n\n") + chunk(event(0) + DONE) + LAST,
        stream_of(3),
    ],
)
async def test_same_answers_as_without(answer: bytes) -> None:
    """RT5 RT6 F1: short answers, errors, an engine's error event and an early end are the same over the link."""
    seen = []
    for linked in (False, True):
        script = says(stream_of(1)), says(answer)
        async with upstream(*script) as engine, chain(engine, offers=linked) as c:
            if linked:
                await c.linked()
            else:
                async with client(c.port) as first:
                    first.send(post())
                    await ended(first)
            async with client(c.port) as one:
                one.send(post(extra=b"connection: close\r\n"))
                told = await one.rest()
            await until(lambda c=c: len(c.outcomes) == 2)  # type: ignore[misc]
            await until(lambda c=c: len(c.ended) == 2)  # type: ignore[misc]
            assert c.over_link[1] is linked
            last = c.outcomes[1]
            seen.append((told, last.kind, last.status, last.events, c.ended[1].kind))
    assert seen[0] == seen[1]


async def test_an_early_end_is_explicit() -> None:
    """RT5: an event stream without [DONE] ends with an error over the link, too."""
    script = says(stream_of(1)), says(SSE_HEAD + chunk(event(0)) + LAST)
    async with upstream(*script) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as one:
            one.send(post(extra=b"connection: close\r\n"))
            assert b"upstream_eof" in await one.rest()
        assert c.outcomes[1].kind in (OutcomeKind.UPSTREAM_ERROR_EVENT, OutcomeKind.ERROR_STATUS)


async def test_every_split_of_an_answer() -> None:
    """RT5: wherever the engine's writes are cut, the client has the same events."""
    whole = SSE_HEAD + chunk(event(0)) + chunk(event(1)) + chunk(DONE) + LAST
    cuts = range(1, len(whole), 3)
    scripts = [says(whole[:cut], whole[cut:]) for cut in cuts]
    async with upstream(says(whole), *scripts) as engine, chain(engine) as c:
        await c.linked()
        for _ in cuts:
            async with client(c.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(b"\r\n\r\n" + event(0) + event(1) + DONE)
        assert all(c.over_link[1:])


@pytest.mark.parametrize("linked", [True, False], ids=["link", "no link"])
async def test_several_chunks_in_one_read(linked: bool) -> None:
    """RT5 F3: chunks that an engine wrote one by one and that are read together are passed on all, with the end too.

    Whatever is together in one read after the first event: 200 random groupings, cut between chunks and within them.
    """
    rng = random.Random(9)
    parts = [SSE_HEAD, chunk(event(0)), *(chunk(event(n)) for n in range(1, 9)), chunk(DONE), LAST]
    expected = b"".join(event(n) for n in range(9)) + DONE
    scripts = []
    for _ in range(200):
        whole = b"".join(parts)
        edges = sorted({len(b"".join(parts[:n])) for n in rng.sample(range(1, len(parts)), rng.randint(1, 5))})
        if rng.random() < 0.3:
            edges = sorted({*edges, rng.randrange(1, len(whole))})
        scripts.append(says(*(whole[a:b] for a, b in itertools.pairwise([0, *edges, len(whole)]))))
    async with upstream(says(stream_of(1)), *scripts) as engine, chain(engine, offers=linked) as c:
        if linked:
            await c.linked()
        else:
            async with client(c.port) as first:
                first.send(post())
                await ended(first)
        for _ in scripts:
            async with client(c.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(b"\r\n\r\n" + expected)
        assert all(over is linked for over in c.over_link[1:])


async def test_a_client_that_leaves_aborts_the_engine_at_once() -> None:
    """RT8: the cancellation passes the link; the engine's connection is cut, and the link's other streams go on."""

    async def endless(peer: Peer) -> None:
        await peer.send(SSE_HEAD)
        i = 0
        while not peer.writer.is_closing():
            await peer.send(chunk(event(i)))
            await asyncio.sleep(0.002)
            i += 1

    async with upstream(says(stream_of(1)), endless) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as staying:
            staying.send(post())
            await staying.head()
            before = engine.hangups
            async with client(c.port) as leaving:
                leaving.send(post())
                await leaving.head()
                assert len(c.shim.exchanges) == 2
            await until(lambda: engine.hangups == before + 1 and len(c.shim.exchanges) == 1)
            assert c.ended[-1].kind is OutcomeKind.CLIENT_GONE
            for _ in range(3):
                assert await staying.reader.read(65536)


async def test_a_slow_client_beside_fast_ones() -> None:
    """What nobody reads stays at the engine: buffers are bounded, and the other streams of the link are whole."""
    sent = 0
    size = 64 * 1024 * 1024

    async def flood(peer: Peer) -> None:
        nonlocal sent
        if peer.body != b"slow":
            await says(stream_of(200))(peer)
            return
        await peer.send(BIG % size)
        piece = bytes(64 * 1024)
        for _ in range(size // len(piece)):
            await peer.send(piece)
            sent += len(piece)

    async with upstream(says(stream_of(1)), flood) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as slow:
            slow.send(post(body=b"slow"))
            await slow.head()
            await until(lambda: any(s._held for s in _streams(c.links)))
            assert sent < size
            for _ in range(20):
                async with client(c.port) as fast:
                    fast.send(post(body=b"fast"))
                    assert (await ended(fast)).endswith(DONE)
            (stream,) = [s for s in _streams(c.links) if s._held]
            assert sum(map(len, stream._held)) <= WINDOW_BYTES
            assert sent < size
            assert all(c.over_link[1:])
            assert len(await asyncio.wait_for(slow.reader.readexactly(size), 60)) == size


def _streams(links: Links) -> list[Stream]:
    return [stream for link in links._up.values() for stream in link.streams.values()]


async def test_large_requests_do_not_stand_in_the_way() -> None:
    """A body of many megabytes goes in windows; a short request sent after it is answered before it."""
    async with upstream(says(BIG % 2 + b"ok")) as engine, chain(engine) as c:
        await c.linked()
        order = []

        async def ask(size: int) -> None:
            async with client(c.port) as one:
                one.send(post(body=bytes(size)))
                assert (await asyncio.wait_for(one.reader.readexactly(len(BIG % 2) + 2), 60)).endswith(b"ok")
                order.append(size)

        await asyncio.gather(ask(6 * 1024 * 1024), ask(10))
        assert {len(peer.body) for peer in engine.requests} == {2, 10, 6 * 1024 * 1024}
        assert order == [10, 6 * 1024 * 1024]


@pytest.mark.parametrize(("offers", "asks"), [(False, True), (True, False)])
async def test_old_and_new_together(offers: bool, asks: bool) -> None:
    """Rule 14: a shim or a router that knows no link works with one that does, one connection for each stream."""
    async with upstream(says(stream_of(3))) as engine, chain(engine, offers=offers, asks=asks) as c:
        for _ in range(5):
            async with client(c.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(DONE)
        assert not any(c.over_link)
        assert not c.links.up(c.shim_address)


async def test_an_offer_that_is_not_kept() -> None:
    """A shim that offers and then declines is asked once, and serves all the same."""
    async with upstream(says(stream_of(3))) as engine, chain(engine) as c:
        c.shim.upgrades = None
        for _ in range(5):
            async with client(c.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(DONE)
        await until(lambda: c.shim_address in c.links._refused)
        assert not c.links.up(c.shim_address)
        # The question came to the shim's director as an ordinary GET.
        assert len(engine.requests) <= 6


async def test_a_lost_link_is_an_upstream_that_failed() -> None:
    """RT5 RT6: every stream on it ends as that of a connection of its own would; then a new link is made."""
    hold = asyncio.Event()

    async def half(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await hold.wait()

    async with upstream(says(stream_of(1)), half, half, says(stream_of(2))) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as one, client(c.port) as two:
            for each in (one, two):
                each.send(post())
                await each.head()
            (link,) = c.links._up.values()
            link.transport.abort()
            for each in (one, two):
                payload, whole = dechunk(await each.rest())
                assert payload.startswith(event(0))
                assert (b"upstream_eof" in payload, whole) == (True, False)
        assert [o.kind for o in c.outcomes[1:]] == [OutcomeKind.UPSTREAM_EOF] * 2
        await until(lambda: len(c.ended) == 3)  # the engine's requests were aborted
        assert [o.kind for o in c.ended[1:]] == [OutcomeKind.CLIENT_GONE] * 2
        hold.set()
        await c.linked()


async def test_a_link_lost_before_the_first_token_costs_nothing() -> None:
    """RT5: the request goes again over a connection of its own, unseen by the client."""

    async def silent(peer: Peer) -> None:
        await peer.closed()
        peer.writer.close()

    async with upstream(says(stream_of(1)), silent, says(stream_of(2))) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as one:
            one.send(post())
            await until(lambda: len(engine.requests) == 2)
            (link,) = c.links._up.values()
            link.transport.abort()
            assert (await ended(one)).endswith(event(1) + DONE)
        assert c.over_link == [False, True, False]


async def test_a_refusal_passes() -> None:
    """A refusal is one over the link, too: the request goes elsewhere; the link stays."""
    refusals = 1

    def refuse(request: object) -> object:
        nonlocal refusals
        if not c.links.up(c.shim_address) or not refusals:
            return None
        refusals -= 1
        return error_reply(
            503, "full", "service_unavailable_error", "full", headers=((b"x-springtide-refusal", b"full"),)
        )

    def retry(outcome: object) -> Retry | None:
        return Retry(Route(c.shim_address)) if outcome.kind is OutcomeKind.REFUSED else None  # type: ignore[attr-defined]

    async with upstream(says(stream_of(2))) as engine, chain(engine, refuse=refuse, retry=retry) as c:  # type: ignore[arg-type]
        await c.linked()
        async with client(c.port) as one:
            one.send(post())
            assert (await ended(one)).endswith(DONE)
        assert [(o.kind, o.refusal) for o in c.outcomes[1:]] == [(OutcomeKind.REFUSED, "full"), (OutcomeKind.OK, "")]
        assert c.over_link[1:] == [True, True]


async def test_a_closing_shim_cuts_explicitly_and_takes_nothing_new() -> None:
    """RT5: running streams end with an explicit error event, the link goes away, new requests find nobody."""
    hold = asyncio.Event()

    async def half(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await hold.wait()

    async with upstream(says(stream_of(1)), half) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as one, client(c.port) as late:
            one.send(post())
            await one.head()
            closing = asyncio.ensure_future(c.shim.close(drain_s=0.3))
            await until(lambda: not c.links.up(c.shim_address))
            late.send(post(extra=b"connection: close\r\n"))
            assert (await late.rest()).startswith((b"HTTP/1.1 502", b"HTTP/1.1 503"))
            payload, whole = dechunk(await one.rest())
            assert (b"shutting_down" in payload, whole) == (True, False)
            assert await closing == 1
        hold.set()
        await until(lambda: c.links.empty)


async def test_a_silent_shim_is_doubted_then_dead() -> None:
    """RT11: new requests take connections of their own while a ping is unanswered; then the link's streams end."""
    hold = asyncio.Event()

    async def half(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await hold.wait()

    async with upstream(says(stream_of(1)), half, says(stream_of(2))) as engine, chain(engine, dead_s=5.0) as c:
        await c.linked()
        async with client(c.port) as one:
            one.send(post())
            await one.head()
            (link,) = c.links._up.values()
            (behind,) = [x for x in c.shim.connections if not hasattr(x, "exchange")]
            behind.transport.pause_reading()  # it takes nothing and says nothing
            await until(lambda: not c.links.up(c.shim_address), 30)
            assert c.links._leaving == set()
            async with client(c.port) as two:
                two.send(post())
                assert (await ended(two)).endswith(DONE)
            assert c.over_link[-1] is False
            payload, _ = dechunk(await asyncio.wait_for(one.reader.read(-1), 30))
            assert b"upstream_eof" in payload
            assert link.closed
        hold.set()


async def test_a_full_link_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams beyond the bound of one link take connections of their own."""
    monkeypatch.setattr(link_client, "MAX_STREAMS", 3)
    hold = asyncio.Event()

    async def wait(peer: Peer) -> None:
        await hold.wait()
        await peer.send(stream_of(1))

    async with upstream(says(stream_of(1)), wait) as engine, chain(engine) as c:
        await c.linked()

        async def ask() -> None:
            async with client(c.port) as one:
                one.send(post())
                assert (await ended(one)).endswith(DONE)

        asking = [asyncio.ensure_future(ask()) for _ in range(5)]
        await until(lambda: len(engine.requests) == 6)
        hold.set()
        await asyncio.gather(*asking)
        assert sorted(c.over_link[1:]) == [False, False, True, True, True]


async def test_limits_hold_on_a_stream() -> None:
    """A head that is too long, and no request at all, are refused on a stream as on a connection."""
    async with upstream(says(stream_of(1))) as engine, chain(engine, limits=Limits(max_head_bytes=256 * 1024)) as c:
        await c.linked()
        async with client(c.port) as one:
            one.send(post(extra=b"x-long: %b\r\nconnection: close\r\n" % bytes(b"a" * 70_000)))
            assert (await one.rest()).startswith(b"HTTP/1.1 431")
        assert c.links.up(c.shim_address)


async def test_a_hostile_peer_harms_only_its_own_link(caplog: pytest.LogCaptureFixture) -> None:
    """Frames and requests broken at random: the worst is the end of that link, and the shim serves on."""
    rng = random.Random(11)
    ask = f"GET {LINK_PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: springtide-link/1\r\n\r\n".encode()
    good = b"".join(frame(DATA, n, post()[:20]) + frame(DATA, n, post()[20:]) for n in range(1, 9)) + frame(RESET, 3)
    async with upstream(says(stream_of(3))) as engine, chain(engine) as c:
        told_why = 0
        for _ in range(25):
            data = bytearray(good)
            for _ in range(rng.randint(0, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.choice((0, 1, 9))] = rng.randbytes(rng.choice((0, 1, 5)))
            async with client(c.shim_address.port) as peer:
                peer.send(ask + data)
                assert (await peer.head()).startswith(b"HTTP/1.1 101")
                peer.send(b"\xff" * 140_000)  # whatever frame is open, the next one is none
                try:
                    told_why += bytes([0, 0, 0, 0, GOAWAY]) in await peer.rest()
                except ConnectionError:
                    pass  # its own bytes came too late to be read
        assert told_why > 4
        await until(lambda: not c.shim.exchanges)
        async with client(c.port) as one:
            one.send(post())
            assert (await ended(one)).endswith(DONE)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_worker_that_leaves_the_table() -> None:
    """Its link takes nothing new, finishes what it has, and closes."""
    hold = asyncio.Event()

    async def wait(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await hold.wait()
        await peer.send(chunk(DONE) + LAST)

    async with upstream(says(stream_of(1)), wait) as engine, chain(engine) as c:
        await c.linked()
        async with client(c.port) as one:
            one.send(post())
            await one.head()
            c.router.close_address(c.shim_address)
            assert not c.links.up(c.shim_address)
            assert not c.links.empty
            hold.set()
            assert (await one.chunks()) == event(0) + DONE
        await until(lambda: c.links.empty)


async def test_whoever_connects_may_not_upgrade_to_something_else() -> None:
    """Only the link's own path and protocol are taken; anything else is an ordinary request."""
    async with upstream(says(BIG % 2 + b"ok")) as engine, chain(engine) as c:
        for path, protocol in ((LINK_PATH, "h2c"), ("/other", "springtide-link/1"), (LINK_PATH, "springtide-link/2")):
            async with client(c.shim_address.port) as one:
                head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n"
                one.send(head.encode())
                assert await one.answer() == (200, b"ok")
