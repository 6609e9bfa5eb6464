"""One stream's way over several workers: what it may do when it is lost, and how its next part begins.

Both fronts use it. The core knows what to ask and how to read it; here a worker is waited for and asked.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from router.core.admission import Ticket
from router.core.kept import Kept
from router.core.retry import Verdict
from router.core.seat import Seat
from router.core.sequel import TARGET, Unfit, align, left, resumed_body
from router.core.terms import Terms, terms
from router.upstream import AttemptEnd, Dispatcher
from router.waiting import seated
from springtide import telemetry
from springtide.dataplane import FAULT_HEADER, Outcome, OutcomeKind, Route, UpstreamPool
from springtide.dataplane.client import UpstreamFailure, call
from springtide.errors import Conflict, SpringtideError

_JSON = [(b"content-type", b"application/json")]
_ASK_TIMEOUT_S = 10.0
_FAULTS = {
    "upstream_eof": OutcomeKind.UPSTREAM_EOF.value,
    "upstream_unreachable": OutcomeKind.CONNECT_FAILED.value,
    "worker_drained": OutcomeKind.ABORTED.value,
    "aborted": OutcomeKind.ABORTED.value,
    "shutting_down": OutcomeKind.ABORTED.value,
}


def fault_of(error_type: str) -> str:
    """What a shim's own error event says of its engine (an OutcomeKind's value); empty for an engine's."""
    return _FAULTS.get(error_type, "")


def fault_told(outcome: Outcome) -> str:
    """What the shim says of its engine in the end of a relayed attempt: by its error event, or by FAULT_HEADER."""
    if outcome.error_type:
        return fault_of(outcome.error_type)
    if outcome.kind is not OutcomeKind.ERROR_STATUS:
        return ""
    return next((value.decode("latin-1") for name, value in outcome.headers if name == FAULT_HEADER), "")


def attempt_end(outcome: Outcome, resumed: bool) -> AttemptEnd:
    """A relayed attempt's end, whichever front relayed it."""
    return AttemptEnd(
        outcome.kind,
        outcome.response_started,
        outcome.refusal,
        outcome.timeout,
        fault_told(outcome),
        outcome.events,
        outcome.first_byte_at,
        resumed=resumed,
    )


class Ready(NamedTuple):
    """The next part can begin on the ticket's worker. `withheld`: text that the client is still owed."""

    route: Route
    withheld: str


class Closing(NamedTuple):
    """Nothing is left to generate: the stream ends here. `finish_reason` None: the client has it already."""

    text: str
    finish_reason: str | None
    total: int


class Continuation:
    """`kept` is None where the stream cannot be continued; `bar` says why, in a few words."""

    def __init__(self, dispatcher: Dispatcher, ticket: Ticket, front: str, found: Terms | str) -> None:
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._front = front
        self._bar = found if isinstance(found, str) else ""
        self._settings = dispatcher.continuing
        self.terms = None if isinstance(found, str) else found
        self.kept = None if isinstance(found, str) else Kept(found, self._settings.budget)
        self.traceparent = ""
        self.losses = 0
        """Parts that were lost after they had brought something."""
        self._barren = 0
        self._lost_at = 0.0
        self._lost_by = ""
        self._reason = ""
        self._tries = 0
        self._loop = dispatcher.loop

    @staticmethod
    def begin(
        dispatcher: Dispatcher, ticket: Ticket, front: str, chat: bool, body: Mapping[str, Any]
    ) -> "Continuation":
        """For a new stream. `body`: the OpenAI request."""
        if not dispatcher.continuing.enabled or not dispatcher.continuing.max_continuations:
            return Continuation(dispatcher, ticket, front, "continue_streams is off")
        pool = dispatcher.admission.fleet.table.pools.get(ticket.pool)
        return Continuation(dispatcher, ticket, front, terms(chat, body, pool.engine if pool is not None else ""))

    @property
    def bar(self) -> str:
        """Why the stream cannot be continued; empty: it can."""
        return self._bar or (self.kept.spoiled if self.kept is not None else "")

    @property
    def guarantee(self) -> str:
        """What a client may count on: exact, same-distribution, none."""
        if self.terms is None or self.bar:
            return "none"
        return "exact" if self.terms.exact else "same-distribution"

    def close(self) -> None:
        """The request is over: what was kept is let go."""
        if self.kept is not None:
            self.kept.release()

    # ------------------------------------------------------------ losses

    def lost(self, end: AttemptEnd, seat: Seat, error_code: object) -> bool:
        """An attempt ended after the client had something. True: the stream goes on elsewhere."""
        kind = end.kind
        if kind in (OutcomeKind.OK, OutcomeKind.CLIENT_GONE, OutcomeKind.ABORTED):
            return False
        clients = isinstance(error_code, int) and 400 <= error_code < 500 and error_code not in (408, 429)
        if end.events or not end.resumed:
            self.losses += 1
            self._barren = self._tries = 0
            self._lost_at = self._loop.time()
            self._lost_by = seat.worker.worker_id
            self._reason = _reason(end)
        elif kind is not OutcomeKind.REFUSED:
            self._barren += 1
        if clients:
            self._bar = self._bar or "the engine says that the request is at fault"
        if not self.bar and self.losses > self._settings.max_continuations:
            self._bar = f"it has been continued {self._settings.max_continuations} times"
        if not self.bar and self._barren >= self._dispatcher.max_attempts:
            self._bar = f"{self._barren} workers in a row could not go on with it"
        if self.bar:
            self._count("failed" if self.losses > 1 or self._barren else "not_continuable")
        return not self.bar

    async def next(self, request_id: bytes) -> Ready | Closing:
        """Waits for a worker and prepares the next part. Raises SpringtideError where none takes it; closed then."""
        kept, asked = self.kept, self.terms
        assert kept is not None
        assert asked is not None
        kept.settle()
        dispatcher, ticket = self._dispatcher, self._ticket
        request_id += b"-part%d" % (self.losses + 1)  # its worker may still have the part before under the plain one
        if kept.finish is not None:
            dispatcher.closed(ticket, self._front, OutcomeKind.OK)
            self._count("closed")
            return Closing("", None, kept.count())
        while True:
            alone = self.error("no other worker with the same weights is there")
            try:
                await seated(dispatcher, ticket, self._front, alone)
            except SpringtideError:
                self._count("failed")
                raise
            seat = ticket.seat
            assert seat is not None
            self._tries += 1
            try:
                withheld = await align(kept, asked, lambda ids: self._text(ids, request_id))
                remaining = left(asked, kept)
                if remaining is not None and remaining <= 0:
                    dispatcher.ended(ticket, AttemptEnd(OutcomeKind.OK, True, resumed=True), self._front)
                    self._count("closed")
                    return Closing(withheld, "length", kept.count())
                room = None if remaining is not None else await self._room(kept, request_id)
            except UpstreamFailure as failure:
                self._failed(failure, seat)
            except Unfit as unfit:
                raise self.give_up(str(unfit)) from None
            except asyncio.CancelledError:
                dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, True, resumed=True), self._front)
                raise
            else:
                body = resumed_body(asked, kept, room)
                route = dispatcher.route(ticket, request_id, stream=True, body=body)
                begun = self._begun(seat, kept.count(), route)
                return Ready(replace(route, target=TARGET, on_first_byte=begun), withheld)

    def give_up(self, why: str) -> SpringtideError:
        """Ends a stream whose next part has its worker already."""
        self._dispatcher.ended(self._ticket, AttemptEnd(OutcomeKind.ABORTED, True, resumed=True), self._front)
        self._count("failed")
        return self.error(why)

    def error(self, why: str = "") -> SpringtideError:
        """For a client whose stream ends here."""
        return Conflict(
            f"The stream was lost ({self._reason}) and cannot be continued: {why or self.bar}.",
            reason="STREAM_LOST",
            remedy="Send the request again.",
        )

    def _failed(self, failure: UpstreamFailure, seat: Seat) -> None:
        refusal = failure.refusal if isinstance(failure, _Refused) else ""
        end = AttemptEnd(failure.kind, True, refusal, failure.timeout, resumed=True)
        goes_on = self.lost(end, seat, None)
        ruling = self._dispatcher.ended(self._ticket, replace(end, continuable=goes_on), self._front)
        if ruling.verdict not in (Verdict.CONTINUE, Verdict.REQUEUE):
            raise self.error() from None

    # ------------------------------------------------------------ what only a worker can say

    async def _text(self, ids: list[int], request_id: bytes) -> str:
        model = self.terms.sampling.get("model") if self.terms is not None else None
        answer = await self._ask("POST", "/detokenize", orjson.dumps({"model": model, "tokens": ids}), request_id)
        text = answer.get("prompt")
        if not isinstance(text, str):
            raise Unfit("the engine gives no text for token ids")
        return text

    async def _room(self, kept: Kept, request_id: bytes) -> int:
        """Tokens that fit the context behind the prompt: what a chat without a bound may use."""
        answer = await self._ask("GET", "/v1/models", b"", request_id)
        models = answer.get("data")
        length = models[0].get("max_model_len") if isinstance(models, list) and models else None
        if not isinstance(length, int):
            raise Unfit("the request named no max_tokens, and the engine does not say how much fits")
        return length - kept.prompt_count()

    async def _ask(self, method: str, target: str, body: bytes, request_id: bytes) -> dict[str, Any]:
        route = self._dispatcher.route(self._ticket, request_id, stream=False)
        route = replace(route, first_byte_timeout_s=_ASK_TIMEOUT_S, total_timeout_s=_ASK_TIMEOUT_S, on_first_byte=None)
        async with call(method, route, target, body, _JSON, self._pool()) as answer:
            raw = await answer.read()
            if answer.refusal:
                raise _Refused(answer.refusal)
            if answer.status >= 500:
                raise UpstreamFailure(OutcomeKind.ERROR_STATUS, f"HTTP {answer.status} to {target}")
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError:
            found = None
        return found if isinstance(found, dict) and answer.status == 200 else {}

    def _pool(self) -> UpstreamPool | None:
        return self._dispatcher.pools[0] if self._dispatcher.pools else None

    # ------------------------------------------------------------ telling

    def _begun(self, seat: Seat, tokens_kept: int, route: Route) -> Any:
        def begun(at: float) -> None:
            result = self.guarantee.replace("-", "_")
            self._count(result)
            offset = time.time() - self._loop.time()
            telemetry.emit_span(
                "springtide.route.continue",
                traceparent=self.traceparent or None,
                start_s=self._lost_at + offset,
                end_s=at + offset,
                attributes={
                    "springtide.pool": self._ticket.pool,
                    "springtide.worker": seat.worker.worker_id,
                    "springtide.worker_from": self._lost_by,
                    "springtide.attempts": self._tries,
                    "springtide.tokens_kept": tokens_kept,
                    "springtide.reason": self._reason,
                    "springtide.result": result,
                },
                kind=telemetry.SpanKind.CLIENT,
            )
            if route.on_first_byte is not None:
                route.on_first_byte(at)

        return begun

    def _count(self, result: str) -> None:
        self._dispatcher.metrics.continuations.labels(self._ticket.pool, self._reason, result).inc()


class _Refused(UpstreamFailure):
    def __init__(self, refusal: str) -> None:
        super().__init__(OutcomeKind.REFUSED, f"refused: {refusal}")
        self.refusal = refusal


def _reason(end: AttemptEnd) -> str:
    if end.fault == OutcomeKind.ABORTED.value:
        return "drained"
    if end.kind is OutcomeKind.TIMEOUT:
        return "stalled"
    return end.fault or end.kind.value
