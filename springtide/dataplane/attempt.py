"""One try of a request on one route: connect, send, relay the answer, and say how it ended.

Phases: CONNECTING -> WAITING (written, nothing to pass on yet) -> STREAMING -> OVER.

Per read of a running stream this costs a few substring searches and one write; where reads come together, a tuple for
what is to be written. No clock, no timer, no slice.

An attempt that `resumes` goes on with an event stream of which the client has the beginning: it sends no head, and an
answer that is no event stream is its failure.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from springtide.dataplane.ending import CONNECTING, WAITING, Ending
from springtide.dataplane.events import EventStream, EventTooLong, error_object, is_plain_chunk
from springtide.dataplane.framing import Body, FramingError, LengthBody, chunk
from springtide.dataplane.heads import (
    CHUNKED,
    HeadError,
    ResponseHead,
    body_of,
    encode_request,
    encode_response_head,
    parse_response_head,
)
from springtide.dataplane.messages import (
    OutcomeKind,
    Reply,
    ShapeError,
    error_body,
    error_reply,
)
from springtide.dataplane.upstream import Job, LocalFault, Upstream

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

_FRAMING_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"keep-alive")


class Attempt(Ending):
    """See the module. Ends in exactly one `Exchange.over`, or in `leave` when the client went."""

    __slots__ = ()

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
        # A token that comes alone (those that come together: `upstream_read`). It touches nothing but this object and
        # the client's transport: with many streams, each further one is not in the cache.
        towards = self.steady
        if towards is not None:
            if is_plain_chunk(data):
                if self.shaper is None:
                    self.passed += 1
                    self.sent += len(data)
                    towards(data)
                else:
                    do, shaped = self.upstream_events(data, 1)
                    do(shaped)
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
            conn.out_of_step()

    def _spend(self) -> None:
        """What the last events came to ends the attempt: no further ones are looked at."""
        self.spent, self.steady = True, None

    def _misshapen(self, detail: str, _: bytes) -> None:
        self.fail(OutcomeKind.BAD_RESPONSE, detail=detail)

    def _finish_with(self, towards: Callable[[bytes], None], shaped: bytes) -> None:
        towards(shaped)
        self._finish()

    def upstream_lost(self, error: Exception | None) -> None:
        """The upstream's connection ended."""
        self.conn = None
        if isinstance(error, LocalFault):
            # Not the worker's fault, and not to be continued: what was looked at may not have reached the client.
            told = error_body("the answer could not be relayed", "internal_error", 500)
            self.fail(OutcomeKind.ABORTED, detail=str(error), error=told)
            return
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

    # ------------------------------------------------------------ event streams

    def _stream(self, scan: EventStream, body: Body, data: bytes, payload: bytes) -> None:
        before = scan.count
        events = scan.feed(payload)
        done = body.done
        shaper = self.shaper
        if self.begun and not done and scan.error is None:
            # On its way: `steady` takes over from here where it can.
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

    def _hold(self, events: bytes) -> None:
        self.held.append(events)
        self.held_size += len(events)
        if self.held_size > self.exchange.server.limits.max_buffered_body_bytes:
            raise EventTooLong("too many comments before the first event")

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
