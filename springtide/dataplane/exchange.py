"""One request on its way: director, upstream, answer. The heart of the relay.

Phases: DIRECTING (the director decides) -> CONNECTING -> WAITING (written, nothing came yet) -> STREAMING -> ENDED.
A failure before anything went to the client goes back to DIRECTING when the director says so.

Per read of a running stream this costs: one slice, a few substring searches, one write. No clock, no timer, no object.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from springtide.dataplane.events import EventStream, EventTooLong, error_object
from springtide.dataplane.framing import LAST_CHUNK, Body, ChunkedBody, FramingError, LengthBody, chunk
from springtide.dataplane.heads import (
    FAULT_HEADER,
    HeadError,
    ResponseHead,
    encode_reply,
    encode_request,
    encode_response_head,
    parse_response_head,
)
from springtide.dataplane.messages import (
    Answer,
    Outcome,
    OutcomeKind,
    Reply,
    Request,
    Retry,
    Route,
    error_body,
    error_reply,
)
from springtide.dataplane.upstream import Upstream

if TYPE_CHECKING:
    from springtide.dataplane.server import ClientConnection, RelayServer

log = logging.getLogger(__name__)

DIRECTING, CONNECTING, WAITING, STREAMING, ENDED = range(5)

_DEFAULT_ERRORS: dict[OutcomeKind, tuple[int, str, str]] = {
    OutcomeKind.CONNECT_FAILED: (502, "the worker could not be reached", "upstream_unreachable"),
    OutcomeKind.UPSTREAM_EOF: (502, "the worker closed the connection before its answer was complete", "upstream_eof"),
    OutcomeKind.UPSTREAM_ERROR_EVENT: (500, "the engine reported an error", "engine_error"),
    OutcomeKind.TIMEOUT: (504, "the worker did not answer in time", "upstream_timeout"),
    OutcomeKind.BAD_RESPONSE: (502, "the worker's answer was malformed", "bad_upstream_response"),
    OutcomeKind.ABORTED: (503, "the request was aborted", "aborted"),
}


class Exchange:
    """Carries one request; owned by its client connection. All methods run on the event loop."""

    __slots__ = (
        "active",
        "attempt_started_at",
        "body",
        "client",
        "conn",
        "first_byte_at",
        "head",
        "head_buffer",
        "held",
        "held_size",
        "last_at",
        "pending",
        "phase",
        "request",
        "reused",
        "route",
        "scan",
        "sent",
        "server",
        "started",
        "verbatim",
    )

    def __init__(self, server: "RelayServer", client: "ClientConnection", request: Request) -> None:
        self.server = server
        self.client = client
        self.request = request
        self.phase = DIRECTING
        self.pending: asyncio.Future[object] | None = None
        self.route: Route | None = None
        self.conn: Upstream | None = None
        self.started = False  # any byte of the answer went to the client
        self._clear()

    def _clear(self) -> None:
        self.head: ResponseHead | None = None
        self.head_buffer = b""
        self.body: Body | None = None
        self.scan: EventStream | None = None
        self.held: list[bytes] = []
        self.held_size = 0
        self.verbatim = False
        self.reused = False
        self.active = False
        self.sent = 0
        self.last_at = self.attempt_started_at = 0.0  # `last_at`: start of the phase, then the last sweep that saw data
        self.first_byte_at: float | None = None

    # ------------------------------------------------------------ direction

    def start(self) -> None:
        """Asks the director."""
        try:
            answer = self.server.director.direct(self.request)
        except Exception:
            log.exception("the director failed on %s %s", self.request.method, self.request.path)
            answer = error_reply(500, "internal error", "internal_error")
        self._take(answer)

    def _take(self, answer: object) -> None:
        if isinstance(answer, Route):
            self._open(answer)
        elif isinstance(answer, Reply):
            self._reply(answer)
        else:
            pending = asyncio.ensure_future(answer)  # type: ignore[call-overload]
            self.pending = pending
            pending.add_done_callback(self._directed)

    def _directed(self, future: "asyncio.Future[Answer]") -> None:
        answer: Answer
        if future.cancelled():
            answer = error_reply(503, "the request was given up while it waited", "unavailable")
        elif (error := future.exception()) is not None:
            log.error("the director failed on %s", self.request.path, exc_info=error)
            answer = error_reply(500, "internal error", "internal_error")
        else:
            answer = future.result()
        if future is not self.pending:
            if isinstance(answer, Route):  # given in the instant in which the client left
                self._tell(Outcome(OutcomeKind.CLIENT_GONE, answer))
            return
        self.pending = None
        self._take(answer)

    # ------------------------------------------------------------ upstream

    def _open(self, route: Route) -> None:
        self._clear()
        self.route = route
        self.attempt_started_at = self.server.loop.time()
        conn = self.server.pool.take(route.address)
        if conn is not None:
            self.reused = True
            self._send(conn)
        else:
            self._connect(route)

    def _connect(self, route: Route) -> None:
        self.phase = CONNECTING
        self.last_at = self.server.loop.time()
        task = self.server.loop.create_task(self.server.pool.connect(route.address))
        self.pending = task  # type: ignore[assignment]
        task.add_done_callback(self._connected)

    def _connected(self, task: "asyncio.Future[Upstream]") -> None:
        if task is not self.pending:
            if not task.cancelled() and task.exception() is None:
                task.result().release()
            return
        self.pending = None
        if task.cancelled():
            self._fail(OutcomeKind.CONNECT_FAILED, detail="cancelled")
        elif (error := task.exception()) is not None:
            if not isinstance(error, OSError):
                log.error("connecting to %s failed", self.route and self.route.address, exc_info=error)
            self._fail(OutcomeKind.CONNECT_FAILED, detail=str(error))
        else:
            self._send(task.result())

    def _send(self, conn: Upstream) -> None:
        assert self.route is not None
        self.conn = conn
        conn.sink = self
        conn.served += 1
        self.phase = WAITING
        self.last_at = self.server.loop.time()
        if self.client.paused:
            conn.transport.pause_reading()
        conn.transport.write(encode_request(self.request, self.route))

    def upstream_data(self, data: bytes) -> None:
        """One read from the upstream."""
        self.active = True
        body = self.body
        if body is None:
            rest = self._read_head(data)
            if rest is None:
                return
            data = rest
            body = self.body
            assert body is not None
        try:
            payload = body.feed(data)
            if self.scan is not None:
                self._stream(self.scan, body, data, payload)
            else:
                self._collect(body, payload)
        except (FramingError, EventTooLong) as error:
            self._fail(OutcomeKind.BAD_RESPONSE, detail=str(error))

    def upstream_lost(self, error: Exception | None) -> None:
        """The upstream's connection ended."""
        self.conn = None
        body = self.body
        if body is None:
            if self.reused and not self.head_buffer and self.route is not None:
                # A kept-alive connection that the upstream closed meanwhile: once more, on a fresh one.
                self.reused = False
                self._connect(self.route)
                return
        elif body.until_close and error is None and self.scan is None:
            if not self.started:
                self._settle(b"".join(self.held))
            else:
                self.client.write(self._last())
                self._complete()
            return
        self._fail(OutcomeKind.UPSTREAM_EOF, detail=str(error or "connection closed"))

    def _read_head(self, data: bytes) -> bytes | None:
        """Consumes the head; gives what follows it, or None while it is incomplete or when it is refused."""
        limits = self.server.limits
        data = self.head_buffer + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self.head_buffer = data
                if len(data) > limits.max_head_bytes:
                    self._fail(OutcomeKind.BAD_RESPONSE, detail="the answer's head is too long")
                return None
            try:
                head = parse_response_head(data[:end], self.request.method)
            except HeadError as error:
                self._fail(OutcomeKind.BAD_RESPONSE, detail=str(error))
                return None
            data = data[end:]
            if head.status >= 200:
                break
        self.head_buffer = b""
        self.head = head
        self.body = head.body
        if head.event_stream and head.status == 200:
            self.scan = EventStream(limits.max_event_bytes)
            self.verbatim = isinstance(head.body, ChunkedBody) and not self.request.http_1_0
        return data

    # ------------------------------------------------------------ event streams

    def _stream(self, scan: EventStream, body: Body, data: bytes, payload: bytes) -> None:
        events = scan.feed(payload)
        done = body.done
        if self.started and not done and scan.error is None:
            # The path of every token.
            if events:
                self.sent += len(events)
                exact = events is payload and self.verbatim and body.aligned
                self.client.transport.write(data if exact else self._encode(events))
            return
        if scan.error is not None:
            self._error_event(scan.error, events)
            return
        complete = done and scan.done
        if events or complete:
            if not self.started and not scan.count and not complete:
                self.held.append(events)  # only comments so far: nothing that a retry would contradict
                self._bound_held(events)
                return
            # Verbatim, the bytes hold the closing chunk too, which must not go out before the stream is known complete.
            exact = events is payload and self.verbatim and body.aligned and (complete or not done)
            out = data if exact else self._encode(events) + (self._last() if complete else b"")
            self._emit(out, len(events))
        if done:
            if scan.done:
                self._complete()
            else:
                self._fail(OutcomeKind.UPSTREAM_EOF, detail="the event stream ended without [DONE]")

    def _emit(self, out: bytes, size: int) -> None:
        """Writes; the first time together with the head and what was held back, in one write."""
        if not self.started:
            assert self.head is not None
            assert self.route is not None
            chunked = not self.request.http_1_0
            head = encode_response_head(
                self.head,
                self.route.reply_headers,
                b"transfer-encoding: chunked\r\n" if chunked else b"",
                self._keep_alive(),
            )
            held = b"".join(self.held)
            self.held.clear()
            size += len(held)
            out = head + self._encode(held) + out
            self.started = True
            self._begin()
        self.sent += size
        self.client.write(out)

    def _error_event(self, event: bytes, before: bytes) -> None:
        error = error_object(event)
        message = str(error.get("message") or "the engine reported an error")
        code = error.get("code")
        if not self.started and isinstance(code, int) and 400 <= code < 500 and code not in (408, 429):
            # The client's own fault, found late: an ordinary 4xx answer.
            self._drop()
            reply = error_reply(code, message, str(error.get("type") or "invalid_request_error"), code)
            self._tell(self._outcome(OutcomeKind.OK, status=code))
            self._reply(reply)
            return
        self._fail(
            OutcomeKind.UPSTREAM_ERROR_EVENT,
            detail=message,
            tail=before,
            error=error_body(message, str(error.get("type") or "engine_error"), code if code is not None else 500),
        )

    def _begin(self) -> None:
        self.phase = STREAMING
        self.first_byte_at = self.last_at = self.server.loop.time()
        if self.route is not None and self.route.on_first_byte is not None:
            self.route.on_first_byte(self.first_byte_at)

    # ------------------------------------------------------------ plain bodies

    def _collect(self, body: Body, payload: bytes) -> None:
        if payload and self.first_byte_at is None:
            self._begin()
        if self.started:
            self.sent += len(payload)
            self.client.write(self._encode(payload) + (self._last() if body.done else b""))
            if body.done:
                self._complete()
            return
        if payload:
            self.held.append(payload)
            self.held_size += len(payload)
        if body.done:
            self._settle(b"".join(self.held))
        elif self.held_size > self.server.limits.max_buffered_body_bytes:
            self._pass_through(body)

    def _pass_through(self, body: Body) -> None:
        """Too large to hold back: what is here goes out, the rest follows as it comes."""
        assert self.head is not None
        assert self.route is not None
        if isinstance(body, LengthBody):
            framing = b"content-length: %d\r\n" % (self.held_size + body.left)
        elif self.request.http_1_0:
            framing = b""
        else:
            framing = b"transfer-encoding: chunked\r\n"
        head = encode_response_head(self.head, self.route.reply_headers, framing, self._keep_alive())
        payload = b"".join(self.held)
        self.held.clear()
        self.started = True
        self.sent += len(payload)
        self.client.write(head + self._encode(payload))

    def _settle(self, payload: bytes) -> None:
        """The whole short answer is here."""
        head = self.head
        assert head is not None
        assert self.route is not None
        refused = bool(head.refusal) and head.status >= 400
        if refused or head.status >= 500:
            kind = OutcomeKind.REFUSED if refused else OutcomeKind.ERROR_STATUS
            self._let_go()
            names = (b"content-length", b"connection", b"transfer-encoding", b"keep-alive")
            reply = Reply(head.status, tuple(h for h in head.headers if h[0] not in names), payload)
            self._fail(kind, reply=reply)
            return
        bodiless = head.status in (204, 304) or self.request.method == "HEAD"
        framing = b"" if bodiless else b"content-length: %d\r\n" % len(payload)
        self.started = True
        self.sent += len(payload)
        self.client.write(encode_response_head(head, self.route.reply_headers, framing, self._keep_alive()) + payload)
        self._complete()

    # ------------------------------------------------------------ ends

    def _complete(self) -> None:
        """The answer went out whole."""
        self._let_go()
        status = self.head.status if self.head is not None else 0
        kind = OutcomeKind.ERROR_STATUS if status >= 500 else OutcomeKind.OK
        self._tell(self._outcome(kind))
        self._end(close=not self._keep_alive())

    def _fail(
        self,
        kind: OutcomeKind,
        detail: str = "",
        timeout: str = "",
        tail: bytes = b"",
        error: bytes | None = None,
        reply: Reply | None = None,
    ) -> None:
        """An attempt failed. `tail`: whole events that are still good; `error`: the error body for the client."""
        if self.scan is not None and self.scan.done and self.started:
            # The client already has everything up to [DONE]; how the upstream hangs up is its own matter.
            self.client.write(self._last())
            self._drop()
            self._complete()
            return
        self._drop()
        outcome = self._outcome(kind, detail=detail, timeout=timeout)
        status, message, code = _DEFAULT_ERRORS.get(kind, (500, "the request failed", "internal_error"))
        error = error or error_body(message, code, status)
        if not self.started:
            fault = (FAULT_HEADER, kind.value.encode())
            reply = reply or Reply(status, ((b"content-type", b"application/json"), fault), error)
            outcome.answer = reply
        retry = self._tell(outcome)
        if not self.started and reply is not None:
            if retry is not None:
                self.phase = DIRECTING
                self._take(retry.answer)
            else:
                self._reply(reply)
            return
        if self.scan is not None:
            event = b"data: " + error + b"\n\n"
            self.client.write(self._encode(tail + event))
        # No closing chunk: nobody may take this for a clean end.
        self._end(close=True)

    def gone(self) -> None:
        """The client left. Its upstream request is cut at once."""
        if self.phase == ENDED:
            return
        attempted = self.phase != DIRECTING
        complete = self.scan is not None and self.scan.done and self.started
        self._drop()
        self.phase = ENDED
        self.server.exchanges.discard(self)
        if attempted:
            self._tell(self._outcome(OutcomeKind.OK if complete else OutcomeKind.CLIENT_GONE))

    def abort(self, message: str, code: str) -> None:
        """Cuts this exchange with an explicit error (OutcomeKind.ABORTED)."""
        if self.phase == ENDED:
            return
        if self.phase == DIRECTING:
            self._drop()
            self._reply(error_reply(503, message, code, 503))
            return
        self._fail(OutcomeKind.ABORTED, detail=message, error=error_body(message, code, 503))

    def key(self) -> object:
        """The key of the route that is under way; None while the director decides."""
        return self.route.key if self.route is not None and self.phase != DIRECTING else None

    def check(self, now: float) -> None:
        """Looks at the time-outs; called by the server's sweep."""
        route = self.route
        if route is None or self.phase in (DIRECTING, ENDED):
            return
        name = ""
        if self.phase == CONNECTING:
            if _over(now, self.last_at, route.connect_timeout_s):
                name = "connect"
        elif self.phase == WAITING:
            if _over(now, self.last_at, route.first_byte_timeout_s):
                name = "first_byte"
        elif self.active or self.client.paused:
            self.active = False
            self.last_at = now
        elif _over(now, self.last_at, route.idle_timeout_s):
            name = "idle"
        if not name and _over(now, self.attempt_started_at, route.total_timeout_s):
            name = "total"
        if name:
            self._fail(OutcomeKind.TIMEOUT, detail=f"{name} time-out", timeout=name)

    # ------------------------------------------------------------ small parts

    def _reply(self, reply: Reply) -> None:
        keep_alive = self._keep_alive() and not reply.close
        extra = self.route.reply_headers if self.route is not None else ()
        if extra:
            names = {name for name, _ in reply.headers}
            more = tuple(h for h in extra if h[0] not in names)
            reply = Reply(reply.status, (*reply.headers, *more), reply.body, reply.close)
        self.started = True
        self.client.write(encode_reply(reply, self.request.method, keep_alive))
        self._end(close=not keep_alive)

    def _end(self, close: bool) -> None:
        self.phase = ENDED
        self.server.exchanges.discard(self)
        self.client.exchange_done(close)

    def _tell(self, outcome: Outcome) -> Retry | None:
        try:
            return self.server.director.finished(self.request, outcome)
        except Exception:
            log.exception("the director failed on an outcome of %s", self.request.path)
            return None

    def _outcome(self, kind: OutcomeKind, detail: str = "", timeout: str = "", status: int = 0) -> Outcome:
        assert self.route is not None
        head = self.head
        return Outcome(
            kind,
            self.route,
            status=status or (head.status if head is not None else 0),
            bytes=self.sent,
            events=self.scan.count if self.scan is not None else 0,
            started_at=self.attempt_started_at,
            first_byte_at=self.first_byte_at,
            finished_at=self.server.loop.time(),
            response_started=self.started,
            refusal=head.refusal if head is not None else "",
            timeout=timeout,
            detail=detail,
            headers=head.headers if head is not None else [],
        )

    def _drop(self) -> None:
        """Lets go of whatever is under way for this attempt, at once."""
        conn, self.conn = self.conn, None
        if conn is not None:
            conn.drop()
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()

    def _let_go(self) -> None:
        """Gives the connection back where the answer ended clean; else closes it."""
        conn, self.conn = self.conn, None
        if conn is None:
            return
        body, head = self.body, self.head
        clean = body is not None and body.done and not body.rest and head is not None and head.keep_alive
        if clean and conn.transport.get_write_buffer_size() == 0:
            conn.release()
        else:
            conn.drop()

    def _bound_held(self, events: bytes) -> None:
        self.held_size += len(events)
        if self.held_size > self.server.limits.max_buffered_body_bytes:
            raise EventTooLong("too many comments before the first event")

    def _encode(self, payload: bytes) -> bytes:
        """Payload in the client's framing."""
        if self.request.http_1_0 or (self.scan is None and isinstance(self.body, LengthBody)):
            return payload
        return chunk(payload)

    def _last(self) -> bytes:
        if self.request.http_1_0 or (self.scan is None and isinstance(self.body, LengthBody)):
            return b""
        return LAST_CHUNK

    def _keep_alive(self) -> bool:
        request = self.request
        return request.keep_alive and not request.http_1_0 and not self.server.closing


def _over(now: float, since: float, bound: float | None) -> bool:
    return bound is not None and now - since > bound
