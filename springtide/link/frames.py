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

MAX_UNREAD_BYTES = 256 * 1024
"""Of frames other than DATA that wait for a peer that reads nothing: some 30,000 of them."""
ORDERS = 32 * 1024
"""CREDIT, CLOSE and RESET that are taken between two looks at a link (0.2 s): four for each stream."""
ASIDE = 128
"""So many of them one PING, PONG or GOAWAY counts for: a peer sends one in two seconds."""

LOST, LEFT, ABORTED = "lost", "left", "aborted"
"""Why a link ended: by its connection; because one side has no use for it; with this process."""
MALFORMED, FLOOD, UNREAD, SILENT = "malformed", "flood", "unread", "silent"
"""And for what the peer did: no frames, more of them than anybody needs, read nothing, said nothing."""


class LinkError(Exception):
    """What came is no springtide-link/1, or too much of it; the link ends."""

    def __init__(self, message: str, reason: str = MALFORMED) -> None:
        super().__init__(message)
        self.reason = reason


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(stream, kind << KIND_SHIFT | len(payload)) + payload
