"""Reads that are kept until the end of a pass and handed out together: what clients get is what they got before."""

import random
import re
from typing import cast

import pytest

from springtide.dataplane import OutcomeKind, Retry, Route
from springtide.dataplane.attempt import Attempt
from springtide.dataplane.events import is_plain_chunk
from springtide.dataplane.inbox import LARGE_BYTES
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, chunk, post
from tests.dataplane.passes import (
    ENGINE,
    ERROR,
    One,
    Script,
    Shape,
    World,
    begun,
    passes,
    pipe_of,
    play,
    random_script,
    token,
)

# ---------------------------------------------------------------- one pass


async def test_reads_of_a_pass_are_looked_at_before_any_is_written() -> None:
    """RT5: what is read in a pass is written in the same pass, each client in its order, after a look at all of it."""
    w = World()
    ones = await w.running(10)
    before = [pipe_of(one.client).writes for one in ones]
    at_first_write: list[int] = []

    def looked_at() -> None:
        attempts = [cast(Attempt, one.conn.sink) for one in ones]
        at_first_write.append(sum(attempt.passed for attempt in attempts))

    for one in ones:
        pipe_of(one.client).on_write = looked_at
    for i in (2, 3):
        for n, one in enumerate(ones):
            one.reads(chunk(token(n, i)))
    assert [pipe_of(one.client).writes for one in ones] == before
    await passes(1)
    assert [one.got for one in ones] == [begun(n) + token(n, 2) + token(n, 3) for n in range(10)]
    assert at_first_write[0] == 20
    for one in ones:
        pipe_of(one.client).on_write = lambda: None
    await w.close()


async def test_passes_that_bring_few_are_not_kept() -> None:
    """The inbox steps aside after a pass with few reads, and looks again later; no order changes on either side."""
    w = World()
    ones = await w.running(8)
    want = [begun(n) for n in range(8)]
    seen = set()
    for i in range(2, 300):
        few = i % 40 < 20
        for n, one in enumerate(ones[: 1 if few else 8]):
            one.reads(chunk(token(n, i)))
            want[n] += token(n, i)
            seen.add(bool(w.server.inbox.reads))
        await passes(2)
        assert [one.got for one in ones] == want
    assert seen == {True, False}
    await w.close()


async def test_the_switch_in_the_middle_of_a_pass_keeps_the_order() -> None:
    """`skip` runs out between two reads of one connection, and is set again by the pass after it."""
    w = World()
    (one,) = await w.running(1)
    want = begun(0)
    for i in range(2, 40):
        w.server.inbox.skip = i % 3
        for part in range(3):
            one.reads(chunk(token(0, 10 * i + part)))
            want += token(0, 10 * i + part)
        await passes(2)
        assert one.got == want
    await w.close()


# ---------------------------------------------------------------- one connection, several reads in a pass


@pytest.mark.parametrize("cut", range(1, len(chunk(token(0, 2))), 3))
async def test_a_read_that_ends_within_an_event(cut: int) -> None:
    """RT5: an event in two reads of one pass, between whole ones."""
    w = World()
    (one,) = await w.running(1)
    torn = chunk(token(0, 3))
    one.reads(chunk(token(0, 2)), torn[:cut], torn[cut:], chunk(token(0, 4)), chunk(token(0, 5)))
    await passes()
    one.reads(chunk(token(0, 6)), chunk(DONE), LAST)
    await passes()
    assert one.got == begun(0) + b"".join(token(0, i) for i in range(2, 7)) + DONE
    assert one.clean
    assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.OK, 7)
    await w.close()


@pytest.mark.parametrize("torn", [False, True])
async def test_nothing_follows_an_error(torn: bool) -> None:
    """RT5: tokens before an engine's error are written before it, those after it not at all, and are not counted."""
    w = World()
    ones = await w.running(2)
    one, other = ones
    error = chunk(ERROR)
    pieces = (error[:20], error[20:]) if torn else (error,)
    one.reads(chunk(token(0, 2)), *pieces, chunk(token(0, 3)), chunk(DONE) + LAST)
    other.reads(chunk(token(1, 2)))
    await passes()
    assert one.got.startswith(begun(0) + token(0, 2) + b'data: {"error"')
    assert token(0, 3) not in one.got
    assert not one.clean
    assert other.got == begun(1) + token(1, 2)
    assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.UPSTREAM_ERROR_EVENT, 3)
    assert pipe_of(one.conn).closing
    await w.close()


async def test_what_follows_the_end_of_an_answer_is_nobodys() -> None:
    """[DONE] and the closing chunk in the middle of a pass: the connection is out of step, and is not kept."""
    w = World()
    (one,) = await w.running(1)
    one.reads(chunk(token(0, 2)), chunk(DONE) + LAST, chunk(token(0, 3)), chunk(token(0, 4)))
    await passes()
    assert one.got == begun(0) + token(0, 2) + DONE
    assert one.clean
    assert w.outcome(one).events == 3
    assert pipe_of(one.conn).closing
    assert w.server.pool.empty
    await w.close()


async def test_a_kept_connection_hands_out_at_once_again() -> None:
    """The next answer on it begins without a wait: its head and first token are not kept for a pass."""
    w = World()
    (one,) = await w.running(1)
    one.reads(chunk(DONE) + LAST)
    await passes()
    assert w.server.pool.idle_count(ENGINE) == 1
    w.server.inbox.skip = 0
    second = w.client()
    second.data_received(post(body=b"second"))
    again = One(b"second", second, one.conn)
    again.reads(SSE_HEAD + chunk(token(7, 0)))
    assert again.got == token(7, 0)
    assert one.conn.served == 2
    await w.close()


async def test_a_connection_taken_again_while_reads_wait() -> None:
    """RT5: another request takes the connection in the instant in which the answer on it ends: what waits is not its
    answer. It goes on over a fresh connection."""
    w = World()
    (one,) = await w.running(1)
    second = w.client()
    w.director.retry = lambda outcome: second.data_received(post(body=b"second"))
    one.reads(chunk(DONE) + LAST, SSE_HEAD + chunk(token(0, 9)), chunk(token(0, 10)))
    await passes(1)
    w.director.retry = lambda outcome: None
    assert one.conn.served == 2
    assert pipe_of(one.conn).closing
    await passes()
    assert not pipe_of(second).written
    fresh = w.engines[-1]
    assert fresh is not one.conn
    again = One(b"second", second, fresh)
    again.reads(SSE_HEAD + chunk(token(7, 0)), chunk(DONE) + LAST)
    await passes()
    assert again.got == token(7, 0) + DONE
    assert one.got == begun(0) + DONE
    await w.close()


# ---------------------------------------------------------------- ends of either side while reads wait


@pytest.mark.parametrize("how", ["eof", "reset", "closed"])
async def test_the_engines_end_comes_after_what_it_said(how: str) -> None:
    """RT5: the engine's connection ends in the pass in which its last tokens came: they are written, then the error."""
    w = World()
    ones = await w.running(2)
    one, other = ones
    other.reads(chunk(token(1, 2)))
    one.reads(chunk(token(0, 2)), chunk(token(0, 3))[:9])
    if how == "eof":
        assert one.conn.eof_received() is False
    else:
        pipe_of(one.conn).closing = True
        one.conn.connection_lost(ConnectionResetError() if how == "reset" else None)
    assert one.got.startswith(begun(0) + token(0, 2) + b'data: {"error"')
    await passes()
    assert not one.clean
    assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.UPSTREAM_EOF, 3)
    assert other.got == begun(1) + token(1, 2)
    assert one.got.count(token(0, 2)) == 1
    await w.close()


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    """[DONE] waits while the engine hangs up: a clean end, and no dead connection is kept."""
    w = World()
    (one,) = await w.running(1)
    one.reads(chunk(token(0, 2)), chunk(DONE), LAST)
    one.conn.eof_received()
    await passes()
    assert one.got == begun(0) + token(0, 2) + DONE
    assert one.clean
    assert w.outcome(one).kind is OutcomeKind.OK
    assert w.server.pool.empty
    await w.close()


async def test_a_client_that_leaves_while_reads_wait() -> None:
    """RT8: its engine's connection is cut at once, nothing more is written to it, the others have all of theirs."""
    w = World()
    ones = await w.running(8)
    for n, one in enumerate(ones):
        one.reads(chunk(token(n, 2)), chunk(token(n, 3)))
    gone = ones[3]
    gone.client.eof_received()
    assert pipe_of(gone.conn).closing
    await passes()
    assert gone.got == begun(3)
    assert w.outcome(gone).kind is OutcomeKind.CLIENT_GONE
    assert [one.got for one in ones if one is not gone] == [
        begun(n) + token(n, 2) + token(n, 3) for n in range(8) if n != 3
    ]
    await w.close()


async def test_what_waits_for_a_client_that_left_is_not_looked_at() -> None:
    """RT8: its shaper has seen what the client has, and no more."""
    w = World()
    shape = Shape()
    w.director.route = lambda request: Route(ENGINE, shaper=shape)
    (one,) = await w.running(1)
    one.reads(chunk(token(0, 2)))
    one.client.eof_received()
    await passes()
    assert shape.fed == begun(0)
    await w.close()


async def test_a_client_that_goes_in_the_middle_of_the_writes() -> None:
    """A write to one client ends another's exchange: what was looked at for that one is not written after its error."""
    w = World()
    ones = await w.running(8)
    writes = iter(range(100))

    def cut() -> None:
        if next(writes) == 0:
            assert ones[5].client.exchange is not None
            ones[5].client.exchange.abort("cut", "cut")

    pipe_of(ones[2].client).on_write = cut
    for n, one in enumerate(ones):
        one.reads(chunk(token(n, 2)))
    await passes()
    assert ones[5].got.startswith(begun(5) + b'data: {"error"')
    assert token(5, 2) not in ones[5].got
    assert [one.got for n, one in enumerate(ones) if n != 5] == [begun(n) + token(n, 2) for n in range(8) if n != 5]
    await w.close()


async def test_a_full_client_holds_back_and_gets_all() -> None:
    """RT5: the client is full after the first write of a pass: the engine is read no more, and no read is lost."""
    w = World()
    (one,) = await w.running(1)
    pipe = pipe_of(one.client)
    pipe.on_write = lambda: one.client.pause_writing() if not one.client.paused else None
    one.reads(*(chunk(token(0, i)) for i in range(2, 6)))
    await passes()
    pipe.on_write = lambda: None
    assert not pipe_of(one.conn).reading
    assert one.got == begun(0) + b"".join(token(0, i) for i in range(2, 6))
    one.client.resume_writing()
    assert pipe_of(one.conn).reading
    one.reads(chunk(token(0, 6)), chunk(DONE) + LAST)
    await passes()
    assert one.got == begun(0) + b"".join(token(0, i) for i in range(2, 7)) + DONE
    await w.close()


async def test_the_server_closes_while_reads_wait() -> None:
    """RT5: every client has an explicit end, nothing after it, and no connection is left."""
    w = World()
    ones = await w.running(9)
    for n, one in enumerate(ones):
        one.reads(chunk(token(n, 2)))
    await w.close()
    for n, one in enumerate(ones):
        assert re.fullmatch(
            re.escape(begun(n)) + b"(?:" + re.escape(token(n, 2)) + b')?data: \\{"error".*\n\n', one.got, re.DOTALL
        )
        assert w.outcome(one).kind is OutcomeKind.ABORTED


# ---------------------------------------------------------------- shapers


async def test_a_shaper_that_ends_in_the_middle() -> None:
    """Events after those that close the client's stream are neither shaped nor written nor counted."""
    w = World()
    w.director.route = lambda request: Route(ENGINE, shaper=Shape())
    (one,) = await w.running(1)
    one.reads(*(chunk(token(0, i, b', "end": 1' if i == 3 else b"")) for i in range(2, 6)), chunk(DONE) + LAST)
    await passes()
    assert one.got == b"".join(token(0, i, b', "end": 1' if i == 3 else b"") for i in range(4)).replace(
        b'"i"', b'"shaped"'
    )
    assert one.clean
    assert (w.outcome(one).kind, w.outcome(one).events) == (OutcomeKind.OK, 4)
    assert pipe_of(one.conn).closing  # its rest is not wanted
    await w.close()


async def test_a_shaper_that_fails_in_the_middle() -> None:
    """RT5: what came before is written, then the error; what came after is not looked at."""
    w = World()
    shape = Shape()
    w.director.route = lambda request: Route(ENGINE, shaper=shape)
    (one,) = await w.running(1)
    one.reads(*(chunk(token(0, i, b', "bad": 1' if i == 3 else b"")) for i in range(2, 6)))
    await passes()
    assert one.got.startswith(b"".join(token(0, i) for i in range(3)).replace(b'"i"', b'"shaped"') + b'data: {"error"')
    assert b'"bad"' not in one.got
    assert token(0, 4) not in shape.fed
    assert not one.clean
    assert w.outcome(one).kind is OutcomeKind.BAD_RESPONSE
    await w.close()


async def test_a_failed_shaper_goes_on_elsewhere_without_a_gap() -> None:
    """F1: the rest of a pass belongs to the attempt that failed: none of it is taken for the next attempt's answer."""
    w = World()
    w.director.route = lambda request: Route(ENGINE, shaper=Shape())
    (one,) = await w.running(1)
    retries = [Retry(Route(ENGINE, shaper=Shape()))]
    w.director.retry = lambda outcome: retries.pop() if retries else None
    one.reads(chunk(token(0, 2)), chunk(token(0, 3, b', "bad": 1')), chunk(token(0, 4)), chunk(token(0, 5)))
    await passes()
    fresh = One(one.body, one.client, w.engines[-1])
    assert fresh.conn is not one.conn
    fresh.reads(SSE_HEAD + chunk(token(0, 3)), chunk(token(0, 4)), chunk(DONE) + LAST)
    await passes()
    assert one.got == (b"".join(token(0, i) for i in range(5)) + DONE).replace(b'"i"', b'"shaped"')
    assert [o.kind for o in w.director.outcomes[one.body]] == [OutcomeKind.BAD_RESPONSE, OutcomeKind.OK]
    await w.close()


@pytest.mark.parametrize("rest", [[], [chunk(DONE) + LAST]], ids=["open", "done"])
async def test_nothing_follows_what_its_sink_failed_on(rest: list[bytes]) -> None:
    """RT5: a sink that raises has lost an event: the client gets an explicit error, and no later event before it."""
    w = World()
    shape = Shape()
    w.director.route = lambda request: Route(ENGINE, shaper=shape)
    ones = await w.running(1)
    (one,) = ones
    one.reads(chunk(token(0, 2)), chunk(token(0, 3, b', "raise": 1')), chunk(token(0, 4)), *rest)
    await passes()
    assert one.got.startswith(b"".join(token(0, i) for i in range(3)).replace(b'"i"', b'"shaped"') + b'data: {"error"')
    assert not one.clean
    assert w.outcome(one).kind is OutcomeKind.ABORTED
    assert token(0, 4) not in shape.fed
    assert w.outcome(one).events == 4
    await w.close()


async def test_a_stream_that_fails_even_as_it_ends_fails_alone() -> None:
    """F1: telling the client fails as well: the others of the pass have their tokens, and the relay goes on."""
    w = World()
    one, other = await w.running(2)

    def fail() -> None:
        raise RuntimeError("a fault of the transport")

    pipe_of(one.client).on_write = fail
    one.reads(chunk(token(0, 2)))
    other.reads(chunk(token(1, 2)))
    await passes()
    assert pipe_of(one.conn).closing
    other.reads(chunk(token(1, 3)))
    w.server._run_sweep()
    assert w.server._sweep is not None  # it goes on looking
    await passes()
    assert other.got == begun(1) + token(1, 2) + token(1, 3)
    await w.close()


async def test_a_large_read_waits_for_nothing() -> None:
    """RT6: a client that is full stops the reading before the next read, as without an inbox."""
    w = World()
    (one,) = await w.running(1)
    text = b', "text": "%b"' % (b"x" * LARGE_BYTES)
    one.reads(chunk(token(0, 2)), chunk(token(0, 3, text)))
    assert one.got == begun(0) + token(0, 2) + token(0, 3, text)
    assert not w.server.inbox.reads
    one.client.pause_writing()
    assert not pipe_of(one.conn).reading
    await w.close()


async def test_a_large_read_behind_the_end_is_nobodys() -> None:
    """What follows an answer's end, kept or not, is not taken for the next one's beginning."""
    w = World()
    (one,) = await w.running(1)
    one.reads(chunk(DONE) + LAST, b"x" * LARGE_BYTES)
    assert one.got == begun(0) + DONE
    assert one.clean
    assert pipe_of(one.conn).closing
    assert not w.server.pool.idle_count(ENGINE)
    await w.close()


@pytest.mark.parametrize("rest", [[], [chunk(DONE) + LAST]], ids=["open", "done"])
async def test_nothing_follows_a_write_that_failed(rest: list[bytes]) -> None:
    """RT5: the same where the look was well and what it came to fails; other clients have theirs."""
    w = World()
    ones = await w.running(2)
    one, other = ones

    def fail() -> None:
        pipe.on_write = lambda: None
        del pipe.written[len(pipe.written) - len(chunk(token(0, 2))) :]
        raise RuntimeError("a fault of the transport")

    pipe = pipe_of(one.client)
    pipe.on_write = fail
    one.reads(chunk(token(0, 2)), chunk(token(0, 3)), *rest)
    other.reads(chunk(token(1, 2)), chunk(token(1, 3)))
    await passes()
    assert one.got.startswith(begun(0) + b'data: {"error"')
    assert w.outcome(one).kind is OutcomeKind.ABORTED
    assert other.got == begun(1) + token(1, 2) + token(1, 3)
    await w.close()


async def test_bytes_of_a_shaped_stream_are_counted_alike() -> None:
    """The outcome's bytes do not depend on whether reads were kept."""
    seen = []
    for kept in (True, False):
        w = World(kept)
        w.director.route = lambda request: Route(ENGINE, shaper=Shape())
        one = w.ask(b"0")
        one.reads(SSE_HEAD + chunk(token(0, 0)), *(chunk(token(0, i)) for i in range(1, 6)), chunk(DONE) + LAST)
        await passes()
        seen.append((w.outcome(one).events, w.outcome(one).bytes))
        await w.close()
    assert seen[0] == seen[1]


async def test_what_waits_counts_as_heard() -> None:
    """The sweep comes between a read and its pass: a stream whose token is there is not idle."""
    w = World()
    w.director.route = lambda request: Route(ENGINE, idle_timeout_s=5.0)
    (one,) = await w.running(1)
    attempt = cast(Attempt, one.conn.sink)
    attempt.active = False
    attempt.last_at -= 6.0  # the loop stood still
    one.reads(chunk(token(0, 2)))
    w.server._run_sweep()
    await passes()
    assert one.got == begun(0) + token(0, 2)
    assert one.body not in w.director.outcomes
    await w.close()


# ---------------------------------------------------------------- the same as without


async def played(scripts: list[Script], seed: int, kept: bool, shaped: bool) -> list[tuple[object, ...]]:
    """What each client of these streams has at the end. The order of reads is the seed's alone."""
    rng = random.Random(seed)
    w = World(kept)
    if shaped:
        w.director.route = lambda request: Route(ENGINE, shaper=Shape())
    ones = [w.ask(b"%d" % n) for n in range(len(scripts))]

    async def between() -> None:
        await passes(rng.choice((0, 1, 2)))

    await play(scripts, ones, rng, between)
    await passes()
    told: list[tuple[object, ...]] = []
    for one in ones:
        outcome = w.outcome(one) if one.body in w.director.outcomes else None
        # Of a shaped stream bytes are another matter: see `test_bytes_of_a_shaped_stream_are_counted_alike`.
        counted = (outcome.kind, outcome.events, 0 if shaped else outcome.bytes) if outcome else None
        ends = pipe_of(one.client).closing, pipe_of(one.conn).closing
        told.append((bytes(pipe_of(one.client).written), counted, *ends))
    await w.close()
    return told


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("seed", range(15))
async def test_random_streams_are_what_they_are_without(seed: int, shaped: bool) -> None:
    """RT5 RT6: bytes, counts and ends of forty streams whose reads come in random passes, against the same reads each
    handed out at once. Who leaves has a beginning of that."""
    rng = random.Random(1000 + seed)
    scripts = [random_script(rng, n, shaped) for n in range(40)]
    kept, once = [await played(scripts, seed, how, shaped) for how in (True, False)]
    kinds = set()
    for script, one, other in zip(scripts, kept, once, strict=True):
        if script.end == "leaves" and one != other:
            assert isinstance(one[0], bytes)
            assert isinstance(other[0], bytes)
            assert other[0].startswith(one[0])
            assert one[3] is True
            continue
        assert one == other
        kinds.add(one[1] and one[1][0])  # type: ignore[index]
    assert {OutcomeKind.OK, OutcomeKind.UPSTREAM_EOF, OutcomeKind.UPSTREAM_ERROR_EVENT} <= kinds


# ---------------------------------------------------------------- the look


def plainly(data: bytes) -> bool:
    """`is_plain_chunk`, said in full: the size in as few lowercase digits as it takes, and one line of an event that is
    an object whose first key does not begin with `error`."""
    match = re.fullmatch(rb"([1-9a-f][0-9a-f]{0,2})\r\n(data: \{\"[^\n]*\n\n)\r\n", data, re.DOTALL)
    if match is None:
        return False
    size, event = match.groups()
    return int(size, 16) == len(event) and len(data) < 4096 and not event.startswith(b'data: {"error')


def test_a_plain_chunk_against_its_definition() -> None:
    """RT5: at every length up to where the table ends and beyond, and for chunks that are wrong in one place."""
    said = {True: 0, False: 0}

    def look(data: bytes) -> None:
        assert is_plain_chunk(data) is plainly(data), data[:60]
        said[plainly(data)] += 1

    for size in range(5000):
        event = b'data: {"' + b"t" * (size - 10) + b"\n\n"
        look(chunk(event))
        look(b"%x\r\n%b\r\n" % (size + 1, event))
        look(b"%x\r\n%b\r\n" % (max(0, size - 1), event))
        look(b"0%x\r\n%b\r\n" % (size, event))
        look(b"%X\r\n%b\r\n" % (size, event))
    base = chunk(token(3, 4, b', "t": "' + b"y" * 200 + b'"'))
    rng = random.Random(3)
    for at in range(len(base)):
        for byte in (10, 13, 34, 58, 48, rng.randrange(256)):
            look(base[:at] + bytes((byte,)) + base[at + 1 :])
        look(base[:at] + base[at + 1 :])
        look(base[:at] + b"\n" + base[at:])
        look(base[:at])
        look(base[at:])
    for event in (DONE, ERROR, b": ping\n\n", token(1, 1) * 2, token(1, 1).replace(b"\n\n", b"\r\n\r\n"), b"\n\n", b""):
        for size in (len(event), len(event) + 1):
            look(b"%x\r\n%b\r\n" % (size, event))
            look(b"%x\r\n%b\r\n" % (size, event) + LAST)
            look(chunk(event) + chunk(event))
    assert min(said.values()) > 2000


def test_random_bytes_against_the_definition() -> None:
    """The same for pieces put together at random."""
    rng = random.Random(8)
    pieces = (b"1a\r\n", b"2\r\n", b'data: {"', b"error", b"x", b"\n", b"\n\n", b"\r\n", b'data: {"a": 1}', b"\r")
    yes = 0
    for _ in range(20_000):
        event = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 6)))
        data = rng.choice((event, chunk(event), chunk(b'data: {"' + event + b"\n\n"), event + chunk(event)))
        assert is_plain_chunk(data) is plainly(data), data
        yes += plainly(data)
    assert yes > 500
