"""The state of one try of a request, and its ends: what the client is told, what the director is told, and whether the
connection may be used again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from springtide.dataplane.events import EventStream
from springtide.dataplane.framing import LAST_CHUNK, Body, chunk
from springtide.dataplane.heads import FAULT_HEADER, ResponseHead, encode_response_head
from springtide.dataplane.messages import (
    Outcome,
    OutcomeKind,
    Reply,
    Route,
    ShapeError,
    error_body,
)
from springtide.dataplane.upstream import Upstream

if TYPE_CHECKING:
    from springtide.dataplane.exchange import Exchange

log = logging.getLogger(__name__)

CONNECTING, WAITING, STREAMING, OVER = range(4)

_DEFAULT_ERRORS: dict[OutcomeKind, tuple[int, str, str]] = {
    OutcomeKind.CONNECT_FAILED: (502, "the worker could not be reached", "upstream_unreachable"),
    OutcomeKind.UPSTREAM_EOF: (502, "the worker closed the connection before its answer was complete", "upstream_eof"),
    OutcomeKind.UPSTREAM_ERROR_EVENT: (500, "the engine reported an error", "engine_error"),
    OutcomeKind.TIMEOUT: (504, "the worker did not answer in time", "upstream_timeout"),
    OutcomeKind.BAD_RESPONSE: (502, "the worker's answer was malformed", "bad_upstream_response"),
    OutcomeKind.ABORTED: (503, "the request was aborted", "aborted"),
}
_LEFT_AT_ONCE_BYTES = 4096


class Ending:
    """What an `Attempt` is made of, without how its answer is read."""

    __slots__ = (
        "active",
        "begun",
        "body",
        "conn",
        "connecting",
        "exchange",
        "first_byte_at",
        "head",
        "head_buffer",
        "held",
        "held_size",
        "last_at",
        "passed",
        "phase",
        "plain",
        "resumes",
        "reused",
        "route",
        "scan",
        "sent",
        "shaper",
        "spent",
        "started",
        "started_at",
        "steady",
        "verbatim",
    )

    def __init__(self, exchange: "Exchange", route: Route, now: float) -> None:
        self.exchange = exchange
        self.route = route
        self.phase = CONNECTING
        self.conn: Upstream | None = None
        self.connecting: asyncio.Task[Upstream] | None = None
        self.reused = False
        self.head: ResponseHead | None = None
        self.head_buffer = b""
        self.body: Body | None = None
        self.scan: EventStream | None = None
        self.verbatim = False  # chunks may pass as they are
        # Set while the last read was chunks of whole events and passed as it was: what the next one is written with.
        self.steady: Callable[[bytes], None] | None = None
        self.passed = 0  # events that went that way, which `scan` has not seen
        self.plain = exchange.request.http_1_0  # the client's body is not chunked
        self.held: list[bytes] = []
        self.held_size = 0
        self.shaper = route.shaper
        self.spent = False  # the shaper has closed the stream or failed
        self.resumes = exchange.streaming
        self.started = exchange.streaming  # any byte of the answer went to the client
        self.begun = False  # any byte of this attempt did
        self.sent = 0
        self.active = False  # data came since the last sweep
        self.started_at = self.last_at = now
        # `last_at`: start of the phase, then the last sweep that saw data
        self.first_byte_at: float | None = None

    # ------------------------------------------------------------ towards the client

    def _begin(self) -> None:
        self.begun = True
        self.phase = STREAMING
        self.first_byte_at = self.last_at = self.exchange.server.loop.time()
        # The body of an error says nothing of a worker's health.
        if self.route.on_first_byte is not None and self.head is not None and self.head.status < 500:
            self.route.on_first_byte(self.first_byte_at)

    def _emit(self, out: bytes, size: int) -> None:
        """Writes; the first time together with the head and what was held back, in one write."""
        if not self.begun:
            held = b"".join(self.held) if self.shaper is None else b""  # comments, which no shaper asked for
            self.held.clear()
            if not self.resumes:
                framing = b"" if self.exchange.request.http_1_0 else b"transfer-encoding: chunked\r\n"
                size += len(held)
                out = self._encode_head(framing) + self._encode(held) + out
                self.started = self.exchange.streaming = True
            self._begin()
        self.sent += size
        self.exchange.client.write(out)

    def _finish(self) -> None:
        """The shaper has closed the stream: the upstream's rest is not wanted."""
        self.exchange.client.write(self._last())
        self._drop()
        self._complete()

    # ------------------------------------------------------------ ends

    def _complete(self) -> None:
        """The answer went out whole."""
        now = self.exchange.server.loop.time()
        self._let_go(now)
        failed = self.head is not None and self.head.status >= 500
        outcome = self._outcome(OutcomeKind.ERROR_STATUS if failed else OutcomeKind.OK, now)
        self.exchange.over(outcome, close=not self.exchange.keep_alive())

    def fail(
        self,
        kind: OutcomeKind,
        detail: str = "",
        timeout: str = "",
        tail: bytes = b"",
        error: bytes | None = None,
        reply: Reply | None = None,
        reported: dict[str, Any] | None = None,
    ) -> None:
        """The attempt failed. `tail`: whole events that are still good; `error`: the error body for the client;
        `reported`: the upstream's own error object."""
        client = self.exchange.client
        if self.finished:
            # The client already has everything up to [DONE]; how the upstream hangs up is its own matter.
            client.write(self._last())
            self._drop()
            self._complete()
            return
        if tail and self.started:
            tail = self._shaped(tail)
            if self.shaper is not None and self.shaper.ended:
                self._emit(self._encode(tail), len(tail))
                self._finish()
                return
            self._emit(self._encode(tail), len(tail))
        outcome = self._outcome(kind, self.exchange.server.loop.time(), detail, timeout)
        if reported is not None:
            outcome.error_type = str(reported.get("type") or "")
            outcome.error_code = reported.get("code")
        self._drop()
        status, message, code = _DEFAULT_ERRORS.get(kind, (500, "the request failed", "internal_error"))
        error = error or error_body(message, code, status)
        if not self.started or self.exchange.streaming:
            headers = ((b"content-type", b"application/json"), (FAULT_HEADER, kind.value.encode()))
            outcome.answer = reply or Reply(status, headers, error)
        self.exchange.over(outcome, close=True)

    def _shaped(self, events: bytes) -> bytes:
        try:
            return self.shaper.feed(events) if self.shaper is not None else events
        except ShapeError as error:
            log.warning("%s", error)
            return b""

    def cut(self) -> None:
        """Ends the attempt, if it has not ended: its director wishes so."""
        if self.phase != OVER:
            self.fail(OutcomeKind.ABORTED, detail="cut by the router")

    def leave(self) -> Outcome:
        """The client went: the upstream is cut at once."""
        now = self.exchange.server.loop.time()
        outcome = self._outcome(OutcomeKind.OK if self.finished else OutcomeKind.CLIENT_GONE, now)
        self._drop()
        return outcome

    @property
    def finished(self) -> bool:
        """True once the client has the whole stream, `[DONE]` included."""
        return self.scan is not None and self.scan.done and self.begun

    def check(self, now: float) -> None:
        """Looks at the time-outs; called by the server's sweep."""
        route = self.route
        name = ""
        if self.phase == CONNECTING:
            name = "connect" if _over(now, self.last_at, route.connect_timeout_s) else ""
        elif self.phase == WAITING:
            name = "first_byte" if _over(now, self.last_at, route.first_byte_timeout_s) else ""
        elif self.active or self.exchange.client.paused:
            self.active = False
            self.last_at = now
        elif _over(now, self.last_at, route.idle_timeout_s):
            name = "idle"
        if not name and _over(now, self.started_at, route.total_timeout_s):
            name = "total"
        if name:
            self.fail(OutcomeKind.TIMEOUT, detail=f"{name} time-out", timeout=name)

    def hold_back(self, paused: bool) -> None:
        """The client's side is full, or takes more again."""
        conn = self.conn
        if conn is None or conn.transport.is_closing():
            return
        conn.hold_back(paused)

    # ------------------------------------------------------------ small parts

    def _outcome(self, kind: OutcomeKind, now: float, detail: str = "", timeout: str = "", status: int = 0) -> Outcome:
        head, scan = self.head, self.scan
        outcome = Outcome(
            kind,
            self.route,
            status,
            self.sent,
            scan.count + self.passed if scan is not None else 0,
            self.started_at,
            self.first_byte_at,
            now,
            self.started,
            "",
            timeout,
            detail,
        )
        if head is not None:
            outcome.status = status or head.status
            outcome.refusal = head.refusal
            outcome.headers = head.headers
        return outcome

    def _drop(self) -> None:
        """Lets go of whatever is under way, at once."""
        self.phase = OVER
        conn, self.conn = self.conn, None
        if conn is not None:
            conn.drop()
        connecting, self.connecting = self.connecting, None
        if connecting is not None:
            connecting.cancel()

    def _let_go(self, now: float) -> None:
        """Gives the connection back where the answer ended clean; else closes it."""
        self.phase = OVER
        conn, self.conn = self.conn, None
        if conn is None:
            return
        body, head = self.body, self.head
        clean = head is not None and head.keep_alive and (body is None or (body.done and not body.rest))
        sent = self.exchange.request.body if self.route.body is None else self.route.body
        # A small request has left long before its answer came.
        if clean and (len(sent) < _LEFT_AT_ONCE_BYTES or conn.transport.get_write_buffer_size() == 0):
            conn.release(now)
        else:
            conn.drop()

    def _encode_head(self, framing: bytes) -> bytes:
        assert self.head is not None
        return encode_response_head(self.head, self.route.reply_headers, framing, self.exchange.keep_alive())

    def _encode(self, payload: bytes) -> bytes:
        """Payload in the client's framing."""
        return payload if self.plain else chunk(payload)

    def _last(self) -> bytes:
        return b"" if self.plain else LAST_CHUNK


def _over(now: float, since: float, bound: float | None) -> bool:
    return bound is not None and now - since > bound
