"""One request on its way: asks the director, makes attempts, answers the client.

A request is DIRECTING (the director decides), RUNNING (an attempt is under way) or ENDED. An attempt that failed before
anything went to the client, or in the middle of an event stream, leads back to DIRECTING when the director says so.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from springtide.dataplane.attempt import Attempt
from springtide.dataplane.framing import LAST_CHUNK, chunk
from springtide.dataplane.heads import encode_reply
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

if TYPE_CHECKING:
    from springtide.dataplane.server import ClientConnection, RelayServer

log = logging.getLogger(__name__)

DIRECTING, RUNNING, ENDED = range(3)


class Exchange:
    """Carries one request; owned by its client connection. All methods run on the event loop."""

    __slots__ = ("attempt", "client", "pending", "phase", "reply_headers", "request", "server", "streaming")

    def __init__(self, server: "RelayServer", client: "ClientConnection", request: Request) -> None:
        self.server = server
        self.client = client
        self.request = request
        self.phase = DIRECTING
        self.pending: asyncio.Future[Answer] | None = None
        self.attempt: Attempt | None = None
        self.reply_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.streaming = False  # the client has the head of an event stream, and perhaps some of its events

    def start(self) -> None:
        """Asks the director."""
        try:
            answer = self.server.director.direct(self.request)
        except Exception:
            log.exception("the director failed on %s %s", self.request.method, self.request.path)
            answer = error_reply(500, "internal error", "internal_error")
        self._take(answer, self.request.started_at)

    def _take(self, answer: object, now: float) -> None:
        if isinstance(answer, Route):
            self.phase = RUNNING
            self.reply_headers = answer.reply_headers
            self.attempt = attempt = Attempt(self, answer, now)
            if answer.on_attempt is not None:
                answer.on_attempt(attempt.cut)
            attempt.start()
        elif isinstance(answer, Reply):
            self._reply(answer)
        else:
            self.phase = DIRECTING
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
        self._take(answer, self.server.loop.time())

    # ------------------------------------------------------------ ends

    def over(self, outcome: Outcome, close: bool) -> None:
        """The attempt ended. With `outcome.answer`, something can still be said. `close`: the connection's end."""
        retry = self._tell(outcome)
        self.attempt = None
        if outcome.answer is None:
            self.phase = ENDED
            self.server.exchanges.discard(self)
            self.client.exchange_done(close)
        elif retry is not None and outcome.kind is not OutcomeKind.OK:
            self._take(retry.answer, self.server.loop.time())
        else:
            self._reply(outcome.answer)

    def gone(self) -> None:
        """The client left. Its upstream request is cut at once."""
        if self.phase == ENDED:
            return
        self.phase = ENDED
        self.server.exchanges.discard(self)
        self._stop_waiting()
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self._tell(attempt.leave())

    def abort(self, message: str, code: str) -> None:
        """Cuts this exchange with an explicit error (OutcomeKind.ABORTED)."""
        if self.attempt is not None:
            self.attempt.fail(OutcomeKind.ABORTED, detail=message, error=error_body(message, code, 503))
        elif self.phase == DIRECTING:
            self._stop_waiting()
            self._reply(error_reply(503, message, code, 503))

    def _stop_waiting(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()

    def _reply(self, reply: Reply) -> None:
        if self.streaming:
            self._close_stream(reply)
            return
        keep_alive = self.keep_alive() and not reply.close
        if self.reply_headers:
            names = {name for name, _ in reply.headers}
            more = tuple(h for h in self.reply_headers if h[0] not in names)
            reply = Reply(reply.status, (*reply.headers, *more), reply.body, reply.close)
        self.client.write(encode_reply(reply, self.request.method, keep_alive))
        self._end(close=not keep_alive)

    def _close_stream(self, reply: Reply) -> None:
        clean = reply.status == 200
        events = reply.body if clean else b"data: " + reply.body + b"\n\n"
        if not self.request.http_1_0:
            # After an error no closing chunk: nobody may take this for a clean end.
            events = chunk(events) + (LAST_CHUNK if clean else b"")
        self.client.write(events)
        self._end(close=not clean or not self.keep_alive())

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

    # ------------------------------------------------------------ for the server

    def key(self) -> object:
        """The key of the route that is under way; None while the director decides."""
        return self.attempt.route.key if self.attempt is not None else None

    def check(self, now: float) -> None:
        """Looks at the time-outs; called by the server's sweep."""
        if self.attempt is not None:
            self.attempt.check(now)

    def hold_back(self, paused: bool) -> None:
        """Back-pressure of the client."""
        if self.attempt is not None:
            self.attempt.hold_back(paused)

    def keep_alive(self) -> bool:
        """Whether the client's connection may serve another request."""
        request = self.request
        return request.keep_alive and not request.http_1_0 and not self.server.closing
