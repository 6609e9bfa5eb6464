"""GenerationService: tokens over gRPC. Started, Tokens, exactly one Finished; or an error status with ErrorInfo."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import orjson

from router.core.admission import Ticket
from router.core.retry import Verdict
from router.core.want import Want, read_want
from router.generation import Progress, translate
from router.upstream import AttemptEnd, Dispatcher
from springtide.dataplane import FAULT_HEADER, Limits, OutcomeKind, UpstreamPool
from springtide.dataplane.client import Answer, UpstreamFailure, call
from springtide.errors import Conflict, InvalidArgument, NotFound, SpringtideError, Unavailable
from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceServicer

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.GenerateRequest, AsyncIterator[pb.GenerateResponse]]
    ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, Awaitable[pb.ListModelsResponse]]

log = logging.getLogger(__name__)

FRONT = "grpc"
_JSON = [(b"content-type", b"application/json")]


class Refused(Exception):
    """An HTTP answer of the worker that is no stream."""

    def __init__(self, status: int, message: str, refusal: str, fault: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status
        self.refusal = refusal

    @property
    def kind(self) -> OutcomeKind:
        if self.refusal:
            return OutcomeKind.REFUSED
        if 400 <= self.status < 500:
            return OutcomeKind.OK  # the client's fault
        return OutcomeKind.ERROR_STATUS if self.status >= 500 else OutcomeKind.BAD_RESPONSE


class GenerationService(GenerationServiceServicer):
    """See generation.proto. Cancellation by the client closes the worker's connection at once."""

    def __init__(self, dispatcher: Dispatcher, limits: Limits | None = None) -> None:
        self._dispatcher = dispatcher
        self._limits = limits or Limits()
        self.pool = UpstreamPool(self._limits)
        dispatcher.pools.append(self.pool)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: "ListContext"
    ) -> pb.ListModelsResponse:
        """The models of the routing table."""
        fleet = self._dispatcher.admission.fleet
        models = [
            pb.Model(
                name=pool.served_model_name,
                pool=pool.name,
                engine=pool.engine,
                active_workers=fleet.active(name),
            )
            for name, pool in fleet.table.pools.items()
        ]
        return pb.ListModelsResponse(models=sorted(models, key=lambda model: model.name))

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: "Context"
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Attempts until one brings a token; from then on that one, to its end."""
        if not request.pool:
            models = ", ".join(self._dispatcher.admission.fleet.models())
            remedy = f"Name one of: {models}." if models else "There is no pool yet."
            raise InvalidArgument(field="pool", value="", problem="is missing", remedy=remedy)
        left_s = cast("float | None", context.time_remaining())  # None without a deadline, whatever the stubs say
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        request_id = request.request_id or uuid.uuid4().hex
        ticket = self._dispatcher.open(request.pool, deadline, _want(request, context, request_id))
        try:
            model = self._dispatcher.admission.fleet.table.pools[ticket.pool].served_model_name
            target, body = translate(request, model)
        except SpringtideError:
            self._dispatcher.closed(ticket, FRONT, OutcomeKind.OK)  # the client's fault
            raise
        fault: SpringtideError | None = None
        while True:
            await self._seat(ticket, fault)
            attempt = _Attempt(self._dispatcher, ticket, request_id)
            async with aclosing(attempt.run(self.pool, self._limits, target, body)) as responses:
                async for response in responses:
                    yield response
            if not attempt.again:
                return
            fault = attempt.fault

    async def _seat(self, ticket: Ticket, fault: SpringtideError | None) -> None:
        """Waits for a worker. Raises what the request failed with, where no other worker takes it."""
        dispatcher = self._dispatcher
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if granted.done():
                dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), FRONT)
            else:
                granted.set_result(None)

        def deny(error: SpringtideError | None) -> None:
            if not granted.done():
                granted.set_exception(error or Unavailable("The router is stopping.", reason="STOPPING"))

        try:
            if dispatcher.place(ticket, grant, deny):
                return
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), FRONT)
            dispatcher.cancel(ticket, FRONT)
            raise
        except SpringtideError as error:
            dispatcher.closed(ticket, FRONT, OutcomeKind.REFUSED)
            raise fault or error from None


class _Attempt:
    """One try on the ticket's worker. Afterwards `again` says whether another one is to follow, `fault` why."""

    def __init__(self, dispatcher: Dispatcher, ticket: Ticket, request_id: str) -> None:
        self.again = False
        self.fault: SpringtideError | None = None
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._request_id = request_id
        assert ticket.seat is not None
        self._seat = ticket.seat
        self._loop = asyncio.get_running_loop()
        self._first_token_at: float | None = None
        self._events = 0

    async def run(
        self, pool: UpstreamPool, limits: Limits, target: str, body: bytes
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The responses of this attempt. Raises the error that ends the call."""
        ticket = self._ticket
        route = self._dispatcher.route(ticket, self._request_id.encode(errors="replace"), stream=True)
        progress = Progress(chat=target == "/v1/chat/completions")
        end = OutcomeKind.CLIENT_GONE
        refusal = timeout = fault = ""
        error: SpringtideError | None = None
        try:
            async with call("POST", route, target, body, _JSON, pool, limits) as answer:
                if not answer.event_stream:
                    raise await _refused(answer)
                async for data in answer.events():
                    tokens = progress.read(data)
                    if tokens is None:
                        continue
                    self._events += 1
                    if self._first_token_at is None:
                        self._first_token_at = self._loop.time()
                        if route.on_first_byte is not None:
                            route.on_first_byte(self._first_token_at)
                        yield pb.GenerateResponse(started=self._started())
                    yield pb.GenerateResponse(tokens=tokens)
            end = OutcomeKind.OK
        except UpstreamFailure as failure:
            end = OutcomeKind.OK if _clients_fault(failure) else failure.kind
            timeout = failure.timeout
            error = self._lost(failure)
        except Refused as answered:
            end, refusal, fault = answered.kind, answered.refusal, answered.fault
            error = self._answered(answered)
        except (ValueError, AttributeError, TypeError) as wrong:
            end = OutcomeKind.BAD_RESPONSE
            error = self._lost(UpstreamFailure(end, f"the engine sent an event that is none: {wrong}"))
        finally:
            started = self._first_token_at is not None
            ending = AttemptEnd(end, started, refusal, timeout, fault, self._events, self._first_token_at)
            ruling = self._dispatcher.ended(ticket, ending, FRONT)
        if error is not None:
            self.again = ruling.verdict in (Verdict.RETRY, Verdict.REQUEUE)
            self.fault = None if end is OutcomeKind.REFUSED else error
            if not self.again:
                raise error
            return
        if self._first_token_at is None:
            yield pb.GenerateResponse(started=self._started())
        yield pb.GenerateResponse(finished=progress.finished())

    def _started(self) -> pb.Started:
        ticket, seat = self._ticket, self._seat
        return pb.Started(
            request_id=self._request_id,
            worker_id=seat.worker.worker_id,
            incarnation=seat.worker.incarnation,
            attempts=ticket.attempts,
            waited_s=ticket.waited_s,
            weight_version=seat.worker.weight_version,
        )

    def _lost(self, failure: UpstreamFailure) -> SpringtideError:
        if _clients_fault(failure):
            return InvalidArgument(field="request", value="", problem=str(failure), remedy="Correct the request.")
        if self._first_token_at is not None:
            return Conflict(
                f"The stream was lost after {self._events} events: {failure}.",
                reason="STREAM_LOST",
                remedy="Send the request again.",
            )
        message = f"No worker could answer: {failure}."
        return Unavailable(message, reason=failure.kind.name, remedy="Send the request again.", retry_after_s=1.0)

    def _answered(self, answered: Refused) -> SpringtideError:
        if answered.kind is not OutcomeKind.OK:
            message = f"The worker answered HTTP {answered.status}: {answered}."
            return Unavailable(message, reason=answered.kind.name, remedy="Send the request again.", retry_after_s=1.0)
        if answered.status == 404:
            return NotFound(kind="model", name=self._ticket.pool)
        problem = f"the engine refused it: {answered}".rstrip(".")
        return InvalidArgument(field="request", value="", problem=problem, remedy="Correct the request.")


def _want(request: pb.GenerateRequest, context: "Context", request_id: str) -> Want:
    """The HTTP front's headers are metadata here; the session has a field of its own, too."""
    headers: dict[bytes, bytes] = {}
    for name, value in context.invocation_metadata() or ():
        if name.startswith("x-"):
            headers[name.encode()] = value if isinstance(value, bytes) else value.encode("latin-1", "replace")
    if request.session_id:
        headers[b"x-session-id"] = request.session_id.encode()[:256]
    body: dict[str, object] = {}
    kind = request.WhichOneof("input")
    if kind == "token_ids":
        body["prompt"] = list(request.token_ids.ids)
    elif kind == "chat":
        body["messages"] = [{"role": m.role, "content": m.content} for m in request.chat.messages]
    elif kind == "prompt":
        body["prompt"] = request.prompt
    if request.sampling.HasField("max_tokens"):
        body["max_tokens"] = request.sampling.max_tokens
    return read_want(headers, body, request.ByteSize(), request_id)


def _clients_fault(failure: UpstreamFailure) -> bool:
    code = (failure.error or {}).get("code")
    return isinstance(code, int) and 400 <= code < 500 and code not in (408, 429)


async def _refused(answer: Answer) -> Refused:
    raw = await answer.read(max_bytes=1024 * 1024)
    try:
        parsed = orjson.loads(raw)
        inner = parsed.get("error", parsed)
        message = str(inner.get("message") if isinstance(inner, dict) else inner)
    except (orjson.JSONDecodeError, AttributeError):
        message = raw.decode("utf-8", "replace")[:500]
    return Refused(answer.status, message, answer.refusal, (answer.header(FAULT_HEADER) or b"").decode("latin-1"))
