"""The public gRPC port: `Generate` is served here, all other methods by grpc.aio on a private unix socket.

It directs the exchanges of its calls: gives each a worker, and says what the end of an attempt means for the client.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

from router.continuation import Continuation, attempt_end
from router.core.retry import Verdict
from router.h2 import wire
from router.h2.call import FRONT, Call, message_of
from router.pairs import Pair
from router.resumed import go_on
from router.upstream import Dispatcher
from router.waiting import later
from springtide.dataplane import Answer, Limits, Outcome, OutcomeKind, Reply, Request, Retry, Route
from springtide.dataplane.server import RelayServer
from springtide.errors import Conflict, Exhausted, InvalidArgument, SpringtideError, Unavailable
from springtide.http2 import Http2Limits, Http2Server, ServerConnection, Stream, StreamHandler, StreamRelay
from springtide.http2.headers import Headers
from springtide.v1 import generation_pb2 as pb

GENERATE = b"/springtide.v1.GenerationService/Generate"
_ENDED = Reply(500)
_TYPES = (b"application/grpc", b"application/grpc+proto")
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_BUFFERED_BYTES = 512 * 1024 * 1024


class GenerateFront:
    """`others`: unix path of the server for all other methods. `accepts`: whether an `authorization` value is good.

    `buffered` are bytes of requests that are not whole yet, over all connections.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        others: str,
        limits: Limits | None = None,
        authorize: Callable[[bytes | None], SpringtideError | None] = lambda value: None,
        http2: Http2Limits | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self.dispatcher = dispatcher
        self.limits = limits or Limits()
        self.loop = asyncio.get_running_loop()
        self.max_message_bytes = max_message_bytes
        self.max_buffered_bytes = max_buffered_bytes
        self.buffered = 0
        self.relay = RelayServer(self, self.limits)
        self.relay.loop = self.loop
        self.pool = self.relay.pool
        dispatcher.use(self.pool)
        http2 = http2 or Http2Limits(max_connections=self.limits.max_connections)
        self.server = Http2Server(self._accept, http2, self._gone)
        self._others = others
        self._authorize = authorize
        self._relays: dict[ServerConnection, StreamRelay] = {}

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> int:
        """Serves a bound socket; gives its port."""
        return await self.server.start(sock=listening, tls=tls)

    async def close(self, drain_s: float = 0.0) -> None:
        """Running calls of Generate get `drain_s` seconds, then an explicit error; whatever else runs is cut then."""
        await self.server.close(drain_s, self._cut, lambda: len(self.relay.connections))
        await self.relay.close()

    def _cut(self) -> None:
        self.relay.abort(message="the router is shutting down", code="shutting_down")

    # ------------------------------------------------------------ streams

    def _accept(self, stream: Stream, fields: Headers) -> StreamHandler:
        path = method = kind = b""
        authorization = None
        for name, value in fields:
            if name == b":path":
                path = value
            elif name == b":method":
                method = value
            elif name == b"content-type":
                kind = value.partition(b";")[0].strip().lower()
            elif name == b"authorization":
                authorization = value
        connection = stream.conn
        assert isinstance(connection, ServerConnection)
        if path != GENERATE:
            relay = self._relays.get(connection)
            if relay is None:
                relay = StreamRelay(self.server.joiner, self._others, self.server.limits)
                self._relays[connection] = relay
            return relay.accept(stream, fields)
        call = Call(self, stream, fields)
        if method != b"POST" or kind not in _TYPES:
            call.refuse(wire.NOT_POST if method != b"POST" else wire.UNSUPPORTED_MEDIA)
        elif (error := self._authorize(authorization)) is not None:
            call.fail(error)
        else:
            self.relay.connections.add(call)  # type: ignore[arg-type]  # its sweep looks after calls, too
            self.relay.wake_sweep()
        return call

    def _gone(self, connection: ServerConnection) -> None:
        relay = self._relays.pop(connection, None)
        if relay is not None:
            relay.close()

    def full(self) -> SpringtideError:
        """Too many requests are on their way."""
        text = f"The router holds {self.buffered} bytes of requests that are not complete yet."
        return Exhausted(text, reason="TOO_MANY_BYTES", remedy="Send the request again.", retry_after_s=1.0)

    # ------------------------------------------------------------ director

    def direct(self, request: Request) -> Answer | Awaitable[Answer]:
        """A worker for a new call."""
        call: Call = request.state
        return self._place(call) if call.pair is None else self._paired(call, call.pair, request)

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        """Accounts, and sends the call elsewhere where that is right."""
        call: Call = request.state
        ticket = call.ticket
        assert ticket is not None
        pair = call.pair
        if pair is not None and pair.in_doubt(outcome):
            return Retry(self._paired(call, pair, request, outcome))
        if outcome.kind is OutcomeKind.OK:
            first_byte_at = None if call.resumed else outcome.first_byte_at
            self.dispatcher.served(ticket, outcome.events, first_byte_at, FRONT, outcome.finished_at)
            return None
        end = attempt_end(outcome, call.resumed)
        way, seat = call.continuation, ticket.seat
        if outcome.response_started and way is not None and seat is not None:
            end.continuable = way.lost(end, seat, outcome.error_code)
        ruling = self.dispatcher.ended(ticket, end, FRONT)
        error = _error(outcome, way.bar if way is not None else "")
        if outcome.response_started and way is not None and ruling.verdict in (Verdict.CONTINUE, Verdict.REQUEUE):
            call.resumed = True
            return Retry(self._resume(call, way))
        if ruling.verdict in (Verdict.RETRY, Verdict.REQUEUE):
            if outcome.kind is not OutcomeKind.REFUSED:
                call.fault = error
            return Retry(self._place(call) if pair is None else self._paired(call, pair, request))
        if pair is not None:
            pair.close()
        call.error = call.error or error
        return None

    async def _paired(self, call: Call, pair: Pair, request: Request, judging: Outcome | None = None) -> Answer:
        """A decode worker that has the prompt's KV from a prefill worker, or computes it. `judging`: an attempt whose
        end is not accounted for yet."""
        try:
            if judging is not None:
                ruling = await pair.judge(attempt_end(judging, call.resumed))
                error = _error(judging, "")
                if ruling.verdict is Verdict.RETRY:
                    call.fault = error
                elif ruling.verdict is not Verdict.REQUEUE:
                    call.error = call.error or error
                    return judging.answer or _ENDED
            body = await pair.begin(request.body, call.request_id.encode("ascii", "replace"))
        except SpringtideError as error:
            call.error = call.fault or error
            return _ENDED
        return pair.route(self._route(call, body))

    async def _resume(self, call: Call, way: Continuation) -> Answer:
        """A stream that was lost goes on elsewhere, or ends explicitly."""
        messages = call.messages
        assert messages is not None
        try:
            found = await go_on(way, call.request_id.encode("ascii", "replace"))
            if isinstance(found, Route):
                found.shaper = messages.resume(found.shaper)
                return found
            return Reply(200, (), messages.feed(found))
        except SpringtideError as error:
            call.error = error
            return _ENDED

    def _place(self, call: Call) -> Answer | Awaitable[Answer]:
        ticket = call.ticket
        assert ticket is not None
        try:
            if self.dispatcher.place(ticket):
                return self._route(call)
        except SpringtideError as error:
            return self._denied(call, error)
        seated, denied = partial(self._route, call), partial(self._denied, call)
        return later(self.dispatcher, ticket, FRONT, seated, denied)

    def _route(self, call: Call, body: bytes | None = None) -> Route:
        ticket, messages = call.ticket, call.messages
        assert ticket is not None
        assert messages is not None
        seat = ticket.seat
        assert seat is not None
        worker, attempts, waited_s = seat.worker, ticket.attempts, ticket.waited_s

        def started() -> pb.Started:
            return pb.Started(
                request_id=call.request_id,
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                attempts=attempts,
                waited_s=waited_s,
                weight_version=worker.weight_version,
            )

        request_id = call.request_id.encode("ascii", "replace")
        route = self.dispatcher.route(ticket, request_id, stream=True, body=body)
        way = call.continuation
        if way is not None and way.kept is not None:
            way.kept.restart()
            route.shaper = way.kept
        route.shaper = messages.attempt(started, route.shaper)
        return route

    def _denied(self, call: Call, error: SpringtideError | None) -> Reply:
        assert call.ticket is not None
        call.error = call.fault or error or Unavailable("The router is stopping.", reason="STOPPING")
        self.dispatcher.closed(call.ticket, FRONT, OutcomeKind.REFUSED)
        return _ENDED


def _error(outcome: Outcome, bar: str) -> SpringtideError | None:
    """What the client is told of a failed attempt; None where its own answer says it. `bar`: why it does not go on."""
    kind = outcome.kind
    if kind in (OutcomeKind.OK, OutcomeKind.CLIENT_GONE):
        return None
    what = outcome.detail or kind.value
    if kind is OutcomeKind.UPSTREAM_ERROR_EVENT and _clients_fault(outcome.error_code):
        return InvalidArgument(field="request", value="", problem=what, remedy="Correct the request.")
    if outcome.response_started:
        text = f"The stream was lost after {outcome.events} events: {what}."
        if bar:
            text += f" It cannot be continued: {bar}."
        return Conflict(text, reason="STREAM_LOST", remedy="Send the request again.")
    if kind in (OutcomeKind.ERROR_STATUS, OutcomeKind.REFUSED):
        body = message_of(outcome.answer.body) if outcome.answer is not None else ""
        what = f"The worker answered HTTP {outcome.status}: {body}."
    else:
        what = f"No worker could answer: {what}."
    return Unavailable(what, reason=kind.name, remedy="Send the request again.", retry_after_s=1.0)


def _clients_fault(code: object) -> bool:
    return isinstance(code, int) and 400 <= code < 500 and code not in (408, 429)
