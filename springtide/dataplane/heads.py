"""Heads of requests and answers: parsed by httptools, written by joining bytes.

The same heads come again and again on kept-alive connections, so what was read of one is kept (`RequestHeads`,
`ResponseHeads`): by its bytes, but for the digits of Content-Length. Kept heads are shared and never changed.
"""

from collections.abc import Collection
from functools import lru_cache
from http import HTTPStatus
from typing import Generic, TypeVar

import httptools

from springtide.dataplane.framing import Body, ChunkedBody, CloseBody, LengthBody
from springtide.dataplane.messages import Address, Headers, Reply, Request, Route, TcpAddress, extensions_of

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"expect",
        b"content-length",
    )
)
# Not asked of the upstream: a compressed event stream has no borders to see.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"accept-encoding"}
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_STATUS_LINES = {code: b"HTTP/1.1 %d %b\r\n" % (code, phrase) for code, phrase in _REASONS.items()}

CHUNKED, UNTIL_CLOSE = -1, -2
"""In place of a body's length: how else its end is told."""

LINK_PROTOCOL = b"springtide-link/1"
REFUSAL_HEADER = b"x-springtide-refusal"
FAULT_HEADER = b"x-springtide-fault"
"""On a relay's own 502: how its upstream failed it (an OutcomeKind's value), so that the next relay can tell."""
INCARNATION_HEADER = b"x-springtide-incarnation"
REQUEST_ID_HEADER = b"x-request-id"


class HeadError(ValueError):
    """A head that must be answered with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Sink:
    """Collects httptools' callbacks for exactly one head."""

    __slots__ = ("begun", "body", "complete", "headers", "reason", "url")

    def __init__(self) -> None:
        self.headers: Headers = []
        self.url = b""
        self.reason = b""
        self.begun = 0
        self.body = False
        self.complete = False

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_status(self, status: bytes) -> None:
        self.reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, body: bytes) -> None:
        self.body = True


class RequestHead:
    """A request's head. `length` of its body: bytes, or CHUNKED. `simple`: a POST without expectations."""

    __slots__ = (
        "_lines",
        "extensions",
        "headers",
        "http_1_0",
        "keep_alive",
        "length",
        "method",
        "path",
        "query",
        "simple",
        "start",
        "target",
    )

    def __init__(self, method: str, target: str, headers: Headers, version: str) -> None:
        self.method = method
        self.target = target
        self.path, _, self.query = target.partition("?")
        self.length = _request_length(headers)
        self.keep_alive = _keeps_alive(version, headers)
        self.http_1_0 = version == "1.0"
        self.headers = [field for field in headers if field[0] != b"content-length"]
        self.extensions = extensions_of(headers)
        self.simple = method == "POST" and not any(name == b"expect" for name, _ in headers)
        self.start = f"{method} {target} HTTP/1.1\r\nhost: ".encode("latin-1")
        self._lines: dict[tuple[bytes, ...], bytes] = {}

    def lines(self, own: tuple[bytes, ...]) -> bytes:
        """What of it is passed on, without the fields that a route sets itself."""
        found = self._lines.get(own)
        if found is None:
            found = _keep(self._lines, own, _lines_of(self.headers, _NOT_FORWARDED, own))
        return found

    def request(self, client: str, now: float) -> Request:
        """A request with this head, still without its body."""
        request = Request.__new__(Request)
        request.method = self.method
        request.target = self.target
        request.path = self.path
        request.query = self.query
        request.headers = self.headers
        request.head = self
        request.body = b""
        request.client = client
        request.started_at = now
        request.keep_alive = self.keep_alive
        request.http_1_0 = self.http_1_0
        request.state = None
        request.forget_json()
        return request


def parse_request_head(head: bytes, max_headers: int) -> RequestHead:
    """Reads one request head that ends with its blank line. Raises HeadError."""
    sink = _Sink()
    parser = httptools.HttpRequestParser(sink)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # an offer to upgrade may be declined: it is served as plain HTTP/1.1
    except httptools.HttpParserError as error:
        raise HeadError(400, f"malformed request: {error}") from None
    # A parser that saw a body or a second message inside these bytes does not agree with us about where the head ends.
    if not sink.complete or sink.begun != 1 or sink.body:
        raise HeadError(400, "malformed request: the head does not end with its blank line")
    headers = sink.headers
    if len(headers) > max_headers:
        raise HeadError(431, f"more than {max_headers} header fields")
    method = parser.get_method().decode("latin-1")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise HeadError(400, f"HTTP/{version} is not served; use HTTP/1.1")
    if method == "CONNECT":
        raise HeadError(405, "CONNECT is not served")
    if version == "1.1" and not any(name == b"host" for name, _ in headers):
        raise HeadError(400, "the Host header is missing")
    return RequestHead(method, _target(sink.url), headers, version)


def _target(url: bytes) -> str:
    if not url.startswith(b"/") and url != b"*":
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            raise HeadError(400, "the request target is not valid") from None
        url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
    return url.partition(b"#")[0].decode("latin-1")


def _request_length(headers: Headers) -> int:
    length: bytes | None = None
    chunked = False
    for name, value in headers:
        if name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > 15:
                raise HeadError(400, "Content-Length is not one plain number")
            length = value
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise HeadError(400, "the only Transfer-Encoding that is served is chunked")
            chunked = True
    if chunked:
        if length is not None:
            raise HeadError(400, "Content-Length and Transfer-Encoding together are refused")
        return CHUNKED
    return int(length) if length is not None else 0


class ResponseHead:
    """Head of an upstream's answer. `length` of its body: bytes, CHUNKED or UNTIL_CLOSE."""

    __slots__ = ("_lines", "event_stream", "headers", "keep_alive", "length", "offers", "reason", "refusal", "status")

    def __init__(self, status: int, reason: bytes, headers: Headers, keep_alive: bool, length: int) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.keep_alive = keep_alive and length != UNTIL_CLOSE
        self.length = length
        self.event_stream = False
        self.refusal = ""
        self.offers = False
        """A link for what comes next (springtide.link)."""
        for name, value in headers:
            if name == b"content-type":
                self.event_stream = value.lower().startswith(b"text/event-stream")
            elif name == REFUSAL_HEADER:
                self.refusal = value.decode("latin-1")
            elif name == b"upgrade":
                self.offers = value == LINK_PROTOCOL
        self._lines: dict[tuple[bytes, ...], bytes] = {}

    def lines(self, own: tuple[bytes, ...]) -> bytes:
        """Status line and what of the fields is passed on, without those that a route sets itself."""
        found = self._lines.get(own)
        if found is None:
            status = _STATUS_LINES.get(self.status) or b"HTTP/1.1 %d %b\r\n" % (self.status, self.reason)
            found = _keep(self._lines, own, status + _lines_of(self.headers, _HOP_BY_HOP, own))
        return found


def parse_response_head(head: bytes, method: str = "POST") -> ResponseHead:
    """Reads one answer's head that ends with its blank line. Raises HeadError (status 502)."""
    sink = _Sink()
    parser = httptools.HttpResponseParser(sink)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        raise HeadError(502, "the upstream switched protocols") from None
    except httptools.HttpParserError as error:
        raise HeadError(502, f"malformed answer: {error}") from None
    if not sink.complete or sink.begun != 1 or sink.body:
        raise HeadError(502, "malformed answer: the head does not end with its blank line")
    status = parser.get_status_code()
    if method == "HEAD" or status in (204, 304) or 100 <= status < 200:
        length = 0
    else:
        length = _response_length(sink.headers)
    keep_alive = _keeps_alive(parser.get_http_version(), sink.headers)
    return ResponseHead(status, sink.reason, sink.headers, keep_alive, length)


def _keeps_alive(version: str, headers: Headers) -> bool:
    """What the head says of its connection. The parser's own answer is gone once a message without a body is over."""
    said = b",".join(value for name, value in headers if name == b"connection").lower()
    if not said:
        return version == "1.1"
    options = {option.strip() for option in said.split(b",")}
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


def _response_length(headers: Headers) -> int:
    length = UNTIL_CLOSE
    for name, value in headers:
        if name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise HeadError(502, f"the upstream's Transfer-Encoding {value[:40]!r} is not served")
            return CHUNKED
        if name == b"content-length":
            if not value.isdigit():
                raise HeadError(502, "the upstream's Content-Length is no number")
            length = int(value)
    return length


def body_of(length: int) -> Body:
    """The reader of a body of so many bytes, or one that is CHUNKED or UNTIL_CLOSE."""
    if length >= 0:
        return LengthBody(length)
    return ChunkedBody() if length == CHUNKED else CloseBody()


# ---------------------------------------------------------------- heads that were read before

_LENGTH = b"\r\nContent-Length: "
_LENGTH_LOWER = b"\r\ncontent-length: "
_MOST_HEADS = 512
_LONGEST_HEAD = 4096
_MOST_LINES = 8


def _split_length(head: bytes) -> tuple[bytes, int]:
    """The head without its Content-Length's digits, and these as a number; (head, -1) where the field is not there in
    one of its usual forms; (b"", -1) where it is there and holds anything but plain digits."""
    at = head.find(_LENGTH_LOWER)
    if at < 0:
        at = head.find(_LENGTH)
        if at < 0:
            return head, -1
    at += 18
    end = head.find(b"\r", at)
    digits = head[at:end]
    if end - at > 15 or not digits.isdigit():
        return b"", -1
    return head[:at] + head[end:], int(digits)


Head = TypeVar("Head", RequestHead, ResponseHead)


class _KnownHeads(Generic[Head]):
    """Bounded; the oldest goes first. A head's second Content-Length is part of the key: it was refused when read."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def find(self, head: bytes) -> tuple[Head | None, int]:
        """What was read of such a head before, and the length of this one's body."""
        key, length = _split_length(head)
        known = self._known.get(key)
        if length < 0 and known is not None:
            length = known.length
        return known, length

    def keep(self, head: bytes, read: Head) -> None:
        """For the next time."""
        key, length = _split_length(head)
        if key and len(key) <= _LONGEST_HEAD and (length < 0 or length == read.length):
            if len(self._known) >= _MOST_HEADS:
                del self._known[next(iter(self._known))]
            self._known[key] = read


class RequestHeads(_KnownHeads[RequestHead]):
    """Heads of clients' requests."""

    __slots__ = ("_max_headers",)

    def __init__(self, max_headers: int) -> None:
        super().__init__()
        self._max_headers = max_headers

    def read(self, head: bytes) -> RequestHead:
        """Parses one that `find` did not know. Raises HeadError."""
        read = parse_request_head(head, self._max_headers)
        self.keep(head, read)
        return read


class ResponseHeads(_KnownHeads[ResponseHead]):
    """Heads of upstreams' answers to anything but HEAD."""

    __slots__ = ()

    def read(self, head: bytes) -> ResponseHead:
        """Parses one that `find` did not know. Raises HeadError."""
        read = parse_response_head(head)
        if read.status >= 200 and read.status not in (204, 304):  # these have no body, whatever length they name
            self.keep(head, read)
        return read


# ---------------------------------------------------------------- writing


def _lines_of(headers: Headers, dropped: Collection[bytes], own: Collection[bytes]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        if name not in dropped and name not in own:
            parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)


def _keep(lines: dict[tuple[bytes, ...], bytes], own: tuple[bytes, ...], made: bytes) -> bytes:
    if len(lines) >= _MOST_LINES:
        lines.clear()
    lines[own] = made
    return made


def encode_request(request: Request, route: Route) -> bytes:
    """The request as it goes upstream: same target and body, hop-by-hop fields gone, the route's fields added."""
    body = request.body if route.body is None else route.body
    added = route.headers
    own = _names(added)
    head = request.head
    if head is not None and head.headers is request.headers:
        lines, start = head.lines(own), head.start
    else:
        lines, start = _lines_of(request.headers, _NOT_FORWARDED, own), b""
    if route.target is not None or not start:
        target = request.target if route.target is None else route.target
        start = f"{request.method} {target} HTTP/1.1\r\nhost: ".encode("latin-1")
    parts = [start, _host(route.address), lines]
    for name, value in added:
        parts += (name, b": ", value, b"\r\n")
    if body or request.method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        parts += (b"content-length: %d\r\n\r\n" % len(body), body)
    else:
        parts.append(b"\r\n")
    return b"".join(parts)


def _names(added: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, ...]:
    count = len(added)
    if count == 1:
        return (added[0][0],)
    if count == 2:
        return added[0][0], added[1][0]
    return tuple([name for name, _ in added])


@lru_cache(maxsize=1024)
def _host(address: Address) -> bytes:
    """The value of the Host field and its end."""
    return (str(address) if isinstance(address, TcpAddress) else "localhost").encode("latin-1") + b"\r\n"


def encode_response_head(
    head: ResponseHead, extra: tuple[tuple[bytes, bytes], ...], framing: bytes, keep_alive: bool
) -> bytes:
    """The answer's head as it goes to the client. `framing` is the whole length or encoding line, or empty."""
    parts = [head.lines(_names(extra))]
    for name, value in extra:
        parts += (name, b": ", value, b"\r\n")
    parts += (framing, b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)


def encode_reply(reply: Reply, method: str, keep_alive: bool) -> bytes:
    """A local answer, head and body in one piece."""
    parts = [_STATUS_LINES.get(reply.status) or b"HTTP/1.1 %d Status\r\n" % reply.status]
    for name, value in reply.headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"content-length: %d\r\n" % len(reply.body))
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    if method != "HEAD":
        parts.append(reply.body)
    return b"".join(parts)
