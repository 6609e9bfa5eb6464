"""One stream of a link, with the face of an asyncio transport: relay and pool use it as they use a connection.

Writes beyond the peer's credit wait here, and the protocol is told to pause; so what waits is at most what its source
gave in one pass of the loop (`Inbox`). What comes while reading is paused waits here too, at most WINDOW_BYTES: no
credit is given for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from springtide.dataplane.upstream import LocalFault
from springtide.link.frames import (
    CLOSE,
    CREDIT,
    CREDIT_BODY,
    EVENTS,
    HEAD,
    KIND_SHIFT,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    RESET,
    WINDOW_BYTES,
    LinkError,
    frame,
)

if TYPE_CHECKING:
    from springtide.link.connection import Link

log = logging.getLogger(__name__)

_pack = HEAD.pack
_HALF = WINDOW_BYTES // 2

StreamJob = tuple["Stream", Callable[[bytes], None], bytes]
"""What is to be done with bytes of a stream, unless the stream has ended meanwhile."""


def carry_out(jobs: list[StreamJob]) -> None:
    """What the events of one read came to, in their order. First all of them are looked at, then all are written: a
    system call between two of them would drive the interpreter out of the processor's caches each time."""
    work = iter(jobs)
    stream: Stream | None = None
    while True:
        try:
            for stream, do, data in work:
                if not stream.gone:
                    do(data)
            break
        except Exception:
            log.exception("a stream of a link failed")
            if stream is not None:
                stream.give_up()
    jobs.clear()


def _ignore(_: bytes, count: int) -> tuple[Callable[[bytes], None], bytes]:
    return _nothing, b""


def _nothing(_: bytes) -> None:
    """For events of a stream that ends in its turn."""


class Stream:
    """See the module. OPEN -> (CLOSING while bytes wait) -> gone."""

    __slots__ = (
        "_closing",
        "_credit",
        "_ending",
        "_held",
        "_holding",
        "_paused",
        "_pending",
        "_pending_size",
        "_room",
        "gone",
        "id",
        "link",
        "on_events",
        "protocol",
        "urgent",
    )

    def __init__(self, link: "Link", number: int) -> None:
        self.link = link
        self.id = number
        self.protocol: asyncio.Protocol
        self.on_events: Callable[[bytes, int], tuple[Callable[[bytes], None], bytes]] | None = None
        """Looks at what is known to be whole events, and says what is to be done; None: the peer may not send any."""
        self.gone = False
        self.urgent = True
        """The next bytes answer something that just came: they do not wait for others."""
        self._credit = WINDOW_BYTES  # bytes that the peer takes
        self._room = WINDOW_BYTES  # bytes that the peer may send
        self._pending: deque[bytes] | None = None
        self._pending_size = 0
        self._held: list[bytes] = []
        self._paused = False  # reading
        self._holding = False  # the protocol was told to pause writing
        self._closing = False
        self._ending = False  # the peer closed, but what it sent still waits

    @property
    def untouched(self) -> bool:
        """Nothing has come on it yet (or just a whole window)."""
        return self._room == WINDOW_BYTES and not self._held

    # ------------------------------------------------------------ the link's side

    def take(self, payload: bytes) -> None:
        """A DATA frame. Raises LinkError."""
        if self.gone:  # ended by what came before in the same read
            return
        if self._ending:
            raise LinkError(f"stream {self.id} goes on after its end")
        self._room -= len(payload)
        if self._room < 0:
            raise LinkError(f"stream {self.id} has more than its window")
        self.urgent = True
        if self._paused or self._held:
            self._held.append(payload)
        else:
            if self._room < _HALF:
                self._grant()
            self._hand(payload)

    def take_events(self, payload: bytes, count: int) -> StreamJob | None:
        """An EVENTS frame: what is to be done with it. None: it is to be taken as DATA is. Raises LinkError."""
        room = self._room - len(payload)
        to = self.on_events
        if to is None:
            raise LinkError(f"stream {self.id} was sent events")
        if self._paused or self._held or room < _HALF or not count or not payload:
            if not payload:
                raise LinkError(f"an empty frame of events for stream {self.id}")
            return None
        self._room = room
        try:
            do, data = to(payload, count)
        except Exception:
            log.exception("a stream of a link failed")
            self.on_events = _ignore
            return self, self.give_up, b""  # in its turn: what came before is the client's
        return self, do, data

    def give_up(self, _: bytes = b"") -> None:
        """Its user failed on what came: it ends. A `StreamJob`'s."""
        self._give_up(LocalFault("what came could not be used"))

    def _hand(self, payload: bytes) -> None:
        try:
            self.protocol.data_received(payload)
        except Exception:
            log.exception("a stream of a link failed")
            self.give_up()

    def _grant(self) -> None:
        more, self._room = WINDOW_BYTES - self._room, WINDOW_BYTES
        self.link.send(frame(CREDIT, self.id, CREDIT_BODY.pack(more)))

    def more(self, credit: int) -> None:
        """A CREDIT frame. Raises LinkError."""
        self._credit += credit
        if not credit or self._credit > WINDOW_BYTES:
            raise LinkError(f"stream {self.id} is given a credit of {credit}, which it cannot have used")
        self.pump()

    def closed(self) -> None:
        """A CLOSE frame."""
        if self._held:
            self._ending = True
        else:
            self.link.forget(self)
            self.lost(None)

    def lost(self, error: Exception | None) -> None:
        """The stream is no more. The link has forgotten it."""
        if not self.gone:
            self._leave()
            self._tell_lost(error)

    def hold(self) -> None:
        """Nothing can be written now."""
        if not self._holding and not self.gone:
            self._holding = True
            self.protocol.pause_writing()

    def pump(self) -> None:
        """Writes of what waits as much as the credit allows."""
        pending = self._pending
        while pending and self._credit > 0 and not self.link.blocked:
            piece = pending.popleft()
            size = min(len(piece), self._credit, MAX_PAYLOAD_BYTES)
            if size < len(piece):
                pending.appendleft(piece[size:])
                piece = piece[:size]
            self._credit -= size
            self._pending_size -= size
            self.link.out += (_pack(self.id, size), piece)
            self.link.wake(True)
        if pending or self.link.blocked:
            return
        self._pending = None
        if self._closing:
            self._close()
        elif self._holding:
            self._holding = False
            self.protocol.resume_writing()

    # ------------------------------------------------------------ the transport's face

    def write(self, data: bytes) -> None:
        """Sends, in one piece with what other streams send in this pass of the loop."""
        size = len(data)
        link = self.link
        if not 0 < size <= self._credit or size > MAX_PAYLOAD_BYTES or self._pending or self._closing or link.blocked:
            self._wait(data)
            return
        self._credit -= size
        link.out += (_pack(self.id, size), data)
        if self.urgent:
            self.urgent = False
            link.wake(True)
        elif not link.waking:
            link.waking = True
            link.pace.add(link)

    def write_events(self, data: bytes, count: int = 1) -> None:
        """Sends one chunk of `count` whole events that were looked at."""
        size = len(data)
        link = self.link
        slow = not 0 < size <= self._credit or size > MAX_PAYLOAD_BYTES or count > MAX_EVENTS or self._pending
        if slow or self._closing or link.blocked:
            self.write(data)
            return
        self._credit -= size
        link.out += (_pack(self.id, (EVENTS | count) << KIND_SHIFT | size), data)
        if not link.waking:
            link.waking = True
            link.pace.add(link)

    def _wait(self, data: bytes) -> None:
        if self._closing or not data:
            return
        if self._pending is None:
            self._pending = deque()
        self._pending.append(data)
        self._pending_size += len(data)
        self.pump()
        if self._pending:
            self.hold()

    def close(self) -> None:
        """Ends the stream once everything is sent."""
        if not self._closing:
            self._closing = True
            if not self._pending:
                self._close()

    def _close(self) -> None:
        self.link.send(frame(CLOSE, self.id))
        self._end()

    def abort(self) -> None:
        """Gives the stream up at once: the other side aborts its request."""
        self._give_up(None)

    def _give_up(self, error: Exception | None) -> None:
        if not self.gone:
            self._closing = True
            self.link.send(frame(RESET, self.id))
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        self.link.forget(self)
        self._leave()
        self.link.loop.call_soon(self._tell_lost, error)

    def _leave(self) -> None:
        self.gone = self._closing = True
        self._pending = None
        self._pending_size = 0
        self._held.clear()

    def _tell_lost(self, error: Exception | None) -> None:
        try:
            self.protocol.connection_lost(error)
        except Exception:
            log.exception("a stream of a link could not be ended")

    def is_closing(self) -> bool:
        """True once it is closed or lost."""
        return self._closing

    def pause_reading(self) -> None:
        """What comes waits, and no credit is given for it."""
        self._paused = True

    def resume_reading(self) -> None:
        """Goes on, from the loop."""
        if self._paused:
            self._paused = False
            if self._held:
                self.link.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        if self._paused or not self._held or self.gone:
            return
        payload = b"".join(self._held)
        self._held.clear()
        if self._room < _HALF:
            self._grant()
        self._hand(payload)
        if self._ending and not self.gone:
            self.link.forget(self)
            self.lost(None)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for credit."""
        return self._pending_size

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The peer's credit is the limit."""

    def can_write_eof(self) -> bool:
        """No half-closed streams."""
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Where the link leads to; no socket."""
        return self.link.peer if name == "peername" else default
