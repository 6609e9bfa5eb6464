"""A small HTTP/1.1 server as an asyncio Protocol: whole requests in, replies or event streams out.

Made for hundreds of concurrent streams on a shared core: no task, queue or future per request; handlers are calls.
Requests of one connection are served one after the other; bodies, heads and pipelined requests are bounded.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import unquote

import httptools
import orjson

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 16
_REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    413: "Payload Too Large", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable",
}  # fmt: skip
_JSON = "application/json"


class Exchange:
    """One request and the way to answer it. `gone` is true once the client has left."""

    __slots__ = ("_connection", "_streaming", "body", "gone", "headers", "local", "method", "on_gone", "path", "query")

    def __init__(
        self, connection: "Connection", method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        path, _, query = target.partition("?")
        self._connection = connection
        self._streaming = False
        self.method = method
        self.path = path
        self.query = _parse_query(query)
        self.headers = headers
        self.body = body
        self.local = connection.local
        self.gone = False
        self.on_gone: Callable[[], None] | None = None

    def reply(
        self, status: int, body: object = b"", content_type: str = _JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a whole body: bytes as they are, anything else as JSON."""
        if self.gone:
            return
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        self._connection.send(_head(status, content_type, headers, f"content-length: {len(raw)}\r\n") + raw)
        self._connection.served(self)

    def start_events(self, first: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Begin an event stream; its first events leave in one write with the head."""
        if self.gone:
            return
        self._streaming = True
        head = _head(200, "text/event-stream; charset=utf-8", headers, "transfer-encoding: chunked\r\n")
        self._connection.send(head + _chunk(first) if first else head)

    def events(self, data: bytes) -> None:
        """Send whole events of a started stream."""
        if data and not self.gone:
            self._connection.send(_chunk(data))

    def end_events(self, last: bytes = b"") -> None:
        """Send the last events and end the stream; the connection stays."""
        if not self.gone:
            self._connection.send((_chunk(last) if last else b"") + b"0\r\n\r\n")
            self._connection.served(self)

    @property
    def streaming(self) -> bool:
        """True once the head of an event stream has been sent."""
        return self._streaming

    @property
    def congested(self) -> bool:
        """True while the client reads more slowly than it is sent to."""
        return self._connection.congested

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call this once when a congested client reads again."""
        self._connection.on_relief = callback

    def cut(self) -> None:
        """Close the connection without an end, after what was already sent."""
        self._connection.close()


class Connection(asyncio.Protocol):
    """One client connection. `handler` is called with each Exchange, in order."""

    def __init__(self, handler: Callable[[Exchange], None], connections: "set[Connection]") -> None:
        self._handler = handler
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._pending: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._closing = False
        self.congested = False
        self.on_relief: Callable[[], None] | None = None
        self.local = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        peer = transport.get_extra_info("peername")
        self.local = not isinstance(peer, tuple) or peer[0] in ("127.0.0.1", "::1")
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        exchanges = [self._current, *self._pending] if self._current else list(self._pending)
        self._current = None
        self._pending.clear()
        self.on_relief = None
        for exchange in exchanges:
            exchange.gone = True
            if exchange.on_gone is not None:
                exchange.on_gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")
        self._serve()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        callback, self.on_relief = self.on_relief, None
        if callback is not None:
            callback()

    # httptools calls these while it parses
    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and self._current is None:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413, f"request body is larger than {MAX_BODY_BYTES} bytes")
        elif not self._closing:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._closing:
            return
        method = self._parser.get_method().decode("latin-1")
        target = self._target.decode("latin-1")
        exchange = Exchange(self, method, target, self._headers, b"".join(self._body))
        self._target, self._headers, self._body, self._body_bytes, self._head_bytes = b"", {}, [], 0, 0
        if not self._parser.should_keep_alive():
            exchange.headers["connection"] = "close"
        if len(self._pending) < MAX_PIPELINED:
            self._pending.append(exchange)
        else:
            self.close()

    def send(self, data: bytes) -> None:
        """Write to the client, if it is still there."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def served(self, exchange: Exchange) -> None:
        """The exchange has been answered: take the next one, or close if the client asked for that."""
        if exchange.headers.get("connection", "").lower() == "close":
            self._current = None
            self.close()
            return
        self._current = None
        self._serve()

    def _serve(self) -> None:
        # not inside the parser's callbacks: it would take an exception of the handler for bad input
        if self._current is None and self._pending and not self._closing:
            self._current = self._pending.popleft()
            self._handler(self._current)

    def close(self) -> None:
        """Close after what was already written."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close a kept-alive connection on which nothing is being answered."""
        if self._current is None:
            self.close()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"request head is larger than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        if not self._closing:
            raw = orjson.dumps(
                {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
            )
            self.send(_head(status, _JSON, None, f"content-length: {len(raw)}\r\nconnection: close\r\n") + raw)
            self.close()


def _parse_query(query: str) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        values.setdefault(unquote(name), []).append(unquote(value.replace("+", " ")))
    return values


def _head(status: int, content_type: str, headers: Mapping[str, str] | None, framing: str) -> bytes:
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items()) if headers else ""
    reason = _REASONS.get(status, "Unknown")
    return f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\n{extra}{framing}\r\n".encode(
        "latin-1", "replace"
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
