"""Where an HTTP/1.1 body ends: by length, by chunks, or by end of connection.

Each body takes raw bytes and gives payload. `aligned` says that the last `feed` began and ended on a chunk border with
no trailers, so that the raw bytes may be passed on as they are. `rest` holds what came after the end.
"""

_HEX = b"0123456789abcdefABCDEF"
_MAX_LINE = 1024
_MAX_TRAILER = 16 * 1024
LAST_CHUNK = b"0\r\n\r\n"
_ENDING = b"\r\n" + LAST_CHUNK


class FramingError(ValueError):
    """The bytes are no valid body."""


class LengthBody:
    """A body of exactly `length` bytes."""

    __slots__ = ("done", "left", "rest")
    aligned = False
    until_close = False

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Payload in `data`."""
        if len(data) > self.left:
            data, self.rest = data[: self.left], data[self.left :]
        self.left -= len(data)
        self.done = self.left == 0
        return data


class CloseBody:
    """A body that only the end of the connection ends."""

    __slots__ = ()
    aligned = False
    until_close = True
    done = False
    rest = b""

    def feed(self, data: bytes) -> bytes:
        """Payload in `data`."""
        return data


class ChunkedBody:
    """A chunked body (RFC 9112 §7.1). Extensions and trailers are dropped. Raises FramingError."""

    __slots__ = ("_carry", "_left", "_trailer_bytes", "_trailers", "aligned", "done", "rest")
    until_close = False

    def __init__(self) -> None:
        self._carry = b""  # an unfinished size line, chunk end or trailer line
        self._left = 0  # payload bytes still missing from the open chunk
        self._trailers = False
        self._trailer_bytes = 0
        self.aligned = False
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Payload in `data`."""
        if not self._left and not self._carry and not self._trailers:
            # The usual read is exactly one chunk, or the last two: one slice.
            end = data.find(b"\r\n", 0, 18)
            if end > 0:
                line = data[:end]
                if not line.translate(None, _HEX):
                    size = int(line, 16)
                    more = len(data) - size - end - 4
                    if size and more == 0 and data.endswith(b"\r\n"):
                        self.aligned = True
                        return data[end + 2 : -2]
                    if size and more == 5 and data.endswith(_ENDING):
                        self.aligned = self.done = True
                        return data[end + 2 : -7]
        return self._walk(data)

    def _walk(self, data: bytes) -> bytes:
        clean = not self._left and not self._carry and not self._trailers
        if self._carry:
            data, self._carry = self._carry + data, b""
        at, end, pieces = 0, len(data), []
        while at < end and not self.done:
            if self._left > 2:
                piece = data[at : at + self._left - 2]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
            elif self._left:
                # `_left` counts the CRLF that ends the chunk.
                if data[at] != b"\r\n"[2 - self._left]:
                    raise FramingError("a chunk is longer than its size says")
                at += 1
                self._left -= 1
            else:
                border = data.find(b"\r\n", at, at + _MAX_LINE)
                if border < 0:
                    if end - at >= _MAX_LINE:
                        raise FramingError("a chunk's size line is too long")
                    self._carry = data[at:]
                    break
                self._line(data[at:border])
                at = border + 2
        if self.done:
            self.rest = data[at:]
        self.aligned = clean and not self._carry and not self._left and not self._trailer_bytes and not self.rest
        self.aligned = self.aligned and (self.done or not self._trailers)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if b"\n" in line or b"\r" in line:  # another parser would see two lines: a place to hide a request in
            raise FramingError("a line of a chunked body must end with CRLF")
        if self._trailers:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > _MAX_TRAILER:
                raise FramingError("trailers are too long")
            self.done = not line
            return
        size, _, _ = line.partition(b";")
        size = size.rstrip(b" \t")
        if not size or len(size) > 16 or size.translate(None, _HEX):
            raise FramingError(f"bad chunk size {line[:32]!r}")
        self._left = int(size, 16)
        if self._left:
            self._left += 2
        else:
            self._trailers = True


Body = LengthBody | CloseBody | ChunkedBody


def chunk(payload: bytes) -> bytes:
    """`payload` as one chunk; empty payload gives nothing (an empty chunk would end the body)."""
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
