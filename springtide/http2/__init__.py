"""HTTP/2 on an asyncio Protocol (RFC 9113): the server side of a gRPC front, and a relay of its streams.

server = Http2Server(accept, Http2Limits())          # accept(stream, headers) -> StreamHandler
port = await server.start("127.0.0.1", 0, tls=None)
...
await server.close(drain_s=30)

A `Stream` is written to directly: `send_headers`, `send`, `finish`, `reset`. Frames of one loop pass leave in one write
per connection. Header blocks are bytes that the caller made (`encode_headers`): nothing here keeps a dynamic table for
what it sends.
"""

from springtide.http2.frames import ErrorCode
from springtide.http2.headers import encode_headers
from springtide.http2.limits import Http2Limits
from springtide.http2.relay import StreamRelay
from springtide.http2.server import Http2Server, ServerConnection
from springtide.http2.stream import Stream, StreamHandler

__all__ = [
    "ErrorCode",
    "Http2Limits",
    "Http2Server",
    "ServerConnection",
    "Stream",
    "StreamHandler",
    "StreamRelay",
    "encode_headers",
]
