"""A server whose streams say what they got, and a client that speaks frames."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from hpack import Decoder, Encoder

from springtide.http2 import Http2Limits, Http2Server, Stream, encode_headers, frames
from springtide.http2.headers import Headers

REQUEST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/x"),
    (b":authority", b"t"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]
HEAD = encode_headers(((b":status", b"200"),))
TRAILERS = encode_headers(((b"grpc-status", b"0"),))


@dataclass
class Echo:
    """Gives back what it gets, and records what happens to it."""

    stream: Stream
    fields: Headers
    got: bytearray = field(default_factory=bytearray)
    resets: list[int] = field(default_factory=list)
    whole: bool = False
    holds: list[bool] = field(default_factory=list)
    consume: bool = True

    def headers(self, fields: Headers, ends: bool) -> None:
        raise AssertionError("a server's stream gets no answer")

    def data(self, payload: bytes, flow_bytes: int) -> None:
        self.got += payload
        if self.consume:
            self.stream.consumed(flow_bytes)

    def ended(self) -> None:
        self.whole = True
        self.stream.send_headers(HEAD)
        if self.got:
            self.stream.send(bytes(self.got))
        self.stream.finish(TRAILERS)

    def reset(self, code: int) -> None:
        self.resets.append(code)

    def hold_back(self, paused: bool) -> None:
        self.holds.append(paused)


@dataclass
class Running:
    server: Http2Server
    port: int
    streams: list[Echo]


Make = Callable[[Stream, Headers], Echo]


@asynccontextmanager
async def serving(limits: Http2Limits | None = None, make: Make = Echo) -> AsyncIterator[Running]:
    streams: list[Echo] = []

    def accept(stream: Stream, fields: Headers) -> Echo:
        streams.append(make(stream, fields))
        return streams[-1]

    server = Http2Server(accept, limits)
    port = await server.start("127.0.0.1", 0)
    try:
        yield Running(server, port, streams)
    finally:
        await server.close()


@dataclass
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def number(self) -> int:
        """The 32 bits that RST_STREAM and WINDOW_UPDATE carry; GOAWAY's error code."""
        return int.from_bytes(self.payload[4:8] if self.kind == frames.GOAWAY else self.payload[:4], "big")


class Client:
    """Raw frames over a socket. `next` skips SETTINGS, WINDOW_UPDATE and PING."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.encoder = Encoder()
        self.decoder = Decoder()

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    def greet(self, **settings: int) -> None:
        values = {getattr(frames, name.upper()): value for name, value in settings.items()}
        self.send(frames.PREFACE, frames.settings_frame(values))

    def request(self, stream: int, fields: Headers = REQUEST, end: bool = True) -> None:
        block = self.encoder.encode(fields)
        self.send(frames.header_frames(stream, block, end, frames.DEFAULT_FRAME_SIZE))

    def data(self, stream: int, payload: bytes, end: bool = False) -> None:
        self.send(frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream, payload))

    async def any(self) -> Frame:
        head = await asyncio.wait_for(self.reader.readexactly(9), 5)
        size = int.from_bytes(head[:3], "big")
        payload = await asyncio.wait_for(self.reader.readexactly(size), 5)
        return Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)

    async def next(self, *kinds: int) -> Frame:
        quiet = (frames.SETTINGS, frames.WINDOW_UPDATE, frames.PING)
        while True:
            frame = await self.any()
            if frame.kind in kinds or (not kinds and frame.kind not in quiet):
                return frame

    async def answer(self, stream: int) -> tuple[Headers, bytes, Headers]:
        """Head, body and trailers of one stream."""
        lists: list[Headers] = []
        body = bytearray()
        while True:
            frame = await self.next()
            if frame.kind == frames.RST_STREAM and not frame.number:
                continue  # an answer before the request was whole
            assert frame.stream == stream, frame
            if frame.kind == frames.HEADERS:
                lists.append([(bytes(k), bytes(v)) for k, v in self.decoder.decode(frame.payload, raw=True)])
            else:
                assert frame.kind == frames.DATA, frame
                body += frame.payload
            if frame.flags & frames.END_STREAM:
                return lists[0], bytes(body), lists[-1]

    async def gone(self) -> int:
        """The error code of the GOAWAY that ends the connection."""
        code = -1
        try:
            while True:
                frame = await self.any()
                if frame.kind == frames.GOAWAY:
                    code = frame.number
        except (asyncio.IncompleteReadError, ConnectionError):
            return code


@asynccontextmanager
async def client(port: int, greet: bool = True, **settings: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = Client(reader, writer)
    if greet:
        made.greet(**settings)
    try:
        yield made
    finally:
        writer.close()
