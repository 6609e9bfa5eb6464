"""gRPC over HTTP/2 as bytes: heads and trailers made once, messages framed, statuses with their details. Pure."""

import base64
import re
import zlib
from collections.abc import Sequence
from urllib.parse import quote_from_bytes

from springtide.errors import Exhausted, Internal, SpringtideError, Unimplemented
from springtide.http2 import encode_headers
from springtide.rpc import to_status

HEAD = encode_headers(((b":status", b"200"), (b"content-type", b"application/grpc")))
"""Of every answer."""
OK = encode_headers(((b"grpc-status", b"0"),))
"""Trailers of every answer that is whole."""
UNSUPPORTED_MEDIA = encode_headers(((b":status", b"415"), (b"content-length", b"0")))
NOT_POST = encode_headers(((b":status", b"405"), (b"allow", b"POST"), (b"content-length", b"0")))

DEADLINE_EXCEEDED = 4
_MAX_BLOCK_BYTES = 6_000
"""Stock clients take 8 KiB of trailers."""
_MAX_MESSAGE_CHARS = 1_000
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_PRINTABLE = "".join(chr(i) for i in range(0x20, 0x7F) if chr(i) != "%")


def continued(guarantee: str, times: int) -> bytes:
    """Trailers of a whole answer that went on elsewhere: how, and how often."""
    fields = ((b"springtide-continuation", guarantee.encode()), (b"springtide-continuations", b"%d" % times))
    return encode_headers(((b"grpc-status", b"0"), *fields))


def timeout_s(value: bytes) -> float | None:
    """`grpc-timeout` in seconds; None for what is none."""
    match = _TIMEOUT.fullmatch(value)
    return int(match[1]) * _UNIT_S[match[2]] if match else None


def status_fields(code: int, message: str, details: bytes = b"") -> list[tuple[bytes, bytes]]:
    """The fields of an error's trailers."""
    fields = [
        (b"grpc-status", b"%d" % code),
        (b"grpc-message", quote_from_bytes(message.encode(), _PRINTABLE).encode()),
    ]
    if details:
        fields.append((b"grpc-status-details-bin", base64.b64encode(details).rstrip(b"=")))
    return fields


def trailers_of(error: SpringtideError) -> list[tuple[bytes, bytes]]:
    """Trailers with google.rpc.Status. What does not fit into a client's bound is shortened, details first."""
    status = to_status(error)
    message = status.message
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + " ..."
        status.message = message
    fields = status_fields(status.code, message, status.SerializeToString())
    if len(encode_headers(fields)) > _MAX_BLOCK_BYTES:
        fields = status_fields(status.code, message)
        while len(encode_headers(fields)) > _MAX_BLOCK_BYTES:
            message = message[: len(message) // 2]
            fields = status_fields(status.code, message)
    return fields


def error_block(fields: list[tuple[bytes, bytes]], started: bool) -> bytes:
    """Trailers, or head and trailers in one block where nothing was sent before."""
    return encode_headers(fields) if started else HEAD + encode_headers(fields)


def refused_encoding(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What tells a client which encodings are taken."""
    return [(b"grpc-accept-encoding", b"identity,deflate,gzip"), *fields]


def unframe(data: bytes | bytearray, encoding: bytes, max_bytes: int) -> bytes:
    """The one message of a unary request. Raises SpringtideError."""
    if len(data) < 5:
        raise Internal("The request ended before its message was complete.", reason="MALFORMED_MESSAGE")
    compressed, size = data[0], int.from_bytes(data[1:5], "big")
    if size > max_bytes:
        raise too_large(size, max_bytes)
    if len(data) != 5 + size:
        what = "more than one message" if len(data) > 5 + size else "an incomplete message"
        raise Internal(f"The request holds {what}; Generate takes exactly one.", reason="MALFORMED_MESSAGE")
    message = bytes(data[5:])
    if not compressed:
        return message
    if compressed != 1 or encoding in (b"", b"identity"):
        raise Internal("The message's compression flag names no encoding.", reason="MALFORMED_MESSAGE")
    return _inflate(message, encoding, max_bytes)


def _inflate(message: bytes, encoding: bytes, max_bytes: int) -> bytes:
    if encoding not in (b"gzip", b"deflate"):
        raise Unimplemented(
            f"The encoding {encoding.decode('latin-1')[:40]!r} is not known here.",
            reason="UNKNOWN_ENCODING",
            remedy="Send the message with gzip, deflate or uncompressed.",
        )
    inflater = zlib.decompressobj(31 if encoding == b"gzip" else 15)
    try:
        plain = inflater.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise Internal(f"The compressed message is broken: {error}.", reason="MALFORMED_MESSAGE") from None
    if len(plain) > max_bytes:
        raise too_large(len(plain), max_bytes)
    if not inflater.eof:
        raise Internal("The compressed message is incomplete.", reason="MALFORMED_MESSAGE")
    return plain


def too_large(size: int, max_bytes: int) -> Exhausted:
    """As grpc itself answers."""
    return Exhausted(
        f"The message has {size} bytes or more; at most {max_bytes} are taken.",
        reason="MESSAGE_TOO_LARGE",
        remedy="Send a shorter prompt.",
    )


# ------------------------------------------------------------ messages


def frame_message(message: bytes) -> bytes:
    """A message behind its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def _short(size: int) -> bytes:
    """Prefix, then GenerateResponse.tokens (2) with Tokens.text (1), for a text of `size` bytes below 126."""
    return b"\0" + (size + 4).to_bytes(4, "big") + bytes((0x12, size + 2, 0x0A, size))


SHORT = tuple(_short(size) for size in range(126))
"""What goes before a text, by its bytes."""


def varint(value: int) -> bytes:
    """A protobuf varint of a non-negative number."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tokens_message(text: str, ids: Sequence[int]) -> bytes:
    """A framed GenerateResponse with Tokens. Raises ValueError, TypeError for what is no int32."""
    raw = text.encode("utf-8", "replace")
    size = len(raw)
    if not ids and 0 < size < len(SHORT):
        return SHORT[size] + raw
    inner = b"\x0a" + varint(size) + raw if raw else b""
    if ids:
        packed = b"".join([varint(i if i >= 0 else i + (1 << 64)) for i in ids])
        if not -(1 << 31) <= min(ids) <= max(ids) < 1 << 31:
            raise ValueError("a token id beyond 32 bits")
        inner += b"\x12" + varint(len(packed)) + packed
    return frame_message(b"\x12" + varint(len(inner)) + inner)
