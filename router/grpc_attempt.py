"""One attempt of a `Generate` call by grpc.aio: the worker's events as responses, or the error that they end with."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace

import orjson

from router.continuation import Closing, Continuation, Ready, fault_of
from router.core.admission import Ticket
from router.core.retry import Verdict
from router.core.sequel import Sequel
from router.generation import Progress
from router.pairs import Pair
from router.upstream import AttemptEnd, Dispatcher
from springtide.dataplane import FAULT_HEADER, Limits, OutcomeKind, Route, UpstreamPool
from springtide.dataplane.client import Answer, UpstreamFailure, call
from springtide.errors import Conflict, InvalidArgument, NotFound, SpringtideError, Unavailable
from springtide.v1 import generation_pb2 as pb

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


class Attempt:
    """One try on the ticket's worker. Afterwards `again` says whether another one is to follow, `fault` why."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ticket: Ticket,
        request_id: str,
        way: Continuation,
        earlier: Progress | None = None,
        pair: Pair | None = None,
    ) -> None:
        self.again = False
        self.fault: SpringtideError | None = None
        self.progress = earlier or Progress(chat=False)
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._request_id = request_id
        self._way = way
        self._pair = pair
        self._resumed = earlier is not None
        assert ticket.seat is not None
        self._seat = ticket.seat
        self._loop = asyncio.get_running_loop()
        self._first_token_at: float | None = None
        self._events = 0
        self._stop = False  # a stop string has ended the answer here

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

        route = replace(route, target=target, body=body)
        if self._pair is not None:
            route = self._pair.route(route)
        async with aclosing(self._relay(pool, limits, route, read)) as responses:
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
            asking = call("POST", route, route.target or "/", route.body or b"", _JSON, pool, limits)
            if route.on_attempt is not None:
                route.on_attempt(asking.cut)
            async with asking as answer:
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
            pair = self._pair
            if pair is None or error is None or self.started or not pair.doubts(end, fault, timeout):
                if pair is not None:
                    pair.over(OutcomeKind.OK if self.started else end)
                ruling = self._dispatcher.ended(ticket, ending, FRONT)
            else:
                ruling = await pair.judge(ending)
        if error is not None:
            self.again = ruling.verdict in (Verdict.RETRY, Verdict.REQUEUE, Verdict.CONTINUE)
            self.fault = None if end is OutcomeKind.REFUSED else error
            if not self.again:
                if pair is not None:
                    pair.close()
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
