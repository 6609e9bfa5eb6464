"""Frames of springtide-link/1: eight bytes of head (stream, kind, length; big-endian), then `length` bytes.

A stream is what a TCP connection would be: its bytes are HTTP/1.1, one request after another. The router opens it with
its first DATA. Each side may send WINDOW bytes of DATA on a stream before the other grants more with CREDIT.
"""

from struct import Struct

LINK_PROTOCOL = b"springtide-link/1"
LINK_PATH = "/springtide/link"
OFFER = ((b"connection", b"upgrade"), (b"upgrade", LINK_PROTOCOL))
"""Fields of an answer by which a shim offers its link."""

HEAD = Struct("!II")
"""Stream, then kind (8 bits) and length (24 bits) in one word."""
HEAD_BYTES = HEAD.size
MAX_PAYLOAD_BYTES = 64 * 1024
WINDOW_BYTES = 128 * 1024
"""Of each stream and direction: what a reader that stands still can have waiting for it."""
MAX_STREAMS = 8192
"""Open at a time on one link; further requests take a connection of their own."""
MAX_STREAM_ID = 2**32 - 1

EVENTS = 0x80
"""Added to DATA's kind: the payload is one chunk of whole events (their number is in the other seven bits), which the
shim has looked at. Only from shim to router."""
MAX_EVENTS = 0x7F
DATA, CREDIT, CLOSE, RESET, PING, PONG, GOAWAY = range(7)
"""CREDIT: four bytes, how much more. CLOSE: all was sent and nothing more is read. RESET: given up.
PING, PONG: eight bytes, of stream 0. GOAWAY: of stream 0, no new streams, a text that says why."""
KIND_SHIFT = 24
LENGTH_MASK = (1 << KIND_SHIFT) - 1
CREDIT_BODY = Struct("!I")
PING_BYTES = 8
MAX_REASON_BYTES = 1024


class LinkError(Exception):
    """What came is no springtide-link/1; the link ends."""


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(stream, kind << KIND_SHIFT | len(payload)) + payload
