"""One stream of a connection: its two windows, what waits for the peer's, and its ends."""

from typing import TYPE_CHECKING, Protocol

from springtide.http2.frames import (
    DATA,
    END_STREAM,
    SIZES,
    ErrorCode,
    frame,
    header_frames,
    pack_head,
    reset_frame,
    window_frame,
)
from springtide.http2.headers import Headers

if TYPE_CHECKING:
    from springtide.http2.connection import Connection


class StreamHandler(Protocol):
    """Whom a stream belongs to. Called on the event loop; none of the calls may block or raise.

    After `reset`, and after the stream's both ends are closed, nothing more is called.
    """

    def headers(self, fields: Headers, ends: bool) -> None:
        """An answer's head or trailers, where we are the client. `ends`: `ended` follows at once."""
        ...

    def data(self, payload: bytes, flow_bytes: int) -> None:
        """DATA. `flow_bytes` are given back to the peer's window with `Stream.consumed`."""
        ...

    def ended(self) -> None:
        """The peer sends no more on this stream."""
        ...

    def reset(self, code: int) -> None:
        """The peer reset the stream, or the connection is gone."""
        ...

    def hold_back(self, paused: bool) -> None:
        """More than enough waits for the peer's window; or it is gone again."""
        ...


class Stream:
    """See StreamHandler. Writing to a closed stream does nothing."""

    __slots__ = (
        "closed",
        "conn",
        "data_head",
        "ended_in",
        "ended_out",
        "final",
        "handler",
        "held",
        "id",
        "owed",
        "pending",
        "progress_at",
        "receive_window",
        "send_window",
    )

    def __init__(self, conn: "Connection", stream_id: int) -> None:
        self.conn = conn
        self.id = stream_id
        self.data_head = pack_head(0, 0, DATA, 0, stream_id)[3:]  # what follows the size in frames of DATA
        self.handler: StreamHandler
        self.send_window = conn.peer_window
        self.receive_window = conn.limits.stream_window_bytes
        self.owed = 0  # consumed, not yet given back to the peer's window
        self.pending: bytearray | None = None  # waits for a window
        self.progress_at = 0.0
        self.final: bytes | None = None  # the block that ends the stream once `pending` has left; b"" for none
        self.held = False
        self.ended_in = False
        self.ended_out = False
        self.closed = False

    # ------------------------------------------------------------ sending

    def send_headers(self, block: bytes, end_stream: bool = False) -> None:
        """HEADERS with a whole block. Must not follow DATA that still waits; use `finish` for trailers."""
        if self.ended_out:
            return
        self.conn.emit(header_frames(self.id, block, end_stream, self.conn.peer_frame_size))
        if end_stream:
            self._end_out()

    def send(self, payload: bytes) -> None:
        """DATA, at once where the windows allow it."""
        conn = self.conn
        size = len(payload)
        if (
            self.pending is not None
            or not 0 < size <= self.send_window  # nothing is not sent: an empty frame is a reason to hang up for some
            or size > conn.send_window
            or size > conn.peer_frame_size
            or conn.paused
            or self.ended_out
        ):
            self._queue(payload)
            return
        self.send_window -= size
        conn.send_window -= size
        if size < 1024:
            conn.emit(SIZES[size] + self.data_head + payload)
        else:
            conn.emit(pack_head(size >> 8, size & 255, DATA, 0, self.id) + payload)

    def finish(self, block: bytes = b"") -> None:
        """Ends our side, after what waits: with trailers, or without any."""
        if self.ended_out or self.final is not None:
            return
        if self.pending is not None:
            self.final = block
        elif block:
            self.send_headers(block, end_stream=True)
        else:
            self.conn.emit(frame(DATA, END_STREAM, self.id))
            self._end_out()

    def reset(self, code: int = ErrorCode.CANCEL) -> None:
        """RST_STREAM: both sides end here. The handler is not told."""
        if not self.closed:
            self.conn.emit_control(reset_frame(self.id, code))
            self.close()

    @property
    def pending_bytes(self) -> int:
        """What waits for a window."""
        return len(self.pending) if self.pending is not None else 0

    def _queue(self, payload: bytes) -> None:
        if self.ended_out or self.final is not None or not payload:
            return
        if self.pending is None:
            self.pending = bytearray()
            self.progress_at = self.conn.loop.time()
            self.conn.backlog.add(self)
        self.pending += payload
        if not self.held and len(self.pending) > self.conn.limits.stream_high_water_bytes:
            self.held = True
            self.handler.hold_back(True)
        self.conn.pump(self)

    def step(self) -> bool:
        """Sends one frame of what waits. True where more could be sent as far as this stream is concerned."""
        pending, conn = self.pending, self.conn
        if pending is None or self.closed:
            return False
        room = min(self.send_window, conn.send_window, conn.peer_frame_size, len(pending))
        if room > 0:
            piece = bytes(pending[:room])
            del pending[:room]
            self.send_window -= room
            conn.send_window -= room
            self.progress_at = conn.loop.time()
            conn.emit(pack_head(room >> 8, room & 255, DATA, 0, self.id) + piece)
        if not pending:
            self._drained()
            return False
        if self.held and len(pending) < conn.limits.stream_high_water_bytes // 2:
            self._release()
        return self.send_window > 0

    def _drained(self) -> None:
        self.pending = None
        self.conn.backlog.discard(self)
        if self.final is not None:
            block, self.final = self.final, None
            self.finish(block)
        elif self.held:
            self._release()

    def _release(self) -> None:
        self.held = False
        self.handler.hold_back(False)

    def _end_out(self) -> None:
        self.ended_out = True
        if self.ended_in:
            self.close()
        elif self.conn.ends_with_answer:
            # RFC 9113 §8.1: a server that has answered needs nothing more of the request.
            self.conn.emit_control(reset_frame(self.id, ErrorCode.NO_ERROR))
            self.close()

    # ------------------------------------------------------------ receiving

    def consumed(self, size: int) -> None:
        """Gives `size` bytes back to the peer's windows, in good portions."""
        conn = self.conn
        conn.consumed(size)
        if not self.ended_in and not self.closed:
            self.owed += size
            if self.owed >= conn.limits.stream_window_bytes // 2:
                self.receive_window += self.owed
                conn.emit_control(window_frame(self.id, self.owed))
                self.owed = 0

    def end_in(self) -> None:
        """The peer's side ended."""
        self.ended_in = True
        self.handler.ended()
        if self.ended_out:
            self.close()

    def close(self) -> None:
        """Forgets the stream."""
        if not self.closed:
            self.closed = self.ended_in = self.ended_out = True
            self.pending = self.final = None
            self.conn.forget(self)
