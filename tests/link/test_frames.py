"""Framing: any split gives the same, and nothing that comes does more than end the link."""

import asyncio
import random

import pytest

from springtide.link.frames import (
    CLOSE,
    CREDIT,
    DATA,
    EVENTS,
    GOAWAY,
    HEAD,
    MAX_PAYLOAD_BYTES,
    PING,
    PONG,
    RESET,
    WINDOW_BYTES,
    frame,
)
from tests.link.wires import ends

SAID = {
    1: b"POST / HTTP/1.1\r\n\r\n",
    2: b"x" * 60,
    3: bytes(range(0, 256, 4)),
}


def script() -> bytes:
    """Three streams, interleaved, with each kind of frame that one side may send."""
    out = b""
    for number, said in SAID.items():
        out += frame(DATA, number, said[:10])
    out += frame(PING, 0, b"12345678") + frame(PONG, 0, b"12345678")
    for number, said in reversed(SAID.items()):
        out += frame(DATA, number, said[10:])
    return out + frame(CLOSE, 2) + frame(RESET, 3) + frame(GOAWAY, 0, b"enough")


async def test_split_at_every_byte() -> None:
    """The same streams whatever the borders of reads, down to one byte each."""
    whole = script()
    for cut in range(1, len(whole)):
        _, _, taking, wire = ends()
        for piece in (whole[:cut], whole[cut:]):
            taking.data_received(piece)
        assert {number: bytes(far.got) for number, far in taking.fars.items()} == SAID, cut
        assert (taking.fars[1].lost, taking.fars[2].lost) == ([], [None])
        assert isinstance(taking.fars[3].lost[0], ConnectionResetError)
        assert (taking.going, taking.closed) == (True, False)
        await asyncio.sleep(0)
        assert wire.take() == frame(PONG, 0, b"12345678")
    _, _, taking, _ = ends()
    for at in range(len(whole)):
        taking.data_received(whole[at : at + 1])
    assert {number: bytes(far.got) for number, far in taking.fars.items()} == SAID


@pytest.mark.parametrize(
    "bad",
    [
        frame(DATA, 1, b""),
        frame(DATA, 0, b"x"),
        HEAD.pack(1, MAX_PAYLOAD_BYTES + 1),
        HEAD.pack(1, MAX_PAYLOAD_BYTES + 1) + bytes(MAX_PAYLOAD_BYTES + 1),
        frame(CREDIT, 9, b"\0\0\0\1"),
        frame(CREDIT, 0, b"\0\0\0\1"),
        frame(DATA, 1, b"x") + frame(CREDIT, 1, b"\0\0\0"),
        frame(DATA, 1, b"x") + frame(CREDIT, 1, b"\0\0\0\0"),
        frame(DATA, 1, b"x") + frame(CREDIT, 1, b"\xff\xff\xff\xff"),
        frame(DATA, 1, b"x") + frame(CLOSE, 1, b"x"),
        frame(RESET, 7),
        frame(PING, 0, b"123"),
        frame(PING, 1, b"12345678"),
        frame(GOAWAY, 5, b""),
        frame(99, 0, b""),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 4,
    ],
)
async def test_malformed_frames_end_the_link_with_a_reason(bad: bytes) -> None:
    """What is no frame of this protocol ends the link explicitly, and each of its streams."""
    _, _, taking, wire = ends()
    taking.data_received(frame(DATA, 1, b"hello") if bad[:4] != b"\0\0\0\1" else b"")
    taking.data_received(bad)
    assert (taking.closed, wire.closed) == (True, True)
    assert wire.take()[4:5] == bytes([GOAWAY])
    assert all(far.lost for far in taking.fars.values())
    taking.data_received(frame(DATA, 5, b"after"))
    assert 5 not in taking.fars


async def test_more_than_the_window_ends_the_link() -> None:
    """A peer that sends what it was not given cannot grow memory."""
    _, _, taking, _ = ends()
    taking.on_open = lambda stream: stream.pause_reading()
    for _ in range(WINDOW_BYTES // MAX_PAYLOAD_BYTES):
        taking.data_received(frame(DATA, 1, bytes(MAX_PAYLOAD_BYTES)))
    assert not taking.closed
    taking.data_received(frame(DATA, 1, b"x"))
    assert taking.closed


async def test_random_mutations() -> None:
    """Bytes flipped, cut out, doubled and shuffled: nothing raises, and a link that is ended says so."""
    rng = random.Random(4)
    whole = script()
    ended = 0
    for _ in range(800):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 40)]
            elif kind == 2:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
            data = data or bytearray(b"x")
        _, _, taking, wire = ends()
        at = 0
        while at < len(data):
            step = rng.randint(1, 200)
            taking.data_received(bytes(data[at : at + step]))
            at += step
        assert taking.closed == wire.closed
        if taking.closed:
            ended += 1
            assert bytes([GOAWAY]) in wire.take()
            assert all(far.lost for far in taking.fars.values())
        await asyncio.sleep(0)
    assert 100 < ended < 800


async def test_a_pass_of_the_loop_is_one_write() -> None:
    """All streams' bytes of one pass leave in one write, in order."""
    opening, wire, taking, _ = ends()
    streams = [opening.open()[0] for _ in range(50)]
    for stream in streams:
        stream.write(b"one")
        stream.write(b"two")
    await asyncio.sleep(0)
    assert wire.writes == 1
    taking.data_received(wire.take())
    assert [bytes(far.got) for far in taking.fars.values()] == [b"onetwo"] * 50


async def test_pings_are_answered_once_a_pass() -> None:
    """A flood of pings makes no flood of answers."""
    _, _, taking, wire = ends()
    taking.data_received(frame(PING, 0, b"12345678") * 200)
    await asyncio.sleep(0)
    assert wire.take() == frame(PONG, 0, b"12345678")


async def test_credit_holds_a_writer_back_and_lets_it_go_on() -> None:
    """A reader that stands still has at most one window of one stream; another stream of the link goes on."""
    opening, wire, taking, back = ends()
    taking.on_open = lambda stream: stream.pause_reading() if stream.id == 1 else None
    slow, far = opening.open()
    fast, _ = opening.open()
    body = random.Random(1).randbytes(3 * WINDOW_BYTES)
    slow.write(body)
    assert far.paused
    for _ in range(20):
        fast.write(bytes(MAX_PAYLOAD_BYTES))
        await asyncio.sleep(0)
        assert len(wire.sent) <= WINDOW_BYTES + 3 * MAX_PAYLOAD_BYTES
        taking.data_received(wire.take())
        await asyncio.sleep(0)
        opening.data_received(back.take())
    assert len(taking.fars[2].got) == 20 * MAX_PAYLOAD_BYTES
    assert (len(taking.fars[1].got), slow.get_write_buffer_size()) == (0, 2 * WINDOW_BYTES)
    taking.streams[1].resume_reading()
    for _ in range(50):
        await asyncio.sleep(0)
        taking.data_received(wire.take())
        opening.data_received(back.take())
    assert bytes(taking.fars[1].got) == body
    assert not far.paused


async def test_a_blocked_connection_holds_all_writers_back() -> None:
    """A peer that reads nothing grows no buffer: every source pauses."""
    opening, wire, _, _ = ends()
    made = [opening.open() for _ in range(3)]
    opening.pause_writing()
    assert all(far.paused for _, far in made)
    for stream, _ in made:
        stream.write(b"late")
    await asyncio.sleep(0)
    assert not wire.sent
    opening.resume_writing()
    await asyncio.sleep(0)
    assert wire.take() == b"".join(frame(DATA, n, b"late") for n in (1, 2, 3))
    assert not any(far.paused for _, far in made)


async def test_close_after_what_waits_and_abort_at_once() -> None:
    """CLOSE follows the last byte; RESET drops what waits."""
    opening, wire, taking, back = ends()
    closing, closing_far = opening.open()
    giving_up, _ = opening.open()
    for stream in (closing, giving_up):
        stream.write(bytes(WINDOW_BYTES + 7))
    closing.close()
    giving_up.abort()
    for _ in range(10):
        await asyncio.sleep(0)
        taking.data_received(wire.take())
        await asyncio.sleep(0)
        opening.data_received(back.take())
    assert (len(taking.fars[1].got), taking.fars[1].lost) == (WINDOW_BYTES + 7, [None])
    assert len(taking.fars[2].got) == WINDOW_BYTES
    assert isinstance(taking.fars[2].lost[0], ConnectionResetError)
    assert closing_far.lost == [None]
    assert not opening.streams
    assert not taking.streams


async def test_random_mutations_of_answers() -> None:
    """The router's side, too: frames of a shim broken at random, cut anywhere, for streams that were never opened."""
    rng = random.Random(5)
    whole = b"".join(
        frame(DATA, n, b"HTTP/1.1 200 OK\r\n\r\n") + frame(EVENTS | 2, n, b"x" * 30) + frame(DATA, n, b"0\r\n\r\n")
        for n in (1, 2, 3)
    )
    whole += frame(PONG, 0, b"12345678") + frame(CLOSE, 2) + frame(RESET, 3) + frame(GOAWAY, 0, b"enough")
    ended = came = 0
    for _ in range(800):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 30))] = rng.randbytes(rng.choice((0, 1, 30)))
            data = data or bytearray(b"x")
        opening, wire, _, _ = ends()
        fars = [opening.open() for _ in range(3)]
        for stream, far in fars:
            stream.on_events = lambda payload, count, far=far: (far.data_received, payload)
        at = 0
        while at < len(data):
            step = rng.randint(1, 200)
            opening.data_received(bytes(data[at : at + step]))
            at += step
        await asyncio.sleep(0)
        assert opening.closed == wire.closed
        assert len(opening.streams) <= 3
        came += sum(b"x" * 30 in far.got for _, far in fars)
        if opening.closed:
            ended += 1
            assert all(len(far.lost) == 1 for _, far in fars)
    assert 100 < ended < 800
    assert came > 400
