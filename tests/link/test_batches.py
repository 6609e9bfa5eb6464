"""Events of one read of a link, and reads of one pass of a shim, are looked at together and written together: what
clients get is what they get when each is handed out at once."""

import asyncio
import random
import socket
from typing import cast

import pytest

from springtide.dataplane import OutcomeKind, Route
from springtide.dataplane.attempt import Attempt
from springtide.link.frames import CLOSE, CREDIT, DATA, EVENTS, RESET, WINDOW_BYTES, frame
from springtide.link.pace import Pace
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, chunk, dechunk, post
from tests.dataplane.passes import (
    ENGINE,
    ERROR,
    One,
    Script,
    Shape,
    begun,
    passes,
    pipe_of,
    play,
    random_script,
    token,
)
from tests.link.batches import Both, Routed, Shim, frames_of
from tests.link.test_pace import LONG_S, Wired
from tests.link.wires import Opening, Wire

ONE = EVENTS | 1


def event(stream: int, i: int, more: bytes = b"") -> bytes:
    """A frame of one token; streams of a link count from 1, those of a test from 0."""
    return frame(ONE, stream + 1, chunk(token(stream, i, more)))


def data(stream: int, *pieces: bytes) -> bytes:
    return frame(DATA, stream + 1, b"".join(pieces))


async def routed(count: int, shaped: bool = False) -> tuple[Routed, list[One]]:
    """A router with streams whose clients have two tokens."""
    w = Routed()
    if shaped:
        w.director.route = lambda request: Route(ENGINE, shaper=Shape())
    ones = [w.ask(b"%d" % n) for n in range(count)]
    await passes()
    for n in range(count):
        w.link.data_received(data(n, SSE_HEAD, chunk(token(n, 0))))
        w.link.data_received(data(n, chunk(token(n, 1))))
    await passes()
    w.wire.take()
    return w, ones


def reads(w: Routed, *frames: bytes) -> None:
    """One read of the router's end."""
    w.link.data_received(b"".join(frames))


# ---------------------------------------------------------------- the router: events of one read


async def test_events_of_a_read_are_looked_at_before_any_is_written() -> None:
    """RT5: all of a read is written when the read is over, in order."""
    w, ones = await routed(5)
    looked: list[int] = []
    for one in ones:
        pipe_of(one.client).on_write = lambda: looked.append(sum(cast(Attempt, x.conn.sink).passed for x in ones))
    reads(w, *(event(n, i) for i in (2, 3) for n in range(5)))
    for one in ones:
        pipe_of(one.client).on_write = lambda: None
    assert [one.got for one in ones] == [begun(n) + token(n, 2) + token(n, 3) for n in range(5)]
    assert looked == [10] * 10
    await w.close()


async def test_a_frame_of_several_events_counts_as_so_many() -> None:
    """RT6: on the way of every token, and on the longer one at half a window."""
    w, (one,) = await routed(1)
    more = b', "t": "' + b"x" * 900 + b'"'
    twos = [token(0, i, more) + token(0, i + 1, more) for i in range(2, 90, 2)]
    for two in twos:
        reads(w, frame(EVENTS | 2, 1, chunk(two)))
        await passes()
    reads(w, data(0, chunk(DONE), LAST))
    await passes()
    assert one.got == begun(0) + b"".join(twos) + DONE
    assert w.outcome(one).events == 90
    await w.close()


async def test_events_after_a_piece_of_one() -> None:
    """RT5: a shim sends whole events; from one that does not, bytes keep their order all the same."""
    w, (one,) = await routed(1)
    torn = token(0, 2)
    reads(w, data(0, chunk(torn[:9])))
    await passes()
    reads(w, event(0, 3), event(0, 4))
    await passes()
    assert one.got == begun(0) + torn[:9] + token(0, 3) + token(0, 4)
    await w.close()


@pytest.mark.parametrize("close", [CLOSE, RESET])
async def test_events_then_the_end_then_a_close_in_one_read(close: int) -> None:
    """RT5 RT6: all of it, in this order, and counted."""
    w, (one, other) = await routed(2)
    reads(w, event(0, 2), event(1, 2), event(0, 3), data(0, chunk(DONE), LAST), frame(close, 1), event(1, 3))
    await passes()
    assert one.got == begun(0) + token(0, 2) + token(0, 3) + DONE
    assert one.clean
    assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.OK, 4)
    assert other.got == begun(1) + token(1, 2) + token(1, 3)
    assert list(w.link.streams) == [2]
    await w.close()


@pytest.mark.parametrize("close", [CLOSE, RESET])
async def test_an_early_end_comes_after_the_events_before_it(close: int) -> None:
    """RT5: what came before is the client's, then the error; what comes after is nobody's."""
    w, (one, other) = await routed(2)
    reads(w, event(0, 2), event(1, 2), frame(close, 1), event(0, 3), event(1, 3))
    await passes()
    assert one.got.startswith(begun(0) + token(0, 2) + b'data: {"error"')
    assert token(0, 3) not in one.got
    assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.UPSTREAM_EOF, 3)
    assert other.got == begun(1) + token(1, 2) + token(1, 3)
    await w.close()


@pytest.mark.parametrize(
    "broken",
    [frame(9, 1), frame(ONE, 1), frame(ONE, 77, b"x"), frame(DATA, 0, b"x"), b"\x00\x00\x00\x01\x00\xff\xff\xff"],
    ids=["kind", "empty", "unopened", "zero", "long"],
)
async def test_a_broken_frame_after_good_events(broken: bytes) -> None:
    """RT5: the good ones are the clients', then every stream ends with an error."""
    w, ones = await routed(3)
    reads(w, *(event(n, i) for i in (2, 3) for n in range(3)), broken, event(0, 4))
    await passes()
    for n, one in enumerate(ones):
        assert one.got.startswith(begun(n) + token(n, 2) + token(n, 3) + b'data: {"error"')
        assert token(n, 4) not in one.got
        assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.UPSTREAM_EOF, 4)
    assert w.link.closed
    await w.close()


async def test_a_stream_beyond_its_window_after_good_events() -> None:
    """RT5: of a stream that is held back more comes than it may send: the others have what came before."""
    w, (one, other) = await routed(2)
    one.client.pause_writing()
    big = [event(0, i, b', "t": "' + b"x" * 3900 + b'"') for i in range(WINDOW_BYTES // 3900 + 2)]
    reads(w, event(1, 2), *big, event(1, 3))
    await passes()
    assert w.link.closed
    assert other.got.startswith(begun(1) + token(1, 2) + b'data: {"error"')
    assert one.got.startswith(begun(0) + b'data: {"error"')
    await w.close()


async def test_chunks_that_are_no_events_between_events_of_one_read() -> None:
    """RT5: a shim that read two tokens at once sends DATA: its place among the events is kept."""
    w, (one, other) = await routed(2)
    reads(w, event(0, 2), data(0, chunk(token(0, 3)), chunk(token(0, 4))), event(1, 2), event(0, 5))
    await passes()
    assert one.got == begun(0) + b"".join(token(0, i) for i in range(2, 6))
    assert other.got == begun(1) + token(1, 2)
    await w.close()


async def test_chunks_of_one_pass_in_several_reads() -> None:
    """RT5: the same where the events are the link's next read, before the loop has a pass."""
    w, (one,) = await routed(1)
    reads(w, data(0, chunk(token(0, 2)), chunk(token(0, 3))))
    reads(w, event(0, 4))
    await passes()
    assert one.got == begun(0) + b"".join(token(0, i) for i in range(2, 5))
    await w.close()


async def test_events_at_half_a_window() -> None:
    """RT5: the event with which half a window is used up takes another way: it keeps its place."""
    w, (one,) = await routed(1)
    more = b', "t": "' + b"x" * 900 + b'"'
    reads(w, *(event(0, i, more) for i in range(2, 90)))
    await passes()
    assert one.got == begun(0) + b"".join(token(0, i, more) for i in range(2, 90))
    await w.close()


async def test_nothing_follows_an_error_in_one_read() -> None:
    """RT5: an engine's error comes as DATA: no event is written after it."""
    w, (one,) = await routed(1)
    reads(w, event(0, 2), data(0, chunk(ERROR)), event(0, 3))
    await passes()
    assert one.got.startswith(begun(0) + token(0, 2) + b'data: {"error"')
    assert token(0, 3) not in one.got
    assert w.outcome(one).events == 3
    await w.close()


async def test_a_client_that_is_full_in_the_middle_of_a_read() -> None:
    """RT5: nothing is lost or changes its place when the stream is held back between events, and goes on later."""
    w, (one, other) = await routed(2)
    pipe = pipe_of(one.client)
    pipe.on_write = lambda: None if one.client.paused else one.client.pause_writing()
    reads(w, event(0, 2), event(0, 3), event(1, 2), event(0, 4))
    pipe.on_write = lambda: None
    reads(w, event(0, 5), event(1, 3), data(0, chunk(token(0, 6)), chunk(token(0, 7))), event(0, 8))
    assert token(0, 5) not in one.got
    one.client.resume_writing()
    reads(w, event(0, 9))
    await passes()
    reads(w, event(0, 10))
    await passes()
    assert one.got == begun(0) + b"".join(token(0, i) for i in range(2, 11))
    assert other.got == begun(1) + token(1, 2) + token(1, 3)
    await w.close()


@pytest.mark.parametrize("how", ["end", "bad", "raise"])
async def test_a_shaper_in_the_middle_of_a_read(how: str) -> None:
    """RT5 RT6: what comes after a shaper's end or failure is neither written nor shaped; what came before is."""
    w, (one, other) = await routed(2, shaped=True)
    says = b', "%b": 1' % how.encode()
    reads(w, event(0, 2), event(1, 2), event(0, 3, says), event(0, 4), event(1, 3), data(0, chunk(DONE), LAST))
    await passes()
    before = b"".join(token(0, i) for i in range(3)).replace(b'"i"', b'"shaped"')
    if how == "end":
        assert one.got == before + token(0, 3, says).replace(b'"i"', b'"shaped"')
        assert one.clean
    else:
        assert one.got.startswith(before + b'data: {"error"')
        assert not one.clean
    kinds = {"end": OutcomeKind.OK, "bad": OutcomeKind.BAD_RESPONSE, "raise": OutcomeKind.ABORTED}
    assert (w.outcome(one).kind, w.outcome(one).events) == (kinds[how], 4)
    assert other.got == b"".join(token(1, i) for i in range(4)).replace(b'"i"', b'"shaped"')
    assert list(w.link.streams) == [2]
    assert frame(RESET, 1) in w.wire.take()
    await w.close()


async def test_a_write_that_fails_in_the_middle_of_a_read() -> None:
    """RT5: nothing of its stream follows but an error; the others have theirs."""
    w, (one, other) = await routed(2)
    pipe = pipe_of(one.client)

    def fail() -> None:
        pipe.on_write = lambda: None
        del pipe.written[-len(chunk(token(0, 2))) :]
        raise RuntimeError("a fault of the transport")

    pipe.on_write = fail
    reads(w, event(0, 2), event(1, 2), event(0, 3), event(1, 3), data(0, chunk(DONE), LAST))
    await passes()
    assert one.got.startswith(begun(0) + b'data: {"error"')
    assert w.outcome(one).kind is OutcomeKind.ABORTED
    assert other.got == begun(1) + token(1, 2) + token(1, 3)
    await w.close()


async def test_a_write_that_ends_another_stream_of_the_read() -> None:
    """RT5: what was looked at for an exchange that has ended meanwhile is not written after its error."""
    w, (one, other) = await routed(2)

    def cut() -> None:
        if other.client.exchange is not None:
            other.client.exchange.abort("cut", "cut")

    pipe_of(one.client).on_write = cut
    reads(w, event(0, 2), event(1, 2), event(0, 3))
    await passes()
    assert other.got.startswith(begun(1) + b'data: {"error"')
    assert token(1, 2) not in other.got
    assert one.got == begun(0) + token(0, 2) + token(0, 3)
    pipe_of(one.client).on_write = lambda: None
    await w.close()


async def test_events_for_a_client_that_left() -> None:
    """RT8: they were on their way: no harm, and nothing of them goes to who has the next stream."""
    w, (one, other) = await routed(2)
    one.client.eof_received()
    next_one = w.ask(b"next")
    reads(w, event(0, 2), event(1, 2), event(0, 3))
    await passes()
    assert one.got == begun(0)
    assert other.got == begun(1) + token(1, 2)
    assert not pipe_of(next_one.client).written
    assert not w.link.closed
    await w.close()


async def test_events_that_hide_the_end_of_an_answer() -> None:
    """A shim that says what is not so: events that end the answer, and more after them. The client's answer ends once,
    and its connection is not touched after that."""
    w, (one,) = await routed(1)
    torn = token(0, 2)
    reads(w, data(0, chunk(torn[:9])))
    await passes()
    reads(w, frame(ONE, 1, chunk(torn[9:] + DONE) + LAST), event(0, 3))
    await passes()
    assert bytes(pipe_of(one.client).written).endswith(chunk(torn + DONE) + LAST)
    assert bytes(pipe_of(one.client).written).count(LAST) == 1
    assert w.outcome(one).kind is OutcomeKind.OK
    await w.close()


# ---------------------------------------------------------------- the shim: reads of one pass


async def shim(count: int) -> tuple[Shim, list[One]]:
    """A shim whose engines have sent two tokens on each stream of its link."""
    w = Shim()
    w.engines_ready(count)
    w.link.data_received(b"".join(frame(DATA, n + 1, post(body=b"%d" % n)) for n in range(count)))
    ones = []
    for n in range(count):
        body = b"%d" % n
        ones.append(One(body, None, w.engine_of(body)))  # type: ignore[arg-type]  # its client is at the link's far end
        ones[n].reads(SSE_HEAD + chunk(token(n, 0)), chunk(token(n, 1)))
        assert ones[n].conn.inbox is w.link.pace
    await passes()
    w.wire.take()
    return w, ones


async def test_reads_of_a_pass_leave_in_one_write_of_the_link() -> None:
    """RT5: one frame of one event each, in the order of the reads."""
    w, ones = await shim(5)
    writes = w.wire.writes
    for i in (2, 3):
        for n, one in enumerate(ones):
            one.reads(chunk(token(n, i)))
    assert not w.wire.sent
    await passes(2)
    assert w.wire.take() == b"".join(event(n, i) for i in (2, 3) for n in range(5))
    assert w.wire.writes == writes + 1
    await w.close()


async def test_an_engine_that_ends_while_its_reads_wait() -> None:
    """RT5: its tokens, then the error, then the end of the stream, in the link's order."""
    w, (one, other) = await shim(2)
    one.reads(chunk(token(0, 2)))
    other.reads(chunk(token(1, 2)))
    one.conn.eof_received()
    await passes()
    sent = list(frames_of(w.wire.take()))
    assert [x for x in sent if x[0] == 2] == [(2, ONE, chunk(token(1, 2)))]
    (first, second, third) = [x for x in sent if x[0] == 1]
    assert first == (1, ONE, chunk(token(0, 2)))
    assert second[1] == DATA
    assert b'data: {"error"' in second[2]
    assert third == (1, CLOSE, b"")
    await w.close()


async def test_a_stream_given_up_while_its_reads_wait() -> None:
    """RT8: the engine's connection is cut at once, and nothing more of it goes out; the other stream has all."""
    w, (one, other) = await shim(2)
    one.reads(chunk(token(0, 2)))
    other.reads(chunk(token(1, 2)))
    w.link.data_received(frame(RESET, 1))
    assert pipe_of(one.conn).closing
    one.reads(chunk(token(0, 3)))
    await passes()
    assert list(frames_of(w.wire.take())) == [(2, ONE, chunk(token(1, 2)))]
    (outcome,) = w.director.outcomes[one.body]
    assert outcome.kind is OutcomeKind.CLIENT_GONE
    await w.close()


async def test_a_link_lost_while_reads_wait() -> None:
    """RT8: every engine's request is aborted; no read is left, and the next link works."""
    w, ones = await shim(3)
    for n, one in enumerate(ones):
        one.reads(chunk(token(n, 2)))
    w.link.eof_received()
    assert all(pipe_of(one.conn).closing for one in ones)
    await passes()
    assert not w.link.pace.reads
    assert not w.server.exchanges
    opening, wire = Opening(w.link.pace), Wire()
    opening.connection_made(cast(asyncio.BaseTransport, wire))
    opening.open()[0].write(b"on")
    await passes()
    assert wire.take() == frame(DATA, 1, b"on")
    await w.close()


async def test_a_sink_that_fails_does_not_stop_the_pace() -> None:
    """RT5: its stream ends with an error after what it had; the other streams go on, in this pass and the next ones."""
    w, (one, other) = await shim(2)

    def fail(data: bytes) -> None:
        raise RuntimeError("a fault of the sink")

    one.reads(chunk(token(0, 2)))
    other.reads(chunk(token(1, 2)))
    real = Attempt.upstream_read
    with pytest.MonkeyPatch.context() as patch:
        failing = one.conn.sink
        patch.setattr(Attempt, "upstream_read", lambda self, data: fail(data) if self is failing else real(self, data))
        await passes()
    other.reads(chunk(token(1, 3)))
    await passes()
    sent = list(frames_of(w.wire.take()))
    assert [x[2] for x in sent if x[0] == 2] == [chunk(token(1, 2)), chunk(token(1, 3))]
    assert [x[1] for x in sent if x[0] == 1] == [DATA, CLOSE]
    assert pipe_of(one.conn).closing
    await w.close()


async def test_the_router_reads_nothing_while_reads_wait() -> None:
    """RT5: the stream's credit is used up by what was read in one pass: the engine is held back, nothing is lost."""
    w, (one,) = await shim(1)
    more = b', "t": "' + b"x" * 60_000 + b'"'
    one.reads(*(chunk(token(0, i, more)) for i in range(2, 6)))
    await passes()
    assert not pipe_of(one.conn).reading
    got = b""
    for _ in range(10):
        new = b"".join(payload for _, kind, payload in frames_of(w.wire.take()))
        got += new
        if new:
            w.link.data_received(frame(CREDIT, 1, len(new).to_bytes(4, "big")))
        await passes()
    assert got == b"".join(chunk(token(0, i, more)) for i in range(2, 6))
    assert pipe_of(one.conn).reading
    await w.close()


# ---------------------------------------------------------------- the pace


async def test_a_link_that_is_written_to_while_another_writes() -> None:
    """A flush that gives another link something to write orders a pass for it, every time."""
    pace = Pace(asyncio.get_running_loop(), 0.0)

    class Echoing(Wire):
        def write(self, data: bytes) -> None:
            super().write(data)
            far.write(b"because of " + data[8:])

    wires = Echoing(), Wire()
    first, second = Opening(pace), Opening(pace)
    for link, wire in zip((first, second), wires, strict=True):
        link.connection_made(cast(asyncio.BaseTransport, wire))
    near, (far, _) = first.open()[0], second.open()
    for said in (b"one", b"two", b"three"):
        near.write(said)
        await passes()
        assert wires[0].take() == frame(DATA, 1, said)
        assert wires[1].take() == frame(DATA, 1, b"because of " + said)


@pytest.mark.timeout(20)
async def test_reads_that_wait_over_a_rest() -> None:
    """RT5: tokens read before a rest leave when it ends, and those of the passes after it as well."""
    near, far = socket.socketpair()
    with near, far:
        w, ones = await shim(3)
        pace = w.link.pace
        slow = Pace(asyncio.get_running_loop(), LONG_S)
        slow.listen(cast(asyncio.BaseTransport, Wired(near)))
        w.link.pace = slow
        for one in ones:
            assert one.conn.inbox is pace
            one.conn.inbox = slow
        far.send(b"something for a link")  # else a pass would rest for half a minute
        for i in range(2, 6):
            for n, one in enumerate(ones):
                one.reads(chunk(token(n, i)))
            await passes()
            assert w.wire.take() == b"".join(event(n, i) for n in range(3))
        w.link.pace = pace
        await w.close()


# ---------------------------------------------------------------- the same as without


async def played(scripts: list[Script], seed: int, kept: bool) -> list[tuple[object, ...]]:
    """What each client of the router has at the end, and how its attempts ended on both relays."""
    rng = random.Random(seed)
    w = Both(kept, random.Random(seed) if kept else None)
    ones = await w.ask(len(scripts))

    async def between() -> None:
        for _ in range(rng.choice((0, 1, 2))):
            await passes(1)
        if rng.random() < 0.4:
            await w.pump()

    await play(scripts, ones, rng, between)
    await w.pump()
    told: list[tuple[object, ...]] = []
    for one in ones:
        ends = [
            [(o.kind, o.events) for o in director.outcomes.get(one.body, [])]
            for director in (w.router.director, w.shim.director)
        ]
        told.append((one.got, one.clean, *ends, pipe_of(one.conn).closing))
    await w.close()
    return told


@pytest.mark.parametrize("seed", range(10))
async def test_random_streams_are_what_they_are_without(seed: int) -> None:
    """RT5 RT6: thirty streams over a link, their reads in random passes and the link's bytes in random reads, against
    the same with everything handed out at once. Who leaves has a beginning of that."""
    rng = random.Random(2000 + seed)
    scripts = [random_script(rng, n, False) for n in range(30)]
    kept, once = [await played(scripts, seed, how) for how in (True, False)]
    for script, one, other in zip(scripts, kept, once, strict=True):
        if script.end == "leaves" and one != other:
            payload, _ = dechunk(b"".join(script.reads)[len(SSE_HEAD) :])
            assert isinstance(one[0], bytes)
            assert payload.startswith(one[0])
            continue
        assert one == other
