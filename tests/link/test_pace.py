"""When a busy link writes. A rest is made so long here that a test which waits for its end does not pass."""

import asyncio
import socket
from typing import cast

import pytest

from springtide.link.frames import DATA, frame
from springtide.link.pace import Pace
from tests.link.wires import Opening, Wire

LONG_S = 30.0


class Wired(Wire):
    """A wire with a socket, as a rest sees it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock

    def get_extra_info(self, name: str) -> socket.socket | None:  # type: ignore[override]
        return self.sock if name == "socket" else None


async def passes(count: int = 4) -> None:
    """Some passes of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def link(pace: Pace) -> tuple[Opening, Wire]:
    """One that has just written."""
    opening, wire = Opening(pace), Wire()
    opening.connection_made(cast(asyncio.BaseTransport, wire))
    return opening, wire


@pytest.mark.timeout(20)
async def test_what_begins_an_answer_never_waits() -> None:
    """A stream's first bytes, and the first after something came for it, leave in the same pass."""
    opening, wire = link(Pace(asyncio.get_running_loop(), LONG_S))
    for number in (1, 2, 3):
        stream, _ = opening.open()
        stream.write(b"head and token")
        await passes()
        assert wire.take() == frame(DATA, number, b"head and token")
    opening.data_received(frame(DATA, 1, b"next request"))
    opening.streams[1].write(b"answer")
    await passes()
    assert wire.take() == frame(DATA, 1, b"answer")


@pytest.mark.timeout(20)
async def test_what_comes_over_a_link_ends_the_rest() -> None:
    """RT8: a request or a cancellation does not wait; all tokens of the meantime leave in one write."""
    near, far = socket.socketpair()
    with near, far:
        pace = Pace(asyncio.get_running_loop(), LONG_S)
        pace.listen(cast(asyncio.BaseTransport, Wired(near)))
        (opening, wire), (other, other_wire) = link(pace), link(pace)
        streams = [opening.open()[0] for _ in range(3)] + [other.open()[0]]
        for stream in streams:
            stream.write(b"head")
        await passes()
        assert (wire.writes, other_wire.writes) == (1, 1)
        far.send(b"a request")  # else the next line would rest for half a minute
        for stream in streams:
            stream.write(b"token")
        await passes()
        assert (wire.writes, other_wire.writes) == (2, 2)
        assert wire.take().endswith(b"".join(frame(DATA, n, b"token") for n in (1, 2, 3)))


@pytest.mark.timeout(20)
async def test_a_link_with_little_to_do_never_rests() -> None:
    """A write that is not close to the last one leaves in the same pass."""
    pace = Pace(asyncio.get_running_loop(), 0.001)
    opening, wire = link(pace)
    stream, _ = opening.open()
    stream.write(b"head")
    await passes()
    await asyncio.sleep(0.005)
    stream.write(b"token")
    await passes(2)
    assert wire.writes == 2
