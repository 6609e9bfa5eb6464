"""One `Generate` call: reads its request, runs it as an exchange of the data plane, writes what the shaper made of it.

Towards HTTP/2 it is the handler of a stream, towards the exchange it is the client. RECEIVING -> RUNNING -> OVER.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import orjson
from google.protobuf.message import DecodeError

from router.continuation import Continuation
from router.core.admission import Ticket
from router.generation import translate, want_of
from router.h2 import wire
from router.h2.messages import Messages
from router.pairs import Pair
from router.request_id import new_request_id
from springtide.dataplane import OutcomeKind, Request
from springtide.dataplane.exchange import Exchange
from springtide.dataplane.inbox import Inbox
from springtide.errors import Internal, InvalidArgument, NotFound, SpringtideError, Unavailable
from springtide.http2 import Stream
from springtide.http2.headers import Headers
from springtide.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from router.h2.front import GenerateFront
    from springtide.dataplane.server import ClientConnection

log = logging.getLogger(__name__)

FRONT = "grpc"
_JSON = (b"content-type", b"application/json")
_OURS = "This is a fault of ours: see the server's log."
_DEADLINE = wire.status_fields(wire.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Call:
    """See the module. `ticket` and `error` belong to the front, which directs the exchange."""

    __slots__ = (
        "_buffer",
        "_deadline",
        "_encoding",
        "_exchange",
        "_headers",
        "_late",
        "_over",
        "_started",
        "_stream",
        "_traceparent",
        "_until",
        "continuation",
        "error",
        "fault",
        "front",
        "messages",
        "pair",
        "paused",
        "request_id",
        "resumed",
        "ticket",
    )

    linked = False

    def __init__(self, front: "GenerateFront", stream: Stream, fields: Headers) -> None:
        self.front = front
        self.ticket: Ticket | None = None
        self.messages: Messages | None = None
        self.request_id = ""
        self.continuation: Continuation | None = None
        self.pair: Pair | None = None
        """Of a call that a prefill and a decode worker share."""
        self.resumed = False
        """The attempt under way goes on with a stream that was lost."""
        self.error: SpringtideError | None = None
        """What the call ends with."""
        self.fault: SpringtideError | None = None
        """What it ends with if no other worker takes it."""
        self.paused = False
        self._stream = stream
        self._exchange: Exchange | None = None
        self._buffer: bytes | bytearray = b""
        self._started = False
        self._over = False
        self._encoding = b""
        self._headers: dict[bytes, bytes] = {}
        self._traceparent = ""
        self._deadline: float | None = None
        self._late: asyncio.TimerHandle | None = None
        now = front.loop.time()
        self._until = now + front.limits.body_timeout_s
        for name, value in fields:
            if name[:2] == b"x-":
                self._headers[name] = value
            elif name == b"traceparent":
                self._traceparent = value.decode("latin-1")
            elif name == b"grpc-encoding":
                self._encoding = value
            elif name == b"grpc-timeout" and (left_s := wire.timeout_s(value)) is not None:
                self._deadline = now + left_s
                self._late = front.loop.call_at(self._deadline, self._expire)

    # ------------------------------------------------------------ the stream's side

    def headers(self, fields: Headers, ends: bool) -> None:
        """A request's trailers say nothing."""

    def data(self, payload: bytes, flow_bytes: int) -> None:
        """A part of the request."""
        self._stream.consumed(flow_bytes)
        if self._over:
            return
        if not self._buffer:
            self._buffer = payload
        else:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += payload
        front, buffer = self.front, self._buffer
        front.buffered += len(payload)
        announced = int.from_bytes(buffer[1:5], "big") if len(buffer) >= 5 else 0
        if max(announced, len(buffer) - 5) > front.max_message_bytes:
            self.fail(wire.too_large(max(announced, len(buffer) - 5), front.max_message_bytes))
        elif front.buffered > front.max_buffered_bytes:
            self.fail(front.full())

    def ended(self) -> None:
        """The request is whole."""
        if not self._over:
            self._begin()

    def reset(self, code: int) -> None:
        """The client left: the worker's request is cut at once."""
        if not self._over:
            self._leave()

    def hold_back(self, paused: bool) -> None:
        """The client reads slowly: so does the worker's connection."""
        self.paused = paused
        if self._exchange is not None and not self._over:
            self._exchange.hold_back(paused)

    # ------------------------------------------------------------ the request

    def _begin(self) -> None:
        front = self.front
        buffer, self._buffer = self._buffer, b""
        front.buffered -= len(buffer)
        try:
            request = pb.GenerateRequest.FromString(wire.unframe(buffer, self._encoding, front.max_message_bytes))
            http = self._translate(request)
        except SpringtideError as error:
            self.fail(error)
            return
        except DecodeError:
            self.fail(Internal("The request is no GenerateRequest.", reason="MALFORMED_MESSAGE"))
            return
        except Exception:
            log.exception("Generate failed")
            self.fail(Internal("Generate failed.", remedy=_OURS))
            return
        self._until = float("inf")
        exchange = self._exchange = Exchange(front.relay, cast("ClientConnection", self), http)
        front.relay.exchanges.add(exchange)
        exchange.start()

    def _translate(self, request: pb.GenerateRequest) -> Request:
        dispatcher = self.front.dispatcher
        if not request.pool:
            models = ", ".join(dispatcher.admission.fleet.models())
            remedy = f"Name one of: {models}." if models else "There is no pool yet."
            raise InvalidArgument(field="pool", value="", problem="is missing", remedy=remedy)
        self.request_id = request.request_id or new_request_id().decode()
        ticket = dispatcher.open(request.pool, self._deadline, want_of(request, self._headers, self.request_id))
        try:
            model = dispatcher.admission.fleet.table.pools[ticket.pool].served_model_name
            target, asked = translate(request, model)
        except SpringtideError:
            dispatcher.closed(ticket, FRONT, OutcomeKind.OK)  # the client's fault
            raise
        self.ticket = ticket
        chat = target == "/v1/chat/completions"
        way = self.continuation = Continuation.begin(dispatcher, ticket, FRONT, chat, asked)
        way.traceparent = self._traceparent
        if dispatcher.admission.fleet.pairs:
            self.pair = Pair.of(dispatcher, ticket, FRONT, target, request.pool, asked)
            if self.pair is not None:
                self.pair.traceparent = self._traceparent
        if way.kept is not None:
            asked = {**asked, "return_token_ids": True}
        self.messages = Messages(chat)
        # Copied: what orjson gives holds 4 KiB for as long as it lives.
        body = bytes(memoryview(orjson.dumps(asked)))
        http = Request("POST", target, [_JSON], body, started_at=self.front.loop.time(), http_1_0=True)
        http.state = self
        return http

    # ------------------------------------------------------------ the exchange's side

    @property
    def transport(self) -> "Call":
        """What the exchange writes to on the path of every token."""
        return self

    def write(self, data: bytes) -> None:
        """Messages of the shaper; before the first ones, in one piece with them, the head of an HTTP answer."""
        if self._started:
            if self.error is None and data:
                self._stream.send(data)
            return
        if self.error is not None:
            return
        end = data.find(b"\r\n\r\n") + 4
        if data[9:12] != b"200" or self.messages is None or not self.messages.begun:
            self._answered(int(data[9:12]), data[end:])
            return
        self._started = True
        self._stream.send_headers(wire.HEAD)
        self._stream.send(data[end:])

    @property
    def inbox(self) -> Inbox:
        """For what comes while the stream runs."""
        return self.front.relay.inbox

    def steady_write(self) -> Callable[[bytes], None]:
        """What writes the messages of a stream that runs."""
        return self._stream.send if self._started and self.error is None else self.write

    def exchange_done(self, close: bool) -> None:
        """The exchange is over."""
        if self.error is None and self.messages is not None and not self.messages.finished:
            self.error = Internal("The answer has no end.", remedy=_OURS)
        self._finish()

    def _answered(self, status: int, body: bytes) -> None:
        """An HTTP answer that is no stream of tokens."""
        message = message_of(body)
        if status == 404 and self.ticket is not None:
            self.error = NotFound(kind="model", name=self.ticket.pool)
        elif 400 <= status < 500:
            problem = f"the engine refused it: {message}".rstrip(".")
            self.error = InvalidArgument(field="request", value="", problem=problem, remedy="Correct the request.")
        else:
            text = f"The worker answered HTTP {status}: {message}."
            reason = OutcomeKind.ERROR_STATUS if status >= 500 else OutcomeKind.BAD_RESPONSE
            self.error = Unavailable(text, reason=reason.name, remedy="Send the request again.", retry_after_s=1.0)

    def get_write_buffer_size(self) -> int:
        """What waits for the client."""
        return self._stream.pending_bytes

    def is_closing(self) -> bool:
        """For the exchange's server."""
        return self._over

    def abort(self) -> None:
        """For the exchange's server."""

    def close_if_idle(self) -> None:
        """For the exchange's server."""

    def check(self, now: float) -> None:
        """Looks at the time-outs; called by the exchange server's sweep."""
        if now > self._until and not self._over:
            self.fail(Unavailable("The request did not arrive in time.", reason="REQUEST_TIMEOUT"))

    # ------------------------------------------------------------ ends

    def _expire(self) -> None:
        if not self._over:
            self._leave()
            self._stream.finish(wire.error_block(_DEADLINE, self._started))

    def fail(self, error: SpringtideError) -> None:
        """Ends the call with an error."""
        self.error = error
        self._finish()

    def _finish(self) -> None:
        error, started = self.error, self._started
        self._end()
        way = self.continuation
        if error is None:
            self._stream.finish(wire.OK if way is None or not way.losses else wire.continued(way.guarantee, way.losses))
            return
        fields = wire.trailers_of(error)
        if error.reason == "UNKNOWN_ENCODING":
            fields = wire.refused_encoding(fields)
        self._stream.finish(wire.error_block(fields, started))

    def refuse(self, block: bytes) -> None:
        """Ends the call with a head alone."""
        self._end()
        self._stream.finish(block)

    def _leave(self) -> None:
        exchange = self._exchange
        self._end()
        if exchange is not None:
            exchange.gone()

    def _end(self) -> None:
        self._over = True
        self.front.buffered -= len(self._buffer)
        self._buffer = b""
        self._exchange = None
        if self.continuation is not None:
            self.continuation.close()
        self.front.relay.connections.discard(self)
        if self._late is not None:
            self._late.cancel()
            self._late = None


def message_of(body: bytes) -> str:
    """The sentence of an error body, whatever its shape."""
    try:
        parsed = orjson.loads(body)
        inner = parsed.get("error", parsed)
        return str(inner.get("message") if isinstance(inner, dict) else inner)
    except (orjson.JSONDecodeError, AttributeError):
        return body.decode("utf-8", "replace")[:500]
