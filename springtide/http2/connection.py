"""One HTTP/2 connection: frames in, frames out, settings, windows, header blocks. Both roles build on it.

Per read this costs one walk over the frames; per frame sent an append. What was sent in one pass of the loop leaves in
one write (`Joiner`). Whatever a peer can make us do for nothing draws on a bucket (`Calm`) and ends with GOAWAY.
"""

import asyncio
import logging
from typing import cast

from hpack import Decoder
from hpack.exceptions import HPACKError

from springtide.dataplane.upstream import set_nodelay
from springtide.http2 import frames
from springtide.http2.frames import ConnectionFault, ErrorCode, StreamFault, frame, window_frame
from springtide.http2.headers import Headers
from springtide.http2.limits import Calm, Http2Limits
from springtide.http2.stream import Stream

log = logging.getLogger(__name__)

_NEVER = float("inf")
_BYTES_PER_CREDIT = 64
_MAX_SETTINGS = 32
_MAX_KNOWN_BLOCKS = 8
_LONGEST_KNOWN_BLOCK = 64
_INDEXED = 0x80


class Joiner:
    """Writes out, at the end of a loop pass, what its connections gathered in it."""

    __slots__ = ("_dirty", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._dirty: list[Connection] = []

    def add(self, connection: "Connection") -> None:
        """Called once per pass and connection."""
        if not self._dirty:
            self.loop.call_soon(self._flush)
        self._dirty.append(connection)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()


class Connection(asyncio.Protocol):
    """The part that client and server share. `streams` are those with an open end."""

    ends_with_answer = False
    transport: asyncio.Transport | None = None

    def __init__(self, joiner: Joiner, limits: Http2Limits) -> None:
        self.joiner = joiner
        self.loop = joiner.loop
        self.limits = limits
        self.streams: dict[int, Stream] = {}
        self.backlog: set[Stream] = set()
        """Streams with DATA that waits for a window."""
        self.peer_window = self.send_window = frames.DEFAULT_WINDOW
        self.peer_frame_size = frames.DEFAULT_FRAME_SIZE
        self.receive_window = frames.DEFAULT_WINDOW
        self.paused = False  # the transport takes no more for now
        self.closing = False
        self.last_id = 0  # the highest stream that either side opened
        self.heard = True  # something was received since the last sweep that looked
        self._owed = 0
        self._out: list[bytes] = []
        self._unread = 0
        self._waiting: dict[Stream, None] = {}  # could send if the connection's window and transport allowed it
        self._held = bytearray()
        self._need = frames.HEAD_BYTES
        self._decoder = Decoder(limits.max_header_bytes)
        # Blocks of nothing but indexed fields, each of one byte: while the table does not change, they mean the same.
        self._known_blocks: dict[bytes, Headers] = {}
        self._block: bytearray | None = None
        self._block_id = 0
        self._block_flags = 0
        self._block_frames = 0
        self._calm = Calm(limits, self.loop.time())
        self._settled = False  # the peer's first SETTINGS came
        self._quiet_at = self._closing_at = self.loop.time()
        self._asked_at: float | None = None
        self._block_at = self._paused_at = _NEVER

    # ------------------------------------------------------------ transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        set_nodelay(transport)
        self.transport.set_write_buffer_limits(high=self.limits.write_high_water_bytes)
        self._quiet_at = self.loop.time()
        self.greet()

    def greet(self) -> None:
        """Our preface."""
        limits = self.limits
        self.emit(
            frames.settings_frame(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                    frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
                    frames.ENABLE_PUSH: 0,
                }
            )
        )
        more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
        if more > 0:
            self.receive_window += more
            self.emit(window_frame(0, more))

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self.closing:
            return
        held = self._held
        if held:
            held += data
            if len(held) < self._need:
                return
            data = bytes(held)
            held.clear()
        try:
            at = self._walk(data)
        except ConnectionFault as fault:
            self.fault(fault.code, str(fault))
            return
        except Exception:
            log.exception("a fault of ours on an HTTP/2 connection")
            self.fault(ErrorCode.INTERNAL_ERROR, "internal error")
            return
        if at < len(data) and not self.closing:
            held += data[at:]

    def _walk(self, data: bytes) -> int:
        """All whole frames of `data`; gives where the first incomplete one begins."""
        at, end = 0, len(data)
        while end - at >= 9 and not self.closing:
            size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if size > frames.DEFAULT_FRAME_SIZE:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            border = at + 9 + size
            if border > end:
                self._need = 9 + size
                return at
            stream_id = int.from_bytes(data[at + 5 : at + 9], "big") & frames.MAX_STREAM_ID
            self._frame(data[at + 3], data[at + 4], stream_id, data[at + 9 : border])
            at = border
        self._need = frames.HEAD_BYTES
        return at

    def eof_received(self) -> bool:
        self.lost(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost(exc)

    def lost(self, error: Exception | None) -> None:
        """The connection is gone: so are its streams. May be called again."""
        self.closing = True
        self._out.clear()
        self._held.clear()
        self._end_streams(ErrorCode.CANCEL)
        if self.transport is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        self.paused = True
        self._paused_at = self.loop.time()

    def resume_writing(self) -> None:
        self.paused = False
        self._unread = 0
        self._paused_at = _NEVER
        self._pump()

    # ------------------------------------------------------------ sending

    def emit(self, data: bytes) -> None:
        """Adds frames to what leaves at the end of this loop pass."""
        if not self._out:
            self.joiner.add(self)
        self._out.append(data)

    def emit_control(self, data: bytes) -> None:
        """`emit` for what a peer provokes: bounded while it does not read."""
        if self.paused:
            self._unread += len(data)
            if self._unread > self.limits.max_unread_bytes:
                self.lost(None)
                return
        if not self.closing:
            self.emit(data)

    def flush(self) -> None:
        """Writes what was gathered."""
        transport = self.transport
        if transport is None or not self._out:
            return  # not connected yet: `greet` comes first anyway
        out = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        if not transport.is_closing():
            self._calm.earn(len(out) // _BYTES_PER_CREDIT)
            transport.write(out)

    def pump(self, stream: Stream) -> None:
        """`stream` has something to send that its own window allows."""
        if stream.send_window > 0:
            self._waiting[stream] = None
            self._pump()

    def _pump(self) -> None:
        """Round robin, a frame each, while the connection's window and the transport allow it."""
        waiting = self._waiting
        while waiting and self.send_window > 0 and not self.paused:
            stream = next(iter(waiting))
            del waiting[stream]
            if stream.step():
                waiting[stream] = None

    # ------------------------------------------------------------ ends

    def forget(self, stream: Stream) -> None:
        """The stream is closed."""
        self.streams.pop(stream.id, None)
        self.backlog.discard(stream)
        self._waiting.pop(stream, None)

    def fault(self, code: int, message: str) -> None:
        """GOAWAY, then the end of the connection and of all its streams."""
        if self.closing:
            return
        log.debug("HTTP/2 connection ends: %s", message)
        self.emit(frames.goaway_frame(self.last_id, code, message))
        self.flush()
        self.shut()

    def shut(self) -> None:
        """Closes; what still comes is dropped for a moment, since a reset would take what was said with it."""
        if self.closing:
            return
        self.closing = True
        self._closing_at = self.loop.time()
        self._held.clear()
        self._block = None
        self._end_streams(ErrorCode.CANCEL)
        transport = self.transport
        if transport is not None and not transport.is_closing():
            try:
                if transport.can_write_eof():
                    transport.write_eof()
                else:
                    transport.close()
            except OSError:  # the peer was faster
                transport.abort()

    def _end_streams(self, code: int) -> None:
        for stream in list(self.streams.values()):
            stream.close()
            stream.handler.reset(code)

    def check(self, now: float) -> None:
        """Looks at the time-outs; called by a sweep."""
        limits = self.limits
        if self.closing:
            if now - self._closing_at > limits.linger_s and self.transport is not None:
                self.transport.abort()
            return
        if now - self._paused_at > limits.stall_timeout_s:
            self.lost(None)
            return
        if now - self._block_at > limits.header_timeout_s:
            self.fault(ErrorCode.ENHANCE_YOUR_CALM, "a header block took too long")
            return
        for stream in list(self.backlog):
            if now - stream.progress_at > limits.stall_timeout_s and not stream.closed:
                handler = stream.handler
                stream.reset(ErrorCode.CANCEL)
                handler.reset(ErrorCode.CANCEL)
        self._keep_alive(now)

    def _keep_alive(self, now: float) -> None:
        if self.heard:
            self.heard = False
            self._quiet_at = now
            self._asked_at = None
        elif self._asked_at is not None:
            if now - self._asked_at > self.limits.keepalive_timeout_s:
                self.lost(None)
        elif now - self._quiet_at > self.limits.keepalive_s:
            self._asked_at = now
            self.emit(frame(frames.PING, 0, 0, b"springti"))

    # ------------------------------------------------------------ frames

    def spend(self, cost: int = 1) -> None:
        """The peer made us work for nothing. Raises ConnectionFault when it did so too often."""
        if not self._calm.spend(cost) and not self._calm.refill(self.loop.time()):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self._settled and kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if kind == frames.DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window(stream_id, payload)
        elif kind == frames.HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, payload)
        elif kind == frames.PING:
            self._on_ping(flags, stream_id, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == frames.GOAWAY:
            self.spend()
            if stream_id or len(payload) < 8:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "malformed GOAWAY")
            self.on_goaway(int.from_bytes(payload[:4], "big") & frames.MAX_STREAM_ID)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE has no place here")
        else:
            self.spend()
            if kind == frames.PRIORITY:
                if not stream_id:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of stream 0")
                if len(payload) != 5:
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is 5 bytes")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA of stream 0")
        size = len(payload)  # padding counts
        self.receive_window -= size
        if self.receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        if flags & frames.PADDED:
            payload = frames.unpad(payload, flags)
        ends = flags & frames.END_STREAM
        if not payload and not ends:
            self.spend()
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA of a stream that was never opened")
            self.spend()
            self.consumed(size)
            return
        if stream.ended_in:
            self.consumed(size)
            self._stream_fault(stream, ErrorCode.STREAM_CLOSED)
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self.consumed(size)
            self._stream_fault(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if payload:
            stream.handler.data(payload, size)
        elif size:
            stream.consumed(size)
        if ends and not stream.closed:
            stream.end_in()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS of stream 0")
        payload = frames.unpad(payload, flags)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            if int.from_bytes(payload[:4], "big") & frames.MAX_STREAM_ID == stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._decode(flags, stream_id, payload)
            return
        self._block, self._block_id, self._block_flags = bytearray(payload), stream_id, flags
        self._block_frames = 0
        self._block_at = self.loop.time()

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block_frames += 1
        block += payload
        if self._block_frames > self.limits.max_continuations:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block in too many frames")
        if len(block) > self.limits.max_header_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")
        if flags & frames.END_HEADERS:
            self._block = None
            self._block_at = _NEVER
            self._decode(self._block_flags, self._block_id, bytes(block))

    def _decode(self, flags: int, stream_id: int, block: bytes) -> None:
        fields = self._known_blocks.get(block)
        if fields is None:
            try:
                fields = cast(Headers, self._decoder.decode(block, raw=True))
            except (HPACKError, IndexError, ValueError) as error:
                code = ErrorCode.ENHANCE_YOUR_CALM if "larger" in str(error) else ErrorCode.COMPRESSION_ERROR
                raise ConnectionFault(code, f"header block: {error}") from None
            if len(self._known_blocks) >= _MAX_KNOWN_BLOCKS or (block and min(block) < _INDEXED):
                self._known_blocks.clear()  # the table may have changed
            if block and len(block) <= _LONGEST_KNOWN_BLOCK and min(block) >= _INDEXED:
                self._known_blocks[block] = fields
        self.spend(len(fields) // self.limits.fields_per_cost)
        ends = bool(flags & frames.END_STREAM)
        stream = self.streams.get(stream_id)
        try:
            self.on_header_list(stream, stream_id, fields, ends)
        except StreamFault as fault:
            stream = self.streams.get(stream_id)
            if stream is not None:
                self._stream_fault(stream, fault.code)
            else:
                self.spend(self.limits.reset_cost)
                self.emit_control(frames.reset_frame(stream_id, fault.code))

    def on_header_list(self, stream: Stream | None, stream_id: int, fields: Headers, ends: bool) -> None:
        """A whole header list. Raises StreamFault or ConnectionFault."""
        raise NotImplementedError

    def on_goaway(self, last_id: int) -> None:
        """The peer opens no more streams, or takes none after `last_id`."""

    def on_pong(self) -> None:
        """The peer answered a PING."""

    def _stream_fault(self, stream: Stream, code: ErrorCode) -> None:
        """Resets a stream for its peer's fault; costs as much as a reset by the peer."""
        self.spend(self.limits.reset_cost)
        stream.reset(code)
        stream.handler.reset(code)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is 4 bytes")
        if not stream_id or stream_id > self.last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of a stream that was never opened")
        stream = self.streams.get(stream_id)
        self.spend(self.limits.reset_cost if stream is not None else 1)
        if stream is not None:
            stream.close()
            stream.handler.reset(int.from_bytes(payload, "big"))

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING is 8 bytes")
        self.spend()
        if flags & frames.ACK:
            self.on_pong()
        else:
            self.emit_control(frame(frames.PING, frames.ACK, 0, payload))

    # ------------------------------------------------------------ settings and windows

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            if not self._settled:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self.spend()
            return
        self._settled = True
        entries = frames.read_settings(payload)
        if len(entries) > _MAX_SETTINGS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        self.spend(1 + len(self.streams) // 16)
        for key, value in entries:
            self._check_setting(key, value)
        for key, value in dict(entries).items():  # the last of each counts
            if key == frames.INITIAL_WINDOW_SIZE:
                self._new_initial_window(value)
            elif key == frames.MAX_FRAME_SIZE:
                self.peer_frame_size = min(value, 4 * frames.DEFAULT_FRAME_SIZE)
        self.emit_control(frame(frames.SETTINGS, frames.ACK, 0))
        self._pump()

    def _check_setting(self, key: int, value: int) -> None:
        if key == frames.INITIAL_WINDOW_SIZE and value > frames.MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {value}")
        if key == frames.MAX_FRAME_SIZE and not frames.DEFAULT_FRAME_SIZE <= value < 1 << 24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame size of {value}")
        if key == frames.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")

    def _new_initial_window(self, value: int) -> None:
        change, self.peer_window = value - self.peer_window, value
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond 2^31-1")
            if stream.pending is not None and stream.send_window > 0:
                self._waiting[stream] = None

    def _on_window(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is 4 bytes")
        self.spend()
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if not stream_id:
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window increment of 0")
            self.send_window += increment
            if self.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond 2^31-1")
            self._pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that was never opened")
            return
        stream.send_window += increment
        if not increment:
            self._stream_fault(stream, ErrorCode.PROTOCOL_ERROR)
        elif stream.send_window > frames.MAX_WINDOW:
            self._stream_fault(stream, ErrorCode.FLOW_CONTROL_ERROR)
        elif stream.pending is not None:
            self.pump(stream)

    def consumed(self, size: int) -> None:
        """Gives bytes back to the connection's window, in good portions."""
        self._owed += size
        if self._owed >= self.limits.connection_window_bytes // 2:
            self.receive_window += self._owed
            self.emit_control(window_frame(0, self._owed))
            self._owed = 0
