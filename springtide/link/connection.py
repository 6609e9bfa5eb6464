"""A link: many streams on one connection. Both sides run this; `client` and `server` add how it begins and who opens.

One read is parsed to its end; each frame's bytes go straight to its stream. Nothing is made per token but its bytes.
What is to be written is collected in `out`, and leaves when the `Pace` says so.
"""

import asyncio
import logging
from typing import cast

from springtide.dataplane.upstream import set_nodelay
from springtide.link.frames import (
    CLOSE,
    CREDIT,
    CREDIT_BODY,
    DATA,
    EVENTS,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    KIND_SHIFT,
    LENGTH_MASK,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    MAX_REASON_BYTES,
    PING,
    PING_BYTES,
    PONG,
    RESET,
    LinkError,
    frame,
)
from springtide.link.pace import Pace
from springtide.link.stream import Stream

log = logging.getLogger(__name__)

WRITE_HIGH_WATER_BYTES = 1024 * 1024
_LINGER_S = 2.0
_unpack = HEAD.unpack_from
_CONTROL = 1 << KIND_SHIFT
_EVENTS = EVENTS << KIND_SHIFT


class Link(asyncio.Protocol):
    """See the module. `silent_s`: how long nothing has come, counted by `check`; a stopped loop counts nothing."""

    transport: asyncio.Transport

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.loop = pace.loop
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        self.out: list[bytes] = []
        self.blocked = False  # the connection takes nothing now
        self.closed = False
        self.going = False  # no new streams
        self.waking = False  # the pace knows that there is something to write
        self.silent_s = 0.0
        self.peer: object = None
        self._rest = b""
        self._heard = True
        self._checked_at = 0.0
        self._pong = b""

    # ------------------------------------------------------------ transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        set_nodelay(transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._rest:
            data = self._rest + data
            self._rest = b""
        streams = self.streams
        at, size = 0, len(data)
        try:
            while size - at >= HEAD_BYTES and not self.closed:
                number, word = _unpack(data, at)
                length = word & LENGTH_MASK
                if length > MAX_PAYLOAD_BYTES:
                    raise LinkError(f"a frame of {length} bytes; at most {MAX_PAYLOAD_BYTES} are taken")
                start = at + HEAD_BYTES
                end = start + length
                if end > size:
                    break
                at = end
                if 0 < word < _CONTROL:  # DATA; an empty one is no frame
                    stream = streams.get(number)
                    if stream is not None:
                        stream.take(data[start:end])
                    else:
                        self._first(number, data[start:end])
                elif word >= _EVENTS:
                    stream = streams.get(number)
                    if stream is not None:
                        stream.take_events(data[start:end], word >> KIND_SHIFT & MAX_EVENTS)
                    elif number > self.last_id:
                        raise LinkError(f"events for stream {number}, which was never opened")
                else:
                    self._control(number, word >> KIND_SHIFT, data[start:end])
        except LinkError as error:
            self.fail(str(error))
            return
        if at < size:
            self._rest = data[at:]

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost(exc or ConnectionResetError("the link was closed"))

    def pause_writing(self) -> None:
        self.blocked = True
        for stream in list(self.streams.values()):
            stream.hold()

    def resume_writing(self) -> None:
        self.blocked = False
        for stream in list(self.streams.values()):
            stream.pump()

    # ------------------------------------------------------------ frames

    def _first(self, number: int, payload: bytes) -> None:
        """DATA of a stream that is not open."""
        if not number:
            raise LinkError("DATA for stream 0")
        if number > self.last_id:
            stream = self.opened(number)
            if stream is not None:
                stream.take(payload)
        # else: it was closed here while this was on its way

    def opened(self, number: int) -> Stream | None:
        """The peer opens a stream; None: it is refused. Raises LinkError where it may not."""
        raise LinkError(f"stream {number} was never opened")

    def _control(self, number: int, kind: int, payload: bytes) -> None:
        size = len(payload)
        if kind in (CREDIT, CLOSE, RESET):
            if not 0 < number <= self.last_id or size != (CREDIT_BODY.size if kind == CREDIT else 0):
                raise LinkError(f"a frame of kind {kind} with {size} bytes for stream {number}")
            stream = self.streams.get(number)
            if stream is None:
                return  # it was closed here meanwhile
            if kind == CREDIT:
                stream.more(CREDIT_BODY.unpack(payload)[0])
            elif kind == CLOSE:
                stream.closed()
            else:
                self.forget(stream)
                stream.lost(ConnectionResetError("the other side gave the stream up"))
        elif number:
            raise LinkError(f"a frame of kind {kind} for stream {number}")
        elif kind in (PING, PONG):
            if size != PING_BYTES:
                raise LinkError(f"a ping of {size} bytes")
            if kind == PING:
                self._pong = frame(PONG, 0, payload)  # one for however many came in this pass
                self.wake(True)
        elif kind == GOAWAY:
            self.on_goaway(payload[:MAX_REASON_BYTES].decode("utf-8", "replace"))
        else:
            raise LinkError(f"a frame of unknown kind {kind}")

    def on_goaway(self, reason: str) -> None:
        """The peer takes no new streams."""
        self.going = True
        if reason:
            log.warning("the other side ends a link: %s", reason)

    # ------------------------------------------------------------ writing

    def send(self, data: bytes) -> None:
        """A frame that is not DATA."""
        if not self.closed:
            self.out.append(data)
            self.wake(True)

    def wake(self, hurried: bool) -> None:
        """Something is to be written."""
        if not self.waking:
            self.waking = True
            self.pace.add(self)
        if hurried:
            self.pace.hurried = True

    def flush(self) -> None:
        """Writes what has been collected, in one piece."""
        self.waking = False
        if self.closed:
            return
        if self._pong:
            self.out.append(self._pong)
            self._pong = b""
        if self.out:
            data = b"".join(self.out)
            self.out.clear()
            self.transport.write(data)

    # ------------------------------------------------------------ life

    def forget(self, stream: Stream) -> None:
        """A stream is over."""
        self.streams.pop(stream.id, None)
        if self.going and not self.streams:
            self.loop.call_soon(self._close_if_done)

    def _close_if_done(self) -> None:
        if self.going and not self.streams and not self.closed:
            self.flush()
            self.closed = True
            self.transport.close()
            self.loop.call_later(_LINGER_S, self.transport.abort)
            self.on_lost()

    def leave(self, reason: str = "") -> None:
        """Opens and takes nothing new; closes once all streams are over."""
        if not self.going and not self.closed:
            self.going = True
            self.send(frame(GOAWAY, 0, reason.encode()[:MAX_REASON_BYTES]))
            self.loop.call_soon(self._close_if_done)

    def fail(self, reason: str) -> None:
        """Tells the peer why, and ends the link with all its streams."""
        if self.closed:
            return
        log.warning("a link is ended: %s", reason)
        self.out.append(frame(GOAWAY, 0, reason.encode()[:MAX_REASON_BYTES]))
        self.flush()
        self.lost(ConnectionResetError(reason))
        self.transport.close()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def abort(self) -> None:
        """Ends the link at once."""
        if not self.closed:
            self.lost(ConnectionResetError("the link was aborted"))
            self.transport.abort()

    def lost(self, error: Exception) -> None:
        """The connection is no more: each stream ends as a connection of its own would."""
        if self.closed:
            return
        self.closed = self.going = True
        self.out.clear()
        self._rest = b""
        self.on_lost()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.lost(error)

    def on_lost(self) -> None:
        """The link takes no part any more; its streams end right after this."""

    def heard(self, now: float) -> bool:
        """Counts silence; True where something came since the last look. `now` is the loop's clock."""
        if self._heard:
            self._heard, self.silent_s = False, 0.0
            self._checked_at = now
            return True
        # However long the loop stood still, it has not listened for longer than between two looks.
        self.silent_s += min(max(0.0, now - self._checked_at), 0.5)
        self._checked_at = now
        return False

    def ping(self) -> None:
        """Asks whether the other side lives."""
        self.send(frame(PING, 0, bytes(PING_BYTES)))


assert DATA == 0  # the parser tells DATA by its word being below every other kind's
