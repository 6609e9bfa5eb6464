"""Heads of requests and answers: parsed by httptools, written by joining bytes."""

from http import HTTPStatus

import httptools

from springtide.dataplane.framing import Body, ChunkedBody, CloseBody, LengthBody
from springtide.dataplane.messages import Address, Headers, Reply, Request, Route, TcpAddress

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


def parse_request_head(head: bytes, max_headers: int) -> tuple[Request, Body]:
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
        raise HeadError(505, f"HTTP/{version} is not served; use HTTP/1.1")
    if method == "CONNECT":
        raise HeadError(405, "CONNECT is not served")
    request = Request(
        method, _target(sink.url), headers, keep_alive=_keeps_alive(version, headers), http_1_0=version == "1.0"
    )
    if version == "1.1" and request.header(b"host") is None:
        raise HeadError(400, "the Host header is missing")
    return request, _request_body(headers)


def _target(url: bytes) -> str:
    if not url.startswith(b"/") and url != b"*":
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            raise HeadError(400, "the request target is not valid") from None
        url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
    return url.partition(b"#")[0].decode("latin-1")


def _request_body(headers: Headers) -> Body:
    length: bytes | None = None
    chunked = False
    for name, value in headers:
        if name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > 15:
                raise HeadError(400, "Content-Length is not one plain number")
            length = value
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise HeadError(501, "the only Transfer-Encoding that is served is chunked")
            chunked = True
    if chunked:
        if length is not None:
            raise HeadError(400, "Content-Length and Transfer-Encoding together are refused")
        return ChunkedBody()
    return LengthBody(int(length) if length is not None else 0)


class ResponseHead:
    """Status, headers and framing of an upstream's answer."""

    __slots__ = ("body", "event_stream", "headers", "keep_alive", "reason", "refusal", "status")

    def __init__(self, status: int, reason: bytes, headers: Headers, keep_alive: bool, body: Body) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.keep_alive = keep_alive and not body.until_close
        self.body = body
        self.event_stream = False
        self.refusal = ""
        for name, value in headers:
            if name == b"content-type":
                self.event_stream = value.lower().startswith(b"text/event-stream")
            elif name == REFUSAL_HEADER:
                self.refusal = value.decode("latin-1")


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
    body: Body
    if method == "HEAD" or status in (204, 304) or 100 <= status < 200:
        body = LengthBody(0)
    else:
        body = _response_body(sink.headers)
    return ResponseHead(status, sink.reason, sink.headers, _keeps_alive(parser.get_http_version(), sink.headers), body)


def _keeps_alive(version: str, headers: Headers) -> bool:
    """What the head says of its connection. The parser's own answer is gone once a message without a body is over."""
    said = b",".join(value for name, value in headers if name == b"connection").lower()
    if not said:
        return version == "1.1"
    options = {option.strip() for option in said.split(b",")}
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


def _response_body(headers: Headers) -> Body:
    length: int | None = None
    for name, value in headers:
        if name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise HeadError(502, f"the upstream's Transfer-Encoding {value[:40]!r} is not served")
            return ChunkedBody()
        if name == b"content-length":
            if not value.isdigit():
                raise HeadError(502, "the upstream's Content-Length is no number")
            length = int(value)
    return CloseBody() if length is None else LengthBody(length)


def encode_request(request: Request, route: Route) -> bytes:
    """The request as it goes upstream: same target and body, hop-by-hop fields gone, the route's fields added."""
    body = request.body if route.body is None else route.body
    target = request.target if route.target is None else route.target
    parts = [f"{request.method} {target} HTTP/1.1\r\nhost: {_host(route.address)}\r\n".encode("latin-1")]
    own = {name for name, _ in route.headers}
    for name, value in request.headers:
        if name not in _NOT_FORWARDED and name not in own:
            parts += (name, b": ", value, b"\r\n")
    for name, value in route.headers:
        parts += (name, b": ", value, b"\r\n")
    if body or request.method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        parts.append(b"content-length: %d\r\n\r\n" % len(body))
    else:
        parts.append(b"\r\n")
    parts.append(body)
    return b"".join(parts)


def _host(address: Address) -> str:
    return str(address) if isinstance(address, TcpAddress) else "localhost"


def encode_response_head(
    head: ResponseHead, extra: tuple[tuple[bytes, bytes], ...], framing: bytes, keep_alive: bool
) -> bytes:
    """The answer's head as it goes to the client. `framing` is the whole length or encoding line, or empty."""
    parts = [_STATUS_LINES.get(head.status) or b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
    own = {name for name, _ in extra}
    for name, value in head.headers:
        if name not in _HOP_BY_HOP and name not in own:
            parts += (name, b": ", value, b"\r\n")
    for name, value in extra:
        parts += (name, b": ", value, b"\r\n")
    parts.append(framing)
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
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
