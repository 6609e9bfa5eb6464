"""Header lists: made into blocks without a dynamic table, and judged when they come in."""

from collections.abc import Iterable

from springtide.http2.frames import ErrorCode, StreamFault

Headers = list[tuple[bytes, bytes]]
"""Fields in order; names in lower case, pseudo-headers first."""

_STATUS_200 = b"\x88"
_CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_REQUEST_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority", b":protocol"))
_NOT_IN_NAMES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ") | frozenset(range(0x21)) | frozenset(range(0x7F, 0x100))


def _integer(value: int, prefix_bits: int, first: int) -> bytes:
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes((first | value,))
    out = bytearray((first | limit,))
    value -= limit
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_headers(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block of literals that no table remembers: the same bytes on every connection."""
    out = []
    for name, value in fields:
        if name == b":status" and value == b"200":
            out.append(_STATUS_200)
        else:
            out += (b"\x00", _integer(len(name), 7, 0), name, _integer(len(value), 7, 0), value)
    return b"".join(out)


def check_request(fields: Headers) -> None:
    """Raises StreamFault for a malformed request (RFC 9113 §8.2, §8.3)."""
    seen: set[bytes] = set()
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in seen or name not in _REQUEST_PSEUDO:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"misplaced, repeated or unknown {name!r}")
            seen.add(name)
        else:
            regular = True
            _check_field(name, value)
        if b"\0" in value or b"\r" in value or b"\n" in value:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"a line break in the value of {name!r}")
    if b":protocol" in seen or not {b":method", b":scheme", b":path"} <= seen:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a request needs :method, :scheme and :path")


def check_trailers(fields: Headers) -> None:
    """Raises StreamFault for pseudo-headers or malformed fields."""
    for name, value in fields:
        if name[:1] == b":":
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a pseudo-header in trailers")
        _check_field(name, value)


def _check_field(name: bytes, value: bytes) -> None:
    if not name or not _NOT_IN_NAMES.isdisjoint(name):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"malformed field name {name[:32]!r}")
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"{name!r} has no place in HTTP/2")


def without_connection_fields(fields: Headers) -> Headers:
    """What may be passed on."""
    return [field for field in fields if field[0] not in _CONNECTION_FIELDS]
