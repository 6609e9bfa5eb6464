"""A link: many streams on one connection. Both sides run this; `client` and `server` add how it begins and who opens.

One read is parsed to its end: all events in it are looked at, then what that came to is done, in their order. Per token
its bytes are cut out, and a tuple says what is to be done with them.
What is to be written is collected in `out`, and leaves when the `Pace` says so.

A peer that reads nothing holds all streams back; for more than it may owe, or for longer than the dead, the link ends.
"""

import asyncio
import logging
from typing import cast

from springtide.dataplane.upstream import set_nodelay
from springtide.link.counts import Counts
from springtide.link.frames import (
    ABORTED,
    ASIDE,
    CLOSE,
    CREDIT,
    CREDIT_BODY,
    DATA,
    EVENTS,
    FLOOD,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    KIND_SHIFT,
    LEFT,
    LENGTH_MASK,
    LOST,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    MAX_REASON_BYTES,
    MAX_UNREAD_BYTES,
    ORDERS,
    PING,
    PING_BYTES,
    PONG,
    RESET,
    SILENT,
    UNREAD,
    LinkError,
    frame,
)
from springtide.link.pace import Pace
from springtide.link.stream import Stream, StreamJob, carry_out

log = logging.getLogger(__name__)

WRITE_HIGH_WATER_BYTES = 1024 * 1024
_LINGER_S = 2.0
_unpack = HEAD.unpack_from
_CONTROL = 1 << KIND_SHIFT
_EVENTS = EVENTS << KIND_SHIFT


class Link(asyncio.Protocol):
    """See the module. `silent_s`: how long nothing has come, `stalled_s`: how long nothing could be written; counted by
    `look`, a stopped loop counts nothing."""

    transport: asyncio.Transport

    def __init__(self, pace: Pace, counts: Counts | None = None, name: str = "a peer") -> None:
        self.name = name
        self.counts = counts or Counts()
        self.carried = self.counts.begin(self)
        self.pace = pace
        self.loop = pace.loop
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        self.out: list[bytes] = []
        self.blocked = False  # the connection takes nothing now
        self.closed = False
        self.going = False  # no new streams
        self.waking = False  # the pace knows that there is something to write
        self.silent_s = self.stalled_s = 0.0
        self.peer: object = None
        self._rest = b""
        self._heard = True
        self._looked_at = 0.0
        self._pong = b""
        self._orders = 0  # of the peer since the last look
        self._controls = 0  # frames in `out` that have no payload of their own
        self._unread = 0  # bytes of such frames since the connection last took everything
        self._doomed = False  # ends in this pass of the loop

    # ------------------------------------------------------------ transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        set_nodelay(transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._doomed:
            return
        if self._rest:
            data = self._rest + data
            self._rest = b""
        streams = self.streams
        jobs: list[StreamJob] = []
        at, size, frames = 0, len(data), 0
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
                frames += 1
                stream = streams.get(number)
                if word >= _EVENTS:
                    payload = data[start:end]
                    if stream is None:
                        self._late_events(number)
                    elif (job := stream.take_events(payload, word >> KIND_SHIFT & MAX_EVENTS)) is not None:
                        jobs.append(job)
                    else:
                        carry_out(jobs)
                        stream.take(payload)
                    continue
                if jobs:
                    carry_out(jobs)
                self._other(number, word, stream, data[start:end])
            carry_out(jobs)
        except LinkError as error:
            carry_out(jobs)
            self.fail(str(error), error.reason)
        carried = self.carried
        carried.frames_in += frames
        if at < size and not self.closed:
            self._rest = data[at:]
            size = at  # the rest is counted when it is whole
        carried.bytes_in += size

    def eof_received(self) -> bool:
        # Not left to the transport, which would first try to write out what a peer that is gone does not read.
        if not self.closed:
            self.lost(ConnectionResetError("the other side closed the link"))
            self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost(exc or ConnectionResetError("the link was closed"))

    def pause_writing(self) -> None:
        self.blocked = True
        for stream in list(self.streams.values()):
            stream.hold()

    def resume_writing(self) -> None:
        self.blocked = False
        self.stalled_s = 0.0
        self._unread = 0
        if self._pong:
            self.wake(True)
        for stream in list(self.streams.values()):
            stream.pump()

    # ------------------------------------------------------------ frames

    def _other(self, number: int, word: int, stream: Stream | None, payload: bytes) -> None:
        """A frame that is not EVENTS."""
        if not 0 < word < _CONTROL:  # an empty DATA is no frame
            self._control(number, word >> KIND_SHIFT, payload)
        elif stream is not None:
            stream.take(payload)
        else:
            self._first(number, payload)

    def _first(self, number: int, payload: bytes) -> None:
        """DATA of a stream that is not open."""
        if not number:
            raise LinkError("DATA for stream 0")
        if number > self.last_id:
            stream = self.opened(number)
            if stream is not None:
                stream.take(payload)
        # else: it was closed here while this was on its way

    def _late_events(self, number: int) -> None:
        if number > self.last_id:
            raise LinkError(f"events for stream {number}, which was never opened")
        # else: it was closed here while these were on their way

    def opened(self, number: int) -> Stream | None:
        """The peer opens a stream; None: it is refused. Raises LinkError where it may not."""
        raise LinkError(f"stream {number} was never opened")

    def _control(self, number: int, kind: int, payload: bytes) -> None:
        size = len(payload)
        self._orders += ASIDE if kind in (PING, PONG, GOAWAY) else 1
        if self._orders > ORDERS:
            raise LinkError(f"too many frames in a short time, the last of kind {kind}", FLOOD)
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
                if stream.untouched:
                    self.carried.refused += 1
                self.forget(stream)
                stream.lost(ConnectionResetError("the other side gave the stream up"))
        elif number:
            raise LinkError(f"a frame of kind {kind} for stream {number}")
        elif kind in (PING, PONG):
            if size != PING_BYTES:
                raise LinkError(f"a ping of {size} bytes")
            if kind == PING:
                self._pong = frame(PONG, 0, payload)  # one for however many came in this pass
                if not self.blocked:
                    self.wake(True)
        elif kind == GOAWAY:
            said = payload[:MAX_REASON_BYTES].decode("utf-8", "replace")
            self.on_goaway("".join(c if c.isprintable() else "?" for c in said))
        else:
            raise LinkError(f"a frame of unknown kind {kind}")

    def on_goaway(self, reason: str) -> None:
        """The peer takes no new streams."""
        self.going = True
        if reason:
            self.tell("the other side ends it: " + reason)

    # ------------------------------------------------------------ writing

    def send(self, data: bytes) -> None:
        """A frame that is not DATA."""
        if self.closed or self._doomed:
            return
        self.out.append(data)
        self._controls += 1
        self._unread += len(data)
        if self._unread > MAX_UNREAD_BYTES:
            # Not here: streams and their users are in the middle of something.
            self._doomed = self.going = True
            why = f"it reads nothing: {self._unread} bytes of frames other than DATA wait for it"
            self.loop.call_soon(self.fail, why, UNREAD)
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
        if self._pong and not self.blocked:
            self.out.append(self._pong)
            self._controls += 1
            self._pong = b""
        if self.out:
            data = b"".join(self.out)
            carried = self.carried
            carried.bytes_out += len(data)
            carried.frames_out += (len(self.out) + self._controls) // 2  # of DATA there are two pieces
            self.out.clear()
            self._controls = 0
            self.transport.write(data)
            if not self.blocked:
                self._unread = 0

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
            self.counts.end(self, LEFT)
            self.on_lost()

    def leave(self, reason: str = "") -> None:
        """Opens and takes nothing new; closes once all streams are over."""
        if not self.going and not self.closed:
            self.going = True
            self.send(frame(GOAWAY, 0, reason.encode()[:MAX_REASON_BYTES]))
            self.loop.call_soon(self._close_if_done)

    def fail(self, why: str, reason: str) -> None:
        """Tells the peer why, and ends the link with all its streams."""
        if self.closed:
            return
        self.tell("it is ended: " + why)
        self.out.append(frame(GOAWAY, 0, why.encode()[:MAX_REASON_BYTES]))
        self._controls += 1
        self.flush()
        self.lost(ConnectionResetError(why), reason)
        self.transport.close()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def tell(self, what: str) -> None:
        """Logs, not more often than anybody reads."""
        if (left_out := self.counts.may_tell(self.loop.time())) is not None:
            log.warning("link with %s: %s%s", self.name, what, f" ({left_out} more)" if left_out else "")

    def abort(self, why: str = "the link was aborted", reason: str = ABORTED) -> None:
        """Ends the link at once."""
        if not self.closed:
            self.lost(ConnectionResetError(why), reason)
            self.transport.abort()

    def lost(self, error: Exception, reason: str = LOST) -> None:
        """The connection is no more: each stream ends as a connection of its own would."""
        if self.closed:
            return
        self.closed = self.going = True
        self.counts.end(self, reason)
        self.out.clear()
        self._rest = b""
        self.on_lost()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.lost(error)

    def on_lost(self) -> None:
        """The link takes no part any more; its streams end right after this."""

    def look(self, now: float, dead_s: float) -> bool:
        """Counts silence and stalling, and ends the link after `dead_s` of one of them. True where something came since
        the last look. `now` is the loop's clock."""
        # However long the loop stood still, it has not listened for longer than between two looks.
        passed_s = min(max(0.0, now - self._looked_at), 0.5)
        self._looked_at = now
        self._orders = 0
        heard, self._heard = self._heard, False
        self.silent_s = 0.0 if heard else self.silent_s + passed_s
        self.stalled_s = self.stalled_s + passed_s if self.blocked else 0.0
        for still_s, what, reason in ((self.silent_s, "said", SILENT), (self.stalled_s, "read", UNREAD)):
            if still_s >= dead_s and not self.closed:
                why = f"it has {what} nothing for {still_s:.0f} s"
                self.tell(why)
                self.abort(why, reason)
        return heard

    def ping(self) -> None:
        """Asks whether the other side lives."""
        self.send(frame(PING, 0, bytes(PING_BYTES)))


assert DATA == 0  # the parser tells DATA by its word being below every other kind's
