"""The bytes of HTTP/2 frames, and the faults that end a connection."""

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

HEAD_BYTES = 9
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_SIZE = 16_384
MAX_WINDOW = 2**31 - 1
MAX_STREAM_ID = 2**31 - 1

pack_head = Struct(">HBBBI").pack
"""length >> 8, length & 255, type, flags, stream id."""


class ErrorCode(IntEnum):
    """RFC 9113 §7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The connection cannot go on: GOAWAY with `code`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFault(Exception):
    """One stream cannot go on: RST_STREAM with `code`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


SIZES = tuple(size.to_bytes(3, "big") for size in range(1024))
"""The first three bytes of frames with short payloads."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame."""
    size = len(payload)
    return pack_head(size >> 8, size & 255, kind, flags, stream_id) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    """SETTINGS."""
    entries = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values.items())
    return frame(SETTINGS, 0, 0, entries)


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The entries of a SETTINGS payload, in order. Raises ConnectionFault."""
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a size that is no multiple of 6")
    at = range(0, len(payload), 6)
    return [(int.from_bytes(payload[i : i + 2], "big"), int.from_bytes(payload[i + 2 : i + 6], "big")) for i in at]


def window_frame(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def reset_frame(stream_id: int, code: int) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway_frame(last_id: int, code: int, message: str = "") -> bytes:
    """GOAWAY."""
    return frame(GOAWAY, 0, 0, last_id.to_bytes(4, "big") + code.to_bytes(4, "big") + message.encode()[:200])


def header_frames(stream_id: int, block: bytes, end_stream: bool, frame_size: int) -> bytes:
    """HEADERS, and CONTINUATION where the block is larger than a frame."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= frame_size:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[at : at + frame_size] for at in range(0, len(block), frame_size)]
    frames = [frame(HEADERS, flags, stream_id, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1])])


def unpad(payload: bytes, flags: int) -> bytes:
    """What is left of a DATA or HEADERS payload without its padding. Raises ConnectionFault."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a pad length")
    padding = payload[0]
    if padding >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - padding]
