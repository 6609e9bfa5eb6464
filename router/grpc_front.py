"""GenerationService: tokens over gRPC. Started, Tokens, exactly one Finished; or an error status with ErrorInfo."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import orjson

from router.continuation import Closing, Continuation, Ready, fault_of
from router.core.admission import Ticket
from router.core.retry import Verdict
from router.core.sequel import Sequel
from router.core.want import Want
from router.generation import Progress, translate, want_of
from router.upstream import AttemptEnd, Dispatcher
from router.waiting import seated
from springtide.dataplane import FAULT_HEADER, Limits, OutcomeKind, Route, UpstreamPool
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
_GUARANTEE = "springtide-continuation"
_CONTINUATIONS = "springtide-continuations"
"""Trailing metadata of a stream that went on elsewhere: exact or same-distribution, and how often."""


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
            target, asked = translate(request, model)
        except SpringtideError:
            self._dispatcher.closed(ticket, FRONT, OutcomeKind.OK)  # the client's fault
            raise
        way = Continuation.begin(self._dispatcher, ticket, FRONT, target == "/v1/chat/completions", asked)
        way.traceparent = dict(context.invocation_metadata() or ()).get("traceparent") or ""  # type: ignore[assignment]
        if way.kept is not None:
            asked = {**asked, "return_token_ids": True}
        body = orjson.dumps(asked)
        try:
            async with aclosing(self._attempts(ticket, request_id, target, body, way)) as responses:
                async for response in responses:
                    yield response
        finally:
            context.set_trailing_metadata(
                ((_GUARANTEE, way.guarantee), (_CONTINUATIONS, str(way.losses))) if way.losses else ()
            )
            way.close()

    async def _attempts(
        self, ticket: Ticket, request_id: str, target: str, body: bytes, way: Continuation
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        fault: SpringtideError | None = None
        started = False
        while True:
            if not started:
                await self._seat(ticket, fault)
                attempt = _Attempt(self._dispatcher, ticket, request_id, way)
                run = attempt.run(self.pool, self._limits, target, body)
            else:
                found = await way.next(request_id.encode(errors="replace"))
                if isinstance(found, Closing):
                    for response in attempt.closing(found):
                        yield response
                    return
                attempt = _Attempt(self._dispatcher, ticket, request_id, way, attempt.progress)
                run = attempt.resume(self.pool, self._limits, found)
            async with aclosing(run) as responses:
                async for response in responses:
                    yield response
            if not attempt.again:
                return
            started = attempt.started
            fault = attempt.fault

    async def _seat(self, ticket: Ticket, fault: SpringtideError | None) -> None:
        """Waits for a worker. Raises what the request failed with, where no other worker takes it."""
        try:
            await seated(self._dispatcher, ticket, FRONT, fault)
        except SpringtideError as error:
            raise fault or error from None


class _Attempt:
    """One try on the ticket's worker. Afterwards `again` says whether another one is to follow, `fault` why."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ticket: Ticket,
        request_id: str,
        way: Continuation,
        earlier: Progress | None = None,
    ) -> None:
        self.again = False
        self.fault: SpringtideError | None = None
        self.progress = earlier or Progress(chat=False)
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._request_id = request_id
        self._way = way
        self._resumed = earlier is not None
        assert ticket.seat is not None
        self._seat = ticket.seat
        self._loop = asyncio.get_running_loop()
        self._first_token_at: float | None = None
        self._events = 0

    @property
    def started(self) -> bool:
        """The client has something of the answer."""
        return self._resumed or self._first_token_at is not None

    async def run(
        self, pool: UpstreamPool, limits: Limits, target: str, body: bytes
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The responses of a first attempt. Raises the error that ends the call."""
        route = self._dispatcher.route(self._ticket, self._request_id.encode(errors="replace"), stream=True)
        progress = self.progress = Progress(chat=target == "/v1/chat/completions")
        kept, terms = self._way.kept, self._way.terms
        visible = terms is None or terms.ids_visible

        def read(data: bytes) -> pb.Tokens | None:
            tokens = progress.read(data)
            if kept is not None:
                if progress.prompt is not None:
                    kept.open(progress.prompt)
                    progress.prompt = None
                if tokens is not None:
                    kept.note(tokens.token_ids, bool(tokens.text), tokens.text)
                kept.finish = progress.finish_reason or None
                if tokens is not None and not visible:
                    del tokens.token_ids[:]
                    return tokens if tokens.text else None
            return tokens

        async with aclosing(self._relay(pool, limits, replace(route, target=target, body=body), read)) as responses:
            async for response in responses:
                yield response

    async def resume(
        self, pool: UpstreamPool, limits: Limits, ready: Ready
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The responses of a part that goes on with the stream."""
        kept, terms, progress = self._way.kept, self._way.terms, self.progress
        assert kept is not None
        assert terms is not None
        sequel = Sequel(terms, kept, ready.withheld)
        progress.prompt_tokens = kept.prompt_count()

        def read(data: bytes) -> pb.Tokens | None:
            piece = sequel.read(orjson.loads(data))
            if piece is None:
                return None
            progress.finish_reason = piece.finish_reason or progress.finish_reason
            progress.completion_tokens = piece.total
            ids = piece.ids if terms.ids_visible else ()
            if sequel.stopped:
                self._stop = True
            return pb.Tokens(text=piece.text, token_ids=ids) if piece.text or ids else None

        async with aclosing(self._relay(pool, limits, ready.route, read)) as responses:
            async for response in responses:
                yield response

    _stop = False

    async def _relay(
        self, pool: UpstreamPool, limits: Limits, route: Route, read: Callable[[bytes], pb.Tokens | None]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        ticket = self._ticket
        end = OutcomeKind.CLIENT_GONE
        refusal = timeout = fault = ""
        code: object = None
        error: SpringtideError | None = None
        begun = False
        try:
            async with call("POST", route, route.target or "/", route.body or b"", _JSON, pool, limits) as answer:
                if not answer.event_stream:
                    raise await _refused(answer)
                async for data in answer.events():
                    tokens = read(data)
                    self._events += 1
                    if not begun:
                        begun = True
                        if self._resumed and route.on_first_byte is not None:
                            route.on_first_byte(self._loop.time())
                    if tokens is not None:
                        if self._first_token_at is None:
                            self._first_token_at = self._loop.time()
                            if not self._resumed:
                                if route.on_first_byte is not None:
                                    route.on_first_byte(self._first_token_at)
                                yield pb.GenerateResponse(started=self._started())
                        yield pb.GenerateResponse(tokens=tokens)
                    if self._stop:
                        break
            end = OutcomeKind.OK
        except UpstreamFailure as failure:
            end = OutcomeKind.OK if _clients_fault(failure) else failure.kind
            timeout = failure.timeout
            reported = failure.error or {}
            code, fault = reported.get("code"), fault_of(str(reported.get("type") or ""))
            error = self._lost(failure)
        except Refused as answered:
            end, refusal, fault = answered.kind, answered.refusal, answered.fault
            error = self._answered(answered)
            if self._resumed and end is OutcomeKind.OK:  # an engine that does not take the continuation
                end = OutcomeKind.BAD_RESPONSE
        except (ValueError, AttributeError, TypeError, KeyError) as wrong:
            end = OutcomeKind.BAD_RESPONSE
            error = self._lost(UpstreamFailure(end, f"the engine sent an event that is none: {wrong}"))
        finally:
            events = self._events if self._first_token_at is not None else 0
            ending = AttemptEnd(
                end, self.started, refusal, timeout, fault, events, self._first_token_at, resumed=self._resumed
            )
            if self.started and error is not None:
                ending = replace(ending, continuable=self._way.lost(ending, self._seat, code))
            ruling = self._dispatcher.ended(ticket, ending, FRONT)
        if error is not None:
            self.again = ruling.verdict in (Verdict.RETRY, Verdict.REQUEUE, Verdict.CONTINUE)
            self.fault = None if end is OutcomeKind.REFUSED else error
            if not self.again:
                raise error
            return
        if not self.started:
            yield pb.GenerateResponse(started=self._started())
        yield pb.GenerateResponse(finished=self.progress.finished())

    def closing(self, closing: Closing) -> Iterator[pb.GenerateResponse]:
        """What is left to say where nothing is left to generate."""
        progress, kept = self.progress, self._way.kept
        assert kept is not None
        if closing.text:
            yield pb.GenerateResponse(tokens=pb.Tokens(text=closing.text))
        progress.finish_reason = closing.finish_reason or progress.finish_reason
        if progress.completion_tokens is None or closing.finish_reason is not None:
            progress.prompt_tokens, progress.completion_tokens = kept.prompt_count(), closing.total
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
        if self.started:
            why = f" It cannot be continued: {self._way.bar}." if self._way.bar else ""
            return Conflict(
                f"The stream was lost after {self._events} events: {failure}.{why}",
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
    """The HTTP front's headers are metadata here."""
    headers: dict[bytes, bytes] = {}
    for name, value in context.invocation_metadata() or ():
        if name.startswith("x-"):
            headers[name.encode()] = value if isinstance(value, bytes) else value.encode("latin-1", "replace")
    return want_of(request, headers, request_id)


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
