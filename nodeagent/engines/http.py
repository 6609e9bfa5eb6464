"""A small HTTP client for an engine on this host: one request per connection, bounded in size and time.

Made for probes (once a second for each worker), over a unix socket or TCP. Nothing is kept between two requests.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import httptools
import orjson

from springtide.dataplane.messages import UnixAddress, parse_address
from springtide.errors import Unavailable

MAX_BODY_BYTES = 4 * 1024 * 1024
_READ_BYTES = 64 * 1024


class NotListening(Unavailable):
    """Nobody accepts connections at the endpoint: the engine starts, or has ended."""

    default_reason = "ENGINE_NOT_LISTENING"


class NoAnswer(Unavailable):
    """The engine accepted, but gave no whole answer in time or of a sane size."""

    default_reason = "ENGINE_NO_ANSWER"


@dataclass(slots=True)
class Response:
    """One answer. `status` 0 until the head has come."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> object:
        """The body as JSON; None when it is none."""
        try:
            value: object = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None
        return value

    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")


class EngineHttp:
    """Requests to one engine. `endpoint` is `unix:PATH` or `HOST:PORT`; ValueError when it is neither."""

    def __init__(self, endpoint: str, timeout_s: float = 5.0, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._address = parse_address(endpoint)
        self._max_body_bytes = max_body_bytes

    async def get(self, path: str, timeout_s: float | None = None) -> Response:
        """GET. Raises NotListening or NoAnswer; any status is an answer."""
        return await self.request("GET", path, timeout_s=timeout_s)

    async def post(
        self, path: str, body: Mapping[str, object] | None = None, timeout_s: float | None = None
    ) -> Response:
        """POST with a JSON body (none: empty). Raises NotListening or NoAnswer; any status is an answer."""
        return await self.request("POST", path, body, timeout_s=timeout_s)

    async def request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> Response:
        """One request. The time allowed covers all of it, from connecting to the last byte."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._exchange(method, path, body)
        except TimeoutError:
            raise NoAnswer(f"engine {self.endpoint}: {method} {path} was not answered within {limit_s:g} s.") from None

    async def _exchange(self, method: str, path: str, body: Mapping[str, object] | None) -> Response:
        try:
            if isinstance(self._address, UnixAddress):
                reader, writer = await asyncio.open_unix_connection(self._address.path)
            else:
                reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        except OSError as error:
            raise NotListening(f"engine {self.endpoint}: nobody listens ({error.strerror or error}).") from None
        try:
            raw = b"" if body is None else orjson.dumps(body)
            kind = "content-type: application/json\r\n" if body is not None else ""
            head = f"{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n{kind}"
            writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode("latin-1") + raw)
            return await self._read(reader, method, path)
        except OSError as error:
            raise NoAnswer(f"engine {self.endpoint}: {method} {path} broke off ({error}).") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, method: str, path: str) -> Response:
        parsed = _Parsed(self._max_body_bytes)
        parser = httptools.HttpResponseParser(parsed)
        try:
            while not parsed.complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    break
                parser.feed_data(data)
                if parsed.response.status == 0 and parsed.head_complete:
                    parsed.response.status = parser.get_status_code()
        except httptools.HttpParserError as error:
            raise NoAnswer(f"engine {self.endpoint}: {method} {path} gave no valid HTTP ({error}).") from None
        response = parsed.response
        whole = parsed.complete or (parsed.head_complete and parsed.until_close)
        if not whole or parsed.too_large:
            why = f"is larger than {self._max_body_bytes} bytes" if parsed.too_large else "ended early"
            raise NoAnswer(f"engine {self.endpoint}: the answer to {method} {path} {why}.")
        response.body = b"".join(parsed.parts)
        return response


class _Parsed:
    """What httptools calls while it reads one response."""

    def __init__(self, max_body_bytes: int) -> None:
        self.response = Response()
        self.parts: list[bytes] = []
        self.head_complete = False
        self.complete = False
        self.too_large = False
        self._size = 0
        self._max_body_bytes = max_body_bytes

    @property
    def until_close(self) -> bool:
        headers = self.response.headers
        return "content-length" not in headers and "transfer-encoding" not in headers

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.head_complete = True

    def on_body(self, body: bytes) -> None:
        self._count(len(body))
        if not self.too_large:
            self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._max_body_bytes:
            self.too_large = True
            self.complete = True
