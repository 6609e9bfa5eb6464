"""What passes between the relay and its director: requests, routes, replies, outcomes.

The relay moves bytes and knows HTTP; the director (a shim or a router) knows workers. They meet only in this module,
so that either side can be replaced. The relay asks `Director.direct` once per request (and once more per `Retry`),
and tells `Director.finished` exactly once for each `Route` that it was given.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from springtide.quick_enum import quick

if TYPE_CHECKING:
    from springtide.dataplane.heads import RequestHead

# A request passes through these objects at the rate of the busiest engine: what is made for each is a plain class with
# slots (a frozen dataclass costs four times as much), and what is a key of a dict is a tuple.

Headers = list[tuple[bytes, bytes]]
"""Header lines in order; names in lower case."""
Fields = Sequence[tuple[bytes, bytes]]
"""The same, only to be read."""


class TcpAddress(NamedTuple):
    """A TCP endpoint. `host` is a name or a literal address (IPv6 without brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(NamedTuple):
    """A unix stream socket by its path."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Reads `host:port`, `[v6]:port` or `unix:/path`. Raises ValueError that names the text and the remedy."""
    if text.startswith("unix:"):
        path = text[5:]
        if path:
            return UnixAddress(path)
    else:
        host, colon, port = text.rpartition(":")
        if colon and host and port.isdigit() and 0 < int(port) < 65536:
            return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise ValueError(f"address {text!r} is neither HOST:PORT nor unix:PATH; write for example 127.0.0.1:8000")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one relay. Sizes in bytes, times in seconds. Exceeding one answers 4xx and closes the connection."""

    max_head_bytes: int = 64 * 1024
    max_headers: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    max_connections: int = 20_000
    head_timeout_s: float = 10.0
    body_timeout_s: float = 120.0
    idle_timeout_s: float = 75.0
    linger_s: float = 2.0
    """How long a refused client may still send (its bytes are dropped) so that it can read the refusal."""
    stall_timeout_s: float = 300.0
    """A client that takes no bytes for this long while some are waiting for it is treated as gone."""
    max_buffered_body_bytes: int = 256 * 1024
    """An answer that is no event stream is held back whole up to this size, so that it can be retried."""
    max_event_bytes: int = 4 * 1024 * 1024
    write_high_water_bytes: int = 64 * 1024
    max_idle_per_address: int = 256
    pool_idle_timeout_s: float = 60.0


class InvalidJson(ValueError):
    """The request's body is no JSON object."""


_UNPARSED = object()


class Request:
    """One request with its whole body. `started_at` is the event loop's clock; `state` belongs to the director.

    `headers` may be shared with other requests: put a new list in its place instead of changing it. Those that were
    read from a connection have no Content-Length, which is the body's.
    """

    __slots__ = (
        "_json",
        "body",
        "client",
        "head",
        "headers",
        "http_1_0",
        "keep_alive",
        "method",
        "path",
        "query",
        "started_at",
        "state",
        "target",
    )

    def __init__(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes = b"",
        client: str = "",
        started_at: float = 0.0,
        keep_alive: bool = True,
        http_1_0: bool = False,
    ) -> None:
        self.method = method
        self.target = target
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.body = body
        self.client = client
        self.started_at = started_at
        self.keep_alive = keep_alive
        self.http_1_0 = http_1_0
        self.head: RequestHead | None = None
        """Where the request was read from a connection: what all requests with this head share."""
        self.state: Any = None
        self._json: Any = _UNPARSED

    def forget_json(self) -> None:
        """The body is another one now."""
        self._json = _UNPARSED

    def extension_headers(self) -> Mapping[bytes, bytes]:
        """Those whose names begin with x-, and traceparent; the last one of each name."""
        head = self.head
        if head is not None and head.headers is self.headers:
            return head.extensions
        return extensions_of(self.headers)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def json(self) -> dict[str, Any]:
        """The body as a JSON object, parsed at most once. Raises InvalidJson."""
        parsed = self._json
        if parsed is _UNPARSED:
            try:
                parsed = orjson.loads(self.body)
                if not isinstance(parsed, dict):
                    parsed = InvalidJson("the body must be a JSON object")
            except orjson.JSONDecodeError as error:
                parsed = InvalidJson(f"the body is not valid JSON: {error}")
            self._json = parsed
        if isinstance(parsed, InvalidJson):
            raise parsed
        return parsed  # type: ignore[no-any-return]


def extensions_of(headers: Fields) -> dict[bytes, bytes]:
    """Headers whose names begin with x-, and traceparent; the last one of each name."""
    return {name: value for name, value in headers if name.startswith(b"x-") or name == b"traceparent"}


class ShapeError(ValueError):
    """A shaper cannot go on with a stream; the attempt has failed (BAD_RESPONSE)."""


class Shaper(Protocol):
    """Stands between the event stream of one attempt and the client. Called on the path of every token."""

    ended: bool
    """True: what `feed` gave last closes the client's stream, whatever the upstream would still send."""

    def feed(self, events: bytes) -> bytes:
        """What the client gets for these whole events (`[DONE]` is one of them). Raises ShapeError.

        While it gives nothing for the first ones, nothing has been sent, and the request may still go elsewhere.
        """
        ...


@dataclass(slots=True, eq=False)
class Route:
    """Send the request to `address`. `key` is the director's handle (for example the worker) and is what `abort` takes.
    Not changed once the relay has it.

    `headers` go to the upstream and replace the client's of the same names; `reply_headers` go to the client.
    `first_byte_timeout_s` runs from the request's write to the first event or byte of body,
    `idle_timeout_s` bounds the gap between reads after it, `total_timeout_s` the whole attempt. None: no bound.
    """

    address: Address
    headers: tuple[tuple[bytes, bytes], ...] = ()
    reply_headers: tuple[tuple[bytes, bytes], ...] = ()
    connect_timeout_s: float | None = 10.0
    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    total_timeout_s: float | None = None
    key: object = None
    target: str | None = None
    body: bytes | None = None
    """Replace the request's target or body for this attempt."""
    on_first_byte: Callable[[float], None] | None = None
    """Called once with the loop's clock when the first event or byte of body goes out: the upstream is well. Not called
    for a 5xx."""
    shaper: Shaper | None = None
    """For event streams: what the client sees of them. Without one they are passed on as they are."""
    on_attempt: Callable[[Callable[[], None]], None] | None = None
    """Called once before the attempt begins, with what cuts it (OutcomeKind.ABORTED) as long as it runs."""


@dataclass(slots=True)
class Reply:
    """A local answer. Content-Length and Connection are added by the relay. `close` ends the connection after it."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    close: bool = False


@quick
class OutcomeKind(Enum):
    """How one attempt ended."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and these are keys of dicts

    OK = "ok"
    """The upstream's whole answer went to the client; also an engine's own 4xx, which is the client's fault."""
    CLIENT_GONE = "client_gone"
    CONNECT_FAILED = "connect_failed"
    REFUSED = "refused"
    """The shim refused (`x-springtide-refusal`); the engine never saw the request."""
    ERROR_STATUS = "error_status"
    """A 5xx answer."""
    UPSTREAM_EOF = "upstream_eof"
    """The answer ended early: closed connection, short body, or an event stream without `[DONE]`."""
    UPSTREAM_ERROR_EVENT = "upstream_error_event"
    TIMEOUT = "timeout"
    BAD_RESPONSE = "bad_response"
    ABORTED = "aborted"


@dataclass(slots=True)
class Outcome:
    """The end of one attempt. Times are the event loop's clock; None means that it never happened.

    `response_started` is true once any byte of the answer went to the client, from this attempt or an earlier one: only
    an event stream can go on then. `events` and `bytes` count this attempt's own; where chunks pass as they are,
    `bytes` has their framing in it.
    `detail` is for logs; `timeout` names the bound that ran out (connect, first_byte, idle, total, stall).
    """

    kind: OutcomeKind
    route: Route
    status: int = 0
    bytes: int = 0
    events: int = 0
    started_at: float = 0.0
    first_byte_at: float | None = None
    finished_at: float = 0.0
    response_started: bool = False
    refusal: str = ""
    timeout: str = ""
    detail: str = ""
    error_type: str = ""
    error_code: str | int | None = None
    """Of the upstream's error event, where that ended it."""
    headers: Fields = ()
    """Head of the upstream's answer, where there was one."""
    answer: Reply | None = None
    """What the client gets unless the director says otherwise: an answer, or (`response_started`) a closing error event
    with this body. None where nothing can be said any more."""


Answer = Route | Reply


@dataclass(slots=True, eq=False)
class Retry:
    """Try again: the next route, a reply in place of the default error, or an awaitable of either.

    Once an event stream has started, a Route continues it: its answer must be an event stream too, whose events follow
    what the client has. A Reply ends it: its body is the closing events (status 200), or that of an error event.
    """

    answer: Answer | Awaitable[Answer]


class Director(Protocol):
    """Chooses where each request goes. Called on the event loop; must not block."""

    def direct(self, request: Request) -> Answer | Awaitable[Answer]:
        """Where to send the request. A returned awaitable is cancelled when the client leaves."""
        ...

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        """Called exactly once for each Route that was given. A Retry counts while nothing was sent, and for streams."""
        ...


def error_body(message: str, kind: str, code: str | int | None = None, param: str | None = None) -> bytes:
    """An error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_reply(
    status: int,
    message: str,
    kind: str,
    code: str | int | None = None,
    param: str | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    close: bool = False,
) -> Reply:
    """A Reply with an error in OpenAI's shape."""
    body = error_body(message, kind, code, param)
    return Reply(status, ((b"content-type", b"application/json"), *headers), body, close)
