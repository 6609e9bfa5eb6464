"""Streams of one connection passed on to another server, untouched: what this front does not serve itself.

Each client's connection has one of its own to the other server, opened with the first stream that needs it. Windows
are coupled: what one side cannot send yet is not acknowledged on the other.
"""

import asyncio
import logging

from springtide.http2.connection import Connection, Joiner
from springtide.http2.frames import MAX_STREAM_ID, PREFACE, ErrorCode, StreamFault
from springtide.http2.headers import Headers, encode_headers, without_connection_fields
from springtide.http2.limits import Http2Limits
from springtide.http2.stream import Stream, StreamHandler

log = logging.getLogger(__name__)

_LOST = encode_headers(
    (
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"14"),
        (b"grpc-message", b"the server behind this address is not reachable"),
    )
)


class ClientConnection(Connection):
    """The way to the other server. Streams may be opened before it is connected."""

    def __init__(self, joiner: Joiner, limits: Http2Limits) -> None:
        super().__init__(joiner, limits)
        self.going = False
        self.max_streams = limits.max_streams

    @property
    def usable(self) -> bool:
        """True while a new stream may be opened."""
        return not (self.closing or self.going) and self.last_id < MAX_STREAM_ID - 2

    def greet(self) -> None:
        before, self._out = self._out, []
        self.emit(PREFACE)
        super().greet()
        self._out += before
        self.joiner.add(self)

    def open(self, handler: StreamHandler, block: bytes) -> Stream:
        """A new stream with its request's head."""
        self.last_id += 2 if self.last_id else 1
        stream = Stream(self, self.last_id)
        stream.handler = handler
        self.streams[stream.id] = stream
        stream.send_headers(block)
        return stream

    def on_header_list(self, stream: Stream | None, stream_id: int, fields: Headers, ends: bool) -> None:
        """An answer's head, or its trailers."""
        if stream is None:
            return
        if stream.ended_in:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "HEADERS after the end of a stream")
        stream.handler.headers(fields, ends)
        if ends and not stream.closed:
            stream.end_in()

    def on_goaway(self, last_id: int) -> None:
        self.going = True
        for stream in [s for s in self.streams.values() if s.id > last_id]:
            stream.close()
            stream.handler.reset(ErrorCode.REFUSED_STREAM)

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        if self.going and not self.streams and not self.closing:
            self.flush()
            self.shut()


class StreamRelay:
    """Relays the streams of one client's connection to the server at a unix path."""

    def __init__(self, joiner: Joiner, path: str, limits: Http2Limits) -> None:
        self._joiner = joiner
        self._path = path
        self._limits = limits
        self._up: ClientConnection | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, stream: Stream, fields: Headers) -> StreamHandler:
        """Passes a new stream on."""
        up = self._up
        if up is None or not up.usable:
            up = self._up = ClientConnection(self._joiner, self._limits)
            task = self._joiner.loop.create_task(self._connect(up))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        below, above = _Below(stream), _Above()
        below.other, above.other = above, below
        above.stream = up.open(above, encode_headers(without_connection_fields(fields)))
        return below

    async def _connect(self, up: ClientConnection) -> None:
        try:
            await self._joiner.loop.create_unix_connection(lambda: up, self._path)
        except OSError as error:
            log.error("the server at %s cannot be reached: %s", self._path, error)
            up.lost(error)

    def close(self) -> None:
        """The client's connection is gone."""
        for task in list(self._tasks):
            task.cancel()
        if self._up is not None:
            self._up.lost(None)


class _Side:
    """One end of a relayed stream. DATA is acknowledged as soon as the other end is not held back."""

    stream: Stream
    other: "_Side"

    def __init__(self) -> None:
        self.owed = 0  # taken from `other`'s peer, not acknowledged yet
        self.held = False

    def headers(self, fields: Headers, ends: bool) -> None:
        """Only an answer has some that matter."""

    def data(self, payload: bytes, flow_bytes: int) -> None:
        """Passes on."""
        other = self.other
        other.stream.send(payload)
        if other.held:
            other.owed += flow_bytes
        else:
            self.stream.consumed(flow_bytes)

    def ended(self) -> None:
        """Passes on."""
        self.other.stream.finish()

    def reset(self, code: int) -> None:
        """Passes on."""
        self.other.stream.reset(code)

    def hold_back(self, paused: bool) -> None:
        """Acknowledges what the other end sent meanwhile."""
        self.held = paused
        if not paused and self.owed:
            owed, self.owed = self.owed, 0
            self.other.stream.consumed(owed)


class _Below(_Side):
    """Towards the client."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream


class _Above(_Side):
    """Towards the other server."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = False
        self.trailers: bytes | None = None

    def headers(self, fields: Headers, ends: bool) -> None:
        block = encode_headers(without_connection_fields(fields))
        status = next((value for name, value in fields if name == b":status"), None)
        if status is None:
            self.trailers = block
        else:
            self.answered = self.answered or not status.startswith(b"1")
            self.other.stream.send_headers(block, end_stream=ends)

    def ended(self) -> None:
        self.other.stream.finish(self.trailers or b"")

    def reset(self, code: int) -> None:
        below = self.other.stream
        if not self.answered and code == ErrorCode.CANCEL:
            below.finish(_LOST)
        else:
            below.reset(code)
