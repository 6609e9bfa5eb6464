"""One try of a request on one route: connect, send, relay the answer, and say how it ended.

Phases: CONNECTING -> WAITING (written, nothing to pass on yet) -> STREAMING -> OVER.

Per read of a running stream this costs: one slice, a few substring searches, one write. No clock, no timer, no object.

An attempt that `resumes` goes on with an event stream of which the client has the beginning: it sends no head, and an
answer that is no event stream is its failure.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from springtide.dataplane.events import EventStream, EventTooLong, error_object, is_plain_chunk
from springtide.dataplane.framing import LAST_CHUNK, Body, FramingError, LengthBody, chunk
from springtide.dataplane.heads import (
    CHUNKED,
    FAULT_HEADER,
    HeadError,
    ResponseHead,
    body_of,
    encode_request,
    encode_response_head,
    parse_response_head,
)
from springtide.dataplane.messages import (
    Outcome,
    OutcomeKind,
    Reply,
    Route,
    ShapeError,
    Shaper,
    error_body,
    error_reply,
)
from springtide.dataplane.upstream import Job, Upstream

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
_FRAMING_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"keep-alive")


class Attempt:
    """See the module. Ends in exactly one `Exchange.over`, or in `leave` when the client went."""

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

    # ------------------------------------------------------------ sending

    def start(self) -> None:
        """On a kept connection, or on a fresh one."""
        conn = self.exchange.server.pool.take(self.route.address)
        if conn is not None:
            self.reused = True
            self._send(conn)
        else:
            self._connect()

    def _connect(self) -> None:
        server = self.exchange.server
        self.phase = CONNECTING
        self.last_at = server.loop.time()
        self.connecting = server.loop.create_task(server.pool.connect(self.route.address))
        self.connecting.add_done_callback(self._connected)

    def _connected(self, task: "asyncio.Task[Upstream]") -> None:
        if task is not self.connecting:  # given up meanwhile
            if not task.cancelled() and task.exception() is None:
                task.result().release(self.exchange.server.loop.time())
            return
        self.connecting = None
        if task.cancelled():
            self.fail(OutcomeKind.CONNECT_FAILED, detail="cancelled")
        elif (error := task.exception()) is not None:
            if not isinstance(error, OSError):
                log.error("connecting to %s failed", self.route.address, exc_info=error)
            self.fail(OutcomeKind.CONNECT_FAILED, detail=str(error))
        else:
            self._send(task.result())

    def _send(self, conn: Upstream) -> None:
        self.conn = conn
        conn.sink = self
        conn.served += 1
        if self.phase == CONNECTING and not self.reused:
            self.last_at = self.exchange.server.loop.time()
        self.phase = WAITING
        if self.exchange.client.paused:
            conn.hold_back(True)
        conn.transport.write(encode_request(self.exchange.request, self.route))

    # ------------------------------------------------------------ the upstream's side

    def upstream_data(self, data: bytes) -> None:
        """One read from the upstream."""
        self.active = True
        # The path of every token touches nothing but this object and the client's transport: with many streams, each
        # further one is not in the cache.
        towards = self.steady
        if towards is not None:
            if is_plain_chunk(data):
                self.passed += 1
                self.sent += len(data)
                if self.shaper is None:
                    towards(data)
                else:
                    self._shape(self.shaper, data, towards)
                return
            self.steady = None
        body = self.body
        if body is None:
            rest = self._read_head(data)
            if rest is None:
                return
            data = rest
            body = self.body
            if body is None:
                self._whole(data)
                return
        try:
            payload = body.feed(data)
            if self.scan is not None:
                self._stream(self.scan, body, data, payload)
            else:
                self._collect(body, payload)
        except (FramingError, EventTooLong, ShapeError) as error:
            self.fail(OutcomeKind.BAD_RESPONSE, detail=str(error))

    def upstream_read(self, data: bytes) -> Job:
        """One read of several that came together."""
        if self.steady is not None:
            if is_plain_chunk(data):
                return self.upstream_events(data, 1)
            self.steady = None
        return self.upstream_data, data

    def upstream_events(self, data: bytes, count: int) -> Job:
        """One chunk of `count` whole events that the relay before this one has looked at: no error, comment or end."""
        towards, shaper = self.steady, self.shaper
        if towards is None:
            scan = self.scan
            if self.spent or scan is None or not self.begun or scan.partial or not (self.verbatim or shaper):
                return partial(self._upstream_later, self.conn), data
            towards = self.steady = self.exchange.client.steady_write()
        self.active = True
        self.passed += count
        self.sent += len(data)
        if shaper is None:
            return towards, data
        try:
            shaped = shaper.feed(data[data.find(b"\n") + 1 : -2])
        except ShapeError as error:
            self._spend()
            return partial(self._misshapen, str(error)), b""
        if not self.plain:
            shaped = chunk(shaped)
        if shaper.ended:
            self._spend()
            return partial(self._finish_with, towards), shaped
        return towards, shaped

    def _upstream_later(self, conn: Upstream | None, data: bytes) -> None:
        """`upstream_data`, unless the answer ended with what came before in the same read."""
        if self.conn is conn:
            self.upstream_data(data)
        elif conn is not None:
            conn.stray()

    def _spend(self) -> None:
        """What the last events came to ends the attempt: no further ones are looked at."""
        self.spent, self.steady = True, None

    def _misshapen(self, detail: str, _: bytes) -> None:
        self.fail(OutcomeKind.BAD_RESPONSE, detail=detail)

    def _finish_with(self, towards: Callable[[bytes], None], shaped: bytes) -> None:
        towards(shaped)
        self._finish()

    def _shape(self, shaper: Shaper, data: bytes, towards: Callable[[bytes], None]) -> None:
        """One chunk of whole events."""
        try:
            shaped = shaper.feed(data[data.find(b"\n") + 1 : -2])
        except ShapeError as error:
            self.fail(OutcomeKind.BAD_RESPONSE, detail=str(error))
            return
        towards(shaped if self.plain else chunk(shaped))
        if shaper.ended:
            self._finish()

    def upstream_lost(self, error: Exception | None) -> None:
        """The upstream's connection ended."""
        self.conn = None
        body = self.body
        if body is None:
            if self.reused and not self.head_buffer:
                # A kept-alive connection that the upstream closed meanwhile: once more, on a fresh one.
                self.reused = False
                self._connect()
                return
        elif body.until_close and error is None and self.scan is None:
            if not self.started or self.resumes:
                self._settle(b"".join(self.held))
            else:
                self.exchange.client.write(self._last())
                self._complete()
            return
        self.fail(OutcomeKind.UPSTREAM_EOF, detail=str(error or "connection closed"))

    def _read_head(self, data: bytes) -> bytes | None:
        """Consumes the head; gives what follows it, or None while it is incomplete or when it is refused. Leaves `body`
        unset where what follows is a whole answer that is no stream."""
        server, request = self.exchange.server, self.exchange.request
        if self.head_buffer:
            data = self.head_buffer + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self.head_buffer = data
                if len(data) > server.limits.max_head_bytes:
                    self.fail(OutcomeKind.BAD_RESPONSE, detail="the answer's head is too long")
                return None
            try:
                head, length = self._head_of(data[:end], request.method)
            except HeadError as error:
                self.fail(OutcomeKind.BAD_RESPONSE, detail=str(error))
                return None
            data = data[end:]
            if head.status >= 200:
                break
        self.head_buffer = b""
        if head.offers:
            server.pool.offered(self.route.address)
        self.head = head
        if head.event_stream and head.status == 200:
            self.scan = EventStream(server.limits.max_event_bytes)
            self.verbatim = length == CHUNKED and not request.http_1_0
            self.body = body_of(length)
        else:
            self.plain = length >= 0 or request.http_1_0
            if length != len(data):
                self.body = body_of(length)
        return data

    def _head_of(self, head: bytes, method: str) -> tuple[ResponseHead, int]:
        """The head, and the length of its body. Raises HeadError."""
        if method == "HEAD":
            read = parse_response_head(head, method)
            return read, read.length
        known, length = self.exchange.server.response_heads.find(head)
        if known is None:
            known = self.exchange.server.response_heads.read(head)
            length = known.length
        return known, length

    def _begin(self) -> None:
        self.begun = True
        self.phase = STREAMING
        self.first_byte_at = self.last_at = self.exchange.server.loop.time()
        # The body of an error says nothing of a worker's health.
        if self.route.on_first_byte is not None and self.head is not None and self.head.status < 500:
            self.route.on_first_byte(self.first_byte_at)

    # ------------------------------------------------------------ event streams

    def _stream(self, scan: EventStream, body: Body, data: bytes, payload: bytes) -> None:
        before = scan.count
        events = scan.feed(payload)
        done = body.done
        shaper = self.shaper
        if self.begun and not done and scan.error is None:
            # The path of every token.
            if events:
                self.sent += len(events)
                client = self.exchange.client
                if shaper is not None:
                    client.transport.write(self._encode(shaper.feed(events)))
                    if shaper.ended:
                        self._finish()
                    elif events is payload and body.aligned:
                        self._be_steady()
                elif not (events is payload and self.verbatim and body.aligned):
                    client.transport.write(self._encode(events))
                else:
                    self._be_steady()
                    # `pass_on` is for one chunk: a read may hold several when tokens come faster than they are read.
                    if client.linked and data.find(b"\r\n") + 4 + len(payload) == len(data):
                        client.pass_on(data, scan.count - before)
                    else:
                        client.transport.write(data)
            return
        if scan.error is not None:
            self._error_event(scan.error, events)
            return
        complete = done and scan.done
        if events or complete:
            if not self.begun and not scan.count and not complete:
                self._hold(events)  # only comments so far: nothing that a retry would contradict
                return
            # Verbatim, the bytes hold the closing chunk too, which must not go out before the stream is known complete.
            exact = events is payload and self.verbatim and body.aligned and (complete or not done) and shaper is None
            if exact:
                self._emit(data, len(events))
            else:
                shaped = shaper.feed(events) if shaper is not None and events else events
                if shaper is not None and shaper.ended:
                    self._emit(self._encode(shaped), len(events))
                    self._finish()
                    return
                if not shaped and not self.begun and not done:
                    return  # nothing for the client yet: nothing that a retry would contradict
                self._emit(self._encode(shaped) + (self._last() if complete else b""), len(events))
        if done:
            if scan.done:
                self._complete()
            else:
                self.fail(OutcomeKind.UPSTREAM_EOF, detail="the event stream ended without [DONE]")

    def _be_steady(self) -> None:
        client = self.exchange.client
        self.steady = client.steady_write()
        if self.conn is not None and not self.conn.linked:  # a link's reads come together as they are
            self.conn.inbox = client.inbox

    def _finish(self) -> None:
        """The shaper has closed the stream: the upstream's rest is not wanted."""
        self.exchange.client.write(self._last())
        self._drop()
        self._complete()

    def _hold(self, events: bytes) -> None:
        self.held.append(events)
        self.held_size += len(events)
        if self.held_size > self.exchange.server.limits.max_buffered_body_bytes:
            raise EventTooLong("too many comments before the first event")

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

    def _error_event(self, event: bytes, before: bytes) -> None:
        error = error_object(event)
        message = str(error.get("message") or "the engine reported an error")
        code = error.get("code")
        if not self.started and isinstance(code, int) and 400 <= code < 500 and code not in (408, 429):
            # The client's own fault, found late: an ordinary 4xx answer.
            outcome = self._outcome(OutcomeKind.OK, self.exchange.server.loop.time(), status=code)
            outcome.answer = error_reply(code, message, str(error.get("type") or "invalid_request_error"), code)
            self._drop()
            self.exchange.over(outcome, close=False)
            return
        self.fail(
            OutcomeKind.UPSTREAM_ERROR_EVENT,
            detail=message,
            tail=before,
            error=error_body(message, str(error.get("type") or "engine_error"), code if code is not None else 500),
            reported=error,
        )

    # ------------------------------------------------------------ plain bodies

    def _whole(self, payload: bytes) -> None:
        """The whole answer came in one read, as most that are no streams do."""
        head, exchange = self.head, self.exchange
        assert head is not None
        if self.resumes or head.refusal or head.status >= 300 or not payload:
            if payload and not self.resumes:
                self._begin()
            self._settle(payload)
            return
        self.first_byte_at = now = exchange.server.loop.time()
        if self.route.on_first_byte is not None:
            self.route.on_first_byte(now)
        self.started = True
        self.sent = len(payload)
        keep_alive = exchange.keep_alive()
        framing = b"content-length: %d\r\n" % self.sent
        out = encode_response_head(head, self.route.reply_headers, framing, keep_alive)
        exchange.client.transport.write(out + payload)
        self._let_go(now)
        exchange.over(self._outcome(OutcomeKind.OK, now), not keep_alive)

    def _collect(self, body: Body, payload: bytes) -> None:
        if payload and self.first_byte_at is None and not self.resumes:
            self._begin()
        if self.started and not self.resumes:
            self.sent += len(payload)
            self.exchange.client.write(self._encode(payload) + (self._last() if body.done else b""))
            if body.done:
                self._complete()
            return
        if payload:
            self.held.append(payload)
            self.held_size += len(payload)
        if body.done:
            self._settle(b"".join(self.held))
        elif self.held_size > self.exchange.server.limits.max_buffered_body_bytes:
            if self.resumes:
                self.fail(OutcomeKind.BAD_RESPONSE, detail="the answer to a continuation is no event stream")
            else:
                self._pass_through(body)

    def _pass_through(self, body: Body) -> None:
        """Too large to hold back: what is here goes out, the rest follows as it comes."""
        if isinstance(body, LengthBody):
            framing = b"content-length: %d\r\n" % (self.held_size + body.left)
        elif self.exchange.request.http_1_0:
            framing = b""
        else:
            framing = b"transfer-encoding: chunked\r\n"
        payload = b"".join(self.held)
        self.held.clear()
        self.started = True
        self.sent += len(payload)
        self.exchange.client.write(self._encode_head(framing) + self._encode(payload))

    def _settle(self, payload: bytes) -> None:
        """The whole short answer is here."""
        head = self.head
        assert head is not None
        refused = bool(head.refusal) and head.status >= 400
        if refused or head.status >= 500:
            self._let_go(self.exchange.server.loop.time())
            reply = Reply(head.status, tuple(h for h in head.headers if h[0] not in _FRAMING_HEADERS), payload)
            self.fail(OutcomeKind.REFUSED if refused else OutcomeKind.ERROR_STATUS, reply=reply)
            return
        if self.resumes:
            self._let_go(self.exchange.server.loop.time())
            detail = f"the worker answered HTTP {head.status} to a continuation: {payload[:200]!r}"
            self.fail(OutcomeKind.BAD_RESPONSE, detail=detail)
            return
        bodiless = head.status in (204, 304) or self.exchange.request.method == "HEAD"
        self.started = True
        self.sent += len(payload)
        framing = b"" if bodiless else b"content-length: %d\r\n" % len(payload)
        self.exchange.client.write(self._encode_head(framing) + payload)
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
