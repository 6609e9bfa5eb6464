"""Two ends of a link without sockets: bytes go from one to the other when the test says."""

import asyncio
from collections.abc import Callable
from typing import cast

from springtide.link.connection import Link
from springtide.link.pace import Pace
from springtide.link.stream import Stream


class Wire:
    """The transport of one end: what it wrote."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.writes = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent += data
        self.writes += 1

    def take(self) -> bytes:
        """What was written since the last time."""
        data = bytes(self.sent)
        self.sent.clear()
        return data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """No limits."""

    def get_extra_info(self, name: str) -> None:
        """No socket."""


class Far(asyncio.Protocol):
    """The user of a stream: keeps what comes."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.lost: list[Exception | None] = []
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False


class Opening(Link):
    """The end that opens streams."""

    def open(self) -> tuple[Stream, Far]:
        self.last_id += 1
        stream = self.streams[self.last_id] = Stream(self, self.last_id)
        far = Far()
        stream.protocol = far
        return stream, far


class Taking(Link):
    """The end that takes them; `fars` by stream."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace)
        self.fars: dict[int, Far] = {}
        self.on_open: Callable[[Stream], None] = lambda stream: None

    def opened(self, number: int) -> Stream | None:
        self.last_id = number
        stream = self.streams[number] = Stream(self, number)
        stream.protocol = self.fars[number] = Far()
        self.on_open(stream)
        return stream


def ends() -> tuple[Opening, Wire, Taking, Wire]:
    """Both ends and their wires. Inside a running loop only."""
    loop = asyncio.get_running_loop()
    opening, taking = Opening(Pace(loop, 0.0)), Taking(Pace(loop, 0.0))
    wires = Wire(), Wire()
    for link, wire in zip((opening, taking), wires, strict=True):
        link.connection_made(cast(asyncio.BaseTransport, wire))
    return opening, wires[0], taking, wires[1]
