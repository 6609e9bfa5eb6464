"""One request's way over a prefill and a decode worker: its prefill, and what the end of either worker means for it.

The decode worker's seat comes first, then the prefill, then the route to the decode worker. A prefill worker that fails
is blamed alone; without one the decode worker computes the whole request. While the decode worker has given nothing,
the prefill worker's leaving ends its attempt at once: it may wait for KV that nobody will send.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from router.continuation import fault_told
from router.core.admission import Ticket
from router.core.pair import (
    MOST_LOSSES,
    TARGETS,
    decode_body,
    doubtful,
    hopeful,
    pairable,
    prefill_body,
    transfer,
)
from router.core.retry import Ruling, Verdict
from router.core.seat import Seat
from router.core.want import Want
from router.upstream import AttemptEnd, Dispatcher
from router.waiting import seated
from springtide import telemetry
from springtide.dataplane import FAULT_HEADER, REQUEST_ID_HEADER, Outcome, OutcomeKind, Route
from springtide.dataplane.client import UpstreamFailure, call
from springtide.errors import SpringtideError
from springtide.model.enums import Role

log = logging.getLogger(__name__)

FRONT = "pair"
"""In metrics: prefills are requests of their pool, made by no client's front."""
_JSON = (b"content-type", b"application/json")
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_ASK_TIMEOUT_S = 2.0
_READ_S = 1.0
"""A request without a stream gives its first byte at its end: its prefill worker's seat is free after this, though."""
_LEASE_S = 30.0
"""And its KV counts as read after this: engines do not hold it longer for somebody who does not come."""
_FRESH_S = 5.0
"""KV that a decode worker did not take serves another one for so long."""
_LEAST_S = 0.05


class Pair:
    """`ticket`: the request's own, in the decode pool. `traceparent`: the client's."""

    def __init__(
        self, dispatcher: Dispatcher, ticket: Ticket, front: str, target: str, model: str, body: Mapping[str, Any]
    ) -> None:
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._front = front
        self._target = target
        self._model = model
        self._stream = body.get("stream") is True
        self._asked = prefill_body(body, target == "/v1/chat/completions")
        self._loop = asyncio.get_running_loop()
        self.traceparent = ""
        self._pool = dispatcher.admission.fleet.pairs[ticket.pool]
        self._excluded: dict[tuple[str, int], float] = {}
        self._legs = 0
        self._failures = 0
        self._losses = 0
        self._alone = False
        self._began_at = 0.0
        # While a prefill is awaited:
        self._waiting: asyncio.Timeout | None = None
        self._asking: Ticket | None = None
        # While the decode worker has its KV from a prefill worker:
        self._params: dict[str, Any] | None = None
        self._prefilled_at = 0.0
        self._source: Seat | None = None
        self._partner: Ticket | None = None
        self._left = False
        self._cut: Callable[[], None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @staticmethod
    def of(
        dispatcher: Dispatcher, ticket: Ticket, front: str, target: str, model: str, body: Mapping[str, Any]
    ) -> "Pair | None":
        """For a new request of `model`; None where one worker serves it."""
        fleet = dispatcher.admission.fleet
        pool = fleet.table.pools[ticket.pool]
        if ticket.pool not in fleet.pairs or ticket.want.role is not None or model != pool.served_model_name:
            return None
        return Pair(dispatcher, ticket, front, target, model, body) if target in TARGETS and pairable(body) else None

    # ------------------------------------------------------------ both workers

    async def begin(self, raw: bytes, request_id: bytes, fault: SpringtideError | None = None) -> bytes:
        """Returns with `ticket.seat` set; gives the decode worker's body. Raises SpringtideError as `seated` does.

        Cancelled: the client left, and nothing of it stays behind.
        """
        try:
            await seated(self._dispatcher, self._ticket, self._front, fault)
        except BaseException:
            self.close()
            raise
        self._began_at = self._loop.time()
        if not self._fresh():
            self.close()
        try:
            params = self._params or await self._kv(request_id)
        except BaseException:
            self._dispatcher.ended(self._ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), self._front)
            raise
        self._params = params
        if params is None:
            self._count("decode_alone")
            return raw
        return decode_body(raw, params)

    def route(self, route: Route) -> Route:
        """The decode worker's, with the time that is left; its partner is watched from here on."""
        spent_s = self._loop.time() - self._began_at
        if route.first_byte_timeout_s is not None:
            route.first_byte_timeout_s = max(_LEAST_S, route.first_byte_timeout_s - spent_s)
        if route.total_timeout_s is not None:
            route.total_timeout_s = max(_LEAST_S, route.total_timeout_s - spent_s)
        if self._losses:  # the worker may still have the attempt before under the plain id
            route.headers = tuple(
                (name, value + b"-pair%d" % (self._losses + 1)) if name == REQUEST_ID_HEADER else (name, value)
                for name, value in route.headers
            )
        if self._source is not None:
            first = route.on_first_byte

            def first_byte(at: float) -> None:
                self._unwatch()
                if first is not None:
                    first(at)

            route.on_first_byte = first_byte
            route.on_attempt = self._on_attempt
            if not self._stream:
                self._timers = [
                    self._loop.call_later(_READ_S, self._release),
                    self._loop.call_later(_LEASE_S, self._unwatch),
                ]
        return route

    def _on_attempt(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        if self._left:
            self._loop.call_soon(cut)

    # ------------------------------------------------------------ the end of the decode worker's attempt

    def doubts(self, kind: OutcomeKind, fault: str, timeout: str) -> bool:
        """The attempt ended before the client had anything: whether it must be `judge`d, or the usual rule holds."""
        if self._source is None:
            return False
        return self._left if kind is OutcomeKind.ABORTED else doubtful(kind, fault, timeout)

    def in_doubt(self, outcome: Outcome) -> bool:
        """The end of an attempt that was relayed: True where it must be `judge`d; otherwise it is `over`."""
        started = outcome.response_started
        if not started and self.doubts(outcome.kind, fault_told(outcome), outcome.timeout):
            return True
        self.over(OutcomeKind.OK if started else outcome.kind)
        return False

    async def judge(self, end: AttemptEnd) -> Ruling:
        """Whose fault it was: accounts for the attempt. A RETRY or REQUEUE is for the caller to `begin` again."""
        dispatcher, ticket, source = self._dispatcher, self._ticket, self._source
        assert source is not None
        failure: AttemptEnd | None = None
        gone = self._gone(source)
        try:
            if not gone:
                failure = await self._ask(source)
        except BaseException:
            dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), self._front)
            self.close()
            raise
        self.close()
        if failure is not None and failure.kind is not OutcomeKind.REFUSED:
            self._excluded = {**self._excluded, source.id: float("inf")}
            if dispatcher.blame(source, failure):
                dispatcher.look()
        if not gone and failure is None and end.kind is OutcomeKind.TIMEOUT:
            return dispatcher.ended(ticket, end, self._front)  # the partner is well: it is slow itself
        if not gone and failure is None:
            self._alone = True  # the KV was gone, or the worker fails whatever it is given: that will show
        self._losses += 1
        self._count("partner_lost")
        return dispatcher.spare(ticket)

    def over(self, kind: OutcomeKind) -> None:
        """The attempt ended otherwise. KV that its worker has not asked for serves the next attempt."""
        if self._source is not None and kind is OutcomeKind.OK:
            self._count("paired")
        if kind in (OutcomeKind.REFUSED, OutcomeKind.CONNECT_FAILED) and self._source is not None:
            self._cut = None
            self._cancel_timers()
            self._dispatcher.watching.add(self.look)
        else:
            self.close()

    def close(self) -> None:
        """The partner is let go."""
        self._unwatch()
        self._source = self._params = None
        self._left = False

    # ------------------------------------------------------------ the partner

    def look(self) -> None:
        """Workers have left or broken."""
        waiting, asking = self._waiting, self._asking
        if waiting is not None and asking is not None:
            holds = self._dispatcher.admission.fleet.holds
            if not (self._hopeful() if asking.seat is None else holds(asking.seat)):
                self._waiting = None
                waiting.reschedule(self._loop.time())
        elif self._source is not None and not self._left and self._gone(self._source):
            self._left = True
            if self._cut is not None:
                self._cut()

    def _gone(self, seat: Seat) -> bool:
        return self._left or seat.breaker.trips_in_row > 0 or not self._dispatcher.admission.fleet.holds(seat)

    def _fresh(self) -> bool:
        """Whether KV from the attempt before, if there is some, is good for the present worker."""
        source, seat = self._source, self._ticket.seat
        if source is None or seat is None:
            return True
        young = self._loop.time() - self._prefilled_at < _FRESH_S
        return young and not self._gone(source) and seat.worker.weight_version == source.worker.weight_version

    def _unwatch(self) -> None:
        self._dispatcher.watching.discard(self.look)
        self._cancel_timers()
        self._cut = None
        self._release()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _release(self) -> None:
        partner, self._partner = self._partner, None
        if partner is not None:
            self._dispatcher.spare(partner)
            self._dispatcher.closed(partner, FRONT, OutcomeKind.OK)

    async def _ask(self, seat: Seat) -> AttemptEnd | None:
        """Whether a worker still answers: what is wrong with it, or None."""
        route = self._dispatcher.question(seat, _ASK_TIMEOUT_S)
        try:
            async with call("GET", route, "/v1/models", b"", None, self._dispatcher.upstreams) as answer:
                await answer.read()
        except UpstreamFailure as failure:
            return AttemptEnd(failure.kind, False, timeout=failure.timeout)
        if answer.refusal:
            return AttemptEnd(OutcomeKind.REFUSED, False, answer.refusal)
        return AttemptEnd(OutcomeKind.ERROR_STATUS, False) if answer.status >= 500 else None

    # ------------------------------------------------------------ the prefill

    def _hopeful(self) -> bool:
        seat, fleet = self._ticket.seat, self._dispatcher.admission.fleet
        version = seat.worker.weight_version if seat is not None else ""
        return hopeful(fleet.of(self._pool), self._excluded, version, self._loop.time())

    async def _kv(self, request_id: bytes) -> dict[str, Any] | None:
        """Where the prompt's KV is; None: no prefill worker could compute it."""
        if self._alone or self._losses >= MOST_LOSSES:
            return None
        # The decode worker must have time to compute the whole request, if need be.
        until = self._began_at + self._dispatcher.first_byte_s / 2
        failures = self._failures
        while self._failures < self._dispatcher.max_attempts and self._loop.time() < until and self._hopeful():
            if self._failures > failures:
                failures = self._failures
                self._count("prefill_retried")
            done, params = await self._leg(until, request_id)
            if done:
                return params
        if not self._dispatcher.admission.fleet.active(self._pool):
            self._dispatcher.missed(self._pool, self._ticket.want.needs.labels)
        return None

    async def _leg(self, until: float, request_id: bytes) -> tuple[bool, dict[str, Any] | None]:
        """One worker asked. False: it failed, and another one may be asked."""
        dispatcher, own = self._dispatcher, self._ticket
        seat = own.seat
        assert seat is not None
        want = Want(
            priority=own.want.priority,
            session=own.want.session,
            request_id=own.want.request_id,
            needs=own.want.needs,
            role=Role.PREFILL,
            body=self._asked,
            body_bytes=4 * own.want.prompt_tokens,
        )
        try:
            ticket = self._asking = dispatcher.open(self._model, own.call_deadline, want)
        except SpringtideError:
            return True, None
        ticket.deadline = until if own.call_deadline is None else min(until, own.call_deadline)
        ticket.weight_version = seat.worker.weight_version
        ticket.excluded = self._excluded
        dispatcher.watching.add(self.look)
        try:
            async with asyncio.timeout(None) as self._waiting:
                await seated(dispatcher, ticket, FRONT)
                return await self._prefill(ticket, until, request_id)
        except TimeoutError:  # it left, or there is nobody to wait for any more
            return False, None
        except SpringtideError:
            return True, None
        finally:
            self._waiting = self._asking = None
            if self._source is None:
                dispatcher.watching.discard(self.look)

    async def _prefill(self, ticket: Ticket, until: float, request_id: bytes) -> tuple[bool, dict[str, Any] | None]:
        dispatcher, seat, began_at = self._dispatcher, ticket.seat, self._loop.time()
        assert seat is not None
        self._legs += 1
        route = dispatcher.route(ticket, request_id + b"-prefill%d" % self._legs, stream=False)
        left_s = max(_LEAST_S, until - began_at)
        route = replace(route, first_byte_timeout_s=left_s, total_timeout_s=None, idle_timeout_s=left_s)
        headers = [_JSON, (b"traceparent", self.traceparent.encode("latin-1"))] if self.traceparent else [_JSON]
        body = orjson.dumps(self._asked)
        raw = b""
        try:
            async with call("POST", route, self._target, body, headers, dispatcher.upstreams) as answer:
                raw = await answer.read(_MAX_ANSWER_BYTES)
            fault = (answer.header(FAULT_HEADER) or b"").decode("latin-1")
            kind = OutcomeKind.ERROR_STATUS if answer.status >= 500 else OutcomeKind.OK
            end = AttemptEnd(OutcomeKind.REFUSED if answer.refusal else kind, False, answer.refusal, "", fault)
        except UpstreamFailure as failure:
            end = AttemptEnd(failure.kind, False, timeout=failure.timeout)
        except BaseException:
            dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), FRONT)
            raise
        if end.kind is not OutcomeKind.OK:
            self._fail(ticket, end)
            self._tell(seat, began_at, end.refusal or end.kind.value)
            return False, None
        if route.on_first_byte is not None:
            route.on_first_byte(self._loop.time())
        params = transfer(raw)
        if params is None:
            if answer.status == 200 and not seat.without_kv:
                seat.without_kv = True
                log.warning("%s gives no kv_transfer_params: it has no KV connector", seat.worker.worker_id)
            dispatcher.served(ticket, 0, None, FRONT, self._loop.time())
            self._tell(seat, began_at, "no_kv")
            return True, None
        seat.succeeded()
        self._prefilled_at = self._loop.time()
        self._partner, self._source, self._left = ticket, seat, False
        self._tell(seat, began_at, "ok")
        return True, params

    def _fail(self, ticket: Ticket, end: AttemptEnd) -> None:
        """A prefill worker failed: it alone is blamed, and whoever else depends on it hears of it."""
        seat = ticket.seat
        assert seat is not None
        ruling = self._dispatcher.ended(ticket, end, FRONT)
        if ruling.verdict in (Verdict.RETRY, Verdict.REQUEUE):
            self._dispatcher.closed(ticket, FRONT, end.kind)
        if end.kind is not OutcomeKind.REFUSED:
            self._failures += 1
            self._excluded = {**self._excluded, seat.id: float("inf")}
        if seat.breaker.trips_in_row:
            self._dispatcher.look()

    # ------------------------------------------------------------ telling

    def _count(self, outcome: str) -> None:
        self._dispatcher.metrics.pairs.labels(self._ticket.pool, outcome).inc()

    def _tell(self, seat: Seat, began_at: float, result: str) -> None:
        if not self.traceparent:
            return
        own = self._ticket.seat
        offset = time.time() - self._loop.time()
        telemetry.emit_span(
            "springtide.route.prefill",
            traceparent=self.traceparent,
            start_s=began_at + offset,
            end_s=self._loop.time() + offset,
            attributes={
                "springtide.pool": seat.worker.pool,
                "springtide.worker": seat.worker.worker_id,
                "springtide.worker_to": own.worker.worker_id if own is not None else None,
                "springtide.attempts": self._legs,
                "springtide.result": result,
            },
            kind=telemetry.SpanKind.CLIENT,
        )
