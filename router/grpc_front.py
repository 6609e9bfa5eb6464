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

from router.continuation import Closing, Continuation
from router.core.admission import Ticket
from router.core.want import Want
from router.generation import translate, want_of
from router.grpc_attempt import FRONT, Attempt
from router.pairs import Pair
from router.upstream import Dispatcher
from router.waiting import seated
from springtide.dataplane import Limits, OutcomeKind, UpstreamPool
from springtide.errors import InvalidArgument, SpringtideError
from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceServicer

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.GenerateRequest, AsyncIterator[pb.GenerateResponse]]
    ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, Awaitable[pb.ListModelsResponse]]

log = logging.getLogger(__name__)

_GUARANTEE = "springtide-continuation"
_CONTINUATIONS = "springtide-continuations"
"""Trailing metadata of a stream that went on elsewhere: exact or same-distribution, and how often."""


class GenerationService(GenerationServiceServicer):
    """See generation.proto. Cancellation by the client closes the worker's connection at once."""

    def __init__(self, dispatcher: Dispatcher, limits: Limits | None = None) -> None:
        self._dispatcher = dispatcher
        self._limits = limits or Limits()
        self.pool = UpstreamPool(self._limits)
        dispatcher.use(self.pool)

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
        pair = Pair.of(self._dispatcher, ticket, FRONT, target, request.pool, asked)
        if pair is not None:
            pair.traceparent = way.traceparent
        if way.kept is not None:
            asked = {**asked, "return_token_ids": True}
        body = orjson.dumps(asked)
        try:
            async with aclosing(self._attempts(ticket, request_id, target, body, way, pair)) as responses:
                async for response in responses:
                    yield response
        finally:
            context.set_trailing_metadata(
                ((_GUARANTEE, way.guarantee), (_CONTINUATIONS, str(way.losses))) if way.losses else ()
            )
            way.close()

    async def _attempts(
        self, ticket: Ticket, request_id: str, target: str, body: bytes, way: Continuation, pair: Pair | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        fault: SpringtideError | None = None
        started = False
        while True:
            if not started:
                sent = await self._seat(ticket, request_id, body, fault, pair)
                attempt = Attempt(self._dispatcher, ticket, request_id, way, pair=pair)
                run = attempt.run(self.pool, self._limits, target, sent)
            else:
                found = await way.next(request_id.encode(errors="replace"))
                if isinstance(found, Closing):
                    for response in attempt.closing(found):
                        yield response
                    return
                attempt = Attempt(self._dispatcher, ticket, request_id, way, attempt.progress)
                run = attempt.resume(self.pool, self._limits, found)
            async with aclosing(run) as responses:
                async for response in responses:
                    yield response
            if not attempt.again:
                return
            started = attempt.started
            fault = attempt.fault

    async def _seat(
        self, ticket: Ticket, request_id: str, body: bytes, fault: SpringtideError | None, pair: Pair | None
    ) -> bytes:
        """Waits for a worker; gives the body for it. Raises what the request failed with, where no other worker takes
        it."""
        try:
            if pair is not None:
                return await pair.begin(body, request_id.encode(errors="replace"), fault)
            await seated(self._dispatcher, ticket, FRONT, fault)
        except SpringtideError as error:
            raise fault or error from None
        return body


def _want(request: pb.GenerateRequest, context: "Context", request_id: str) -> Want:
    """The HTTP front's headers are metadata here."""
    headers: dict[bytes, bytes] = {}
    for name, value in context.invocation_metadata() or ():
        if name.startswith("x-"):
            headers[name.encode()] = value if isinstance(value, bytes) else value.encode("latin-1", "replace")
    return want_of(request, headers, request_id)
