"""Between the fronts and the core: tickets with callbacks, timers for the queues, and what an ended attempt means."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from router.config import Timeouts
from router.core.admission import Admission, Granted, Ticket
from router.core.asked import Labels
from router.core.board import ONE_PROCESS, Board
from router.core.kept import Budget
from router.core.retry import SERVED, Blame, Ruling, Verdict, rule
from router.core.seat import Seat
from router.core.table import Change
from router.core.want import NOTHING, Want
from router.metrics import Count, Metrics
from springtide import telemetry
from springtide.dataplane import INCARNATION_HEADER, REQUEST_ID_HEADER, OutcomeKind, Route, TcpAddress, UpstreamPool
from springtide.errors import SpringtideError
from springtide.link import Links
from springtide.link.client import DEAD_S
from springtide.model.routing import RouterReport, RoutingDelta, RoutingTable, WorkerLoad

Grant = Callable[[], None]
_SPARED = Ruling(Verdict.REQUEUE, Blame.NOTHING)
_PROBE_CONNECT_S = 1.0
Deny = Callable[[SpringtideError | None], None]


@dataclass(slots=True, eq=False)
class AttemptEnd:
    """How an attempt ended, whichever front made it. Times are the loop's clock."""

    kind: OutcomeKind
    response_started: bool
    refusal: str = ""
    timeout: str = ""
    fault: str = ""
    """What the shim says of its engine (FAULT_HEADER)."""
    events: int = 0
    first_byte_at: float | None = None
    continuable: bool = False
    """An event stream that can go on elsewhere. Matters once the response has started."""
    resumed: bool = False
    """The attempt was itself a continuation."""


@dataclass(slots=True)
class Continuing:
    """Whether and how far streams are continued."""

    enabled: bool = True
    max_continuations: int = 3
    budget: Budget = field(default_factory=lambda: Budget(256 * 1024 * 1024))


@lru_cache(maxsize=4096)
def _incarnation(number: int) -> tuple[bytes, bytes]:
    return INCARNATION_HEADER, b"%d" % number


@lru_cache(maxsize=4096)
def _address(endpoint: str) -> TcpAddress:
    host, _, port = endpoint.rpartition(":")
    return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))


class Dispatcher:
    """Gives tickets their workers. Lives on one event loop; its clock is the loop's."""

    def __init__(
        self,
        timeouts: Timeouts,
        max_attempts: int,
        board: Board = ONE_PROCESS,
        continuing: Continuing | None = None,
        link: bool = True,
    ) -> None:
        self.admission = Admission(random.Random(), board)
        self.metrics = Metrics(self.admission, asyncio.get_running_loop().time)
        self.on_demand: Callable[[], None] = lambda: None
        """Called when a pool's first request waits or is rejected."""
        self.links = Links(min(DEAD_S, timeouts.idle_timeout_s)) if link else None
        """One connection per worker for all its requests, where its shim offers it."""
        if self.links is not None:
            self.metrics.links(self.links.counts.seen)
        self.pools: list[UpstreamPool] = []
        """Connection pools of the fronts: idle connections to workers that left the table are closed in them."""
        self.watching: set[Callable[[], None]] = set()
        """Called when workers may have left: of requests that depend on another worker than their own."""
        self.continuing = continuing or Continuing()
        self._connect_s = timeouts.connect_timeout_s
        # A worker that broke and still hangs must not cost the request that probes it the whole time.
        self._probe_connect_s = min(timeouts.connect_timeout_s, _PROBE_CONNECT_S)
        self._total_s = timeouts.total_timeout_s
        self.first_byte_s = timeouts.first_byte_timeout_s or timeouts.total_timeout_s
        self._idle_s = timeouts.idle_timeout_s
        self.max_attempts = max_attempts
        self._held: dict[Ticket, tuple[Grant, Deny]] = {}
        self._timers: dict[str, tuple[float, asyncio.Handle]] = {}
        self._hot: set[str] = set()
        self._served: dict[tuple[str, str], Count] = {}
        self.loop = asyncio.get_running_loop()

    @property
    def upstreams(self) -> UpstreamPool | None:
        """Connections for requests of the router's own."""
        return self.pools[0] if self.pools else None

    def use(self, pool: UpstreamPool) -> None:
        """Takes a front's connection pool in."""
        pool.links = self.links
        self.pools.append(pool)

    # ------------------------------------------------------------ the table

    def snapshot(self, table: RoutingTable) -> Change:
        """Takes a snapshot and dispatches what it makes possible."""
        before = self._endpoints()
        change = self.admission.fleet.snapshot(table, self.loop.time())
        self._moved(before)
        return change

    def delta(self, delta: RoutingDelta) -> Change:
        """Takes a delta and dispatches what it makes possible."""
        before = self._endpoints()
        change = self.admission.fleet.delta(delta, self.loop.time())
        self._moved(before)
        return change

    def loads(self, loads: tuple[WorkerLoad, ...]) -> None:
        """Takes the shims' counts."""
        self.admission.fleet.loads(loads, self.loop.time())

    def _endpoints(self) -> set[str]:
        return {seat.worker.endpoint for seat in self.admission.fleet.all()}

    def _moved(self, before: set[str]) -> None:
        for endpoint in before - self._endpoints():
            for pool in self.pools:
                pool.close_address(_address(endpoint))
        self.look()
        for name in self.admission.waiting_pools():
            self._pump(name)

    def look(self) -> None:
        """Workers have left or broken: tells those that depend on them."""
        for look in list(self.watching):
            look()

    # ------------------------------------------------------------ tickets

    # `now`, where there is one: the loop's clock, of somebody who has just read it.

    def open(self, model: str, deadline: float | None = None, want: Want = NOTHING, now: float | None = None) -> Ticket:
        """A ticket. Raises NotFound that names the known models, Unavailable before the first table."""
        return self.admission.open(model, self.loop.time() if now is None else now, deadline, want)

    def place(self, ticket: Ticket, now: float | None = None) -> bool:
        """True: `ticket.seat` is set. False: it is held, and `hold` says whom to tell.

        Raises Unavailable or Exhausted with `retry_after_s`.
        """
        try:
            return self.admission.admit(ticket, self.loop.time() if now is None else now)
        except SpringtideError as error:
            self._rejected(ticket, error)
            raise

    def hold(self, ticket: Ticket, grant: Grant, deny: Deny) -> None:
        """For a ticket that `place` did not seat: `grant` or `deny` will be called, not before this returns."""
        self._held[ticket] = (grant, deny)
        self._demanded(ticket.pool)
        # Not from within: somebody behind an excluded ticket may have a seat at once.
        self._wake(ticket.pool, self.loop.time())

    def cancel(self, ticket: Ticket, front: str) -> None:
        """The client of a held ticket left. Nothing happens to one that was granted or denied already."""
        if self._held.pop(ticket, None) is not None:
            self.admission.cancel(ticket)
            self.closed(ticket, front, OutcomeKind.CLIENT_GONE)

    def ended(self, ticket: Ticket, end: AttemptEnd, front: str) -> Ruling:
        """Accounts for an attempt's end and says what follows. A RETRY or REQUEUE is for the caller to `place`."""
        if end.kind is OutcomeKind.OK:
            first_byte_at = None if end.resumed else end.first_byte_at
            return self.served(ticket, end.events, first_byte_at, front, self.loop.time())
        ruling = rule(
            end.kind,
            response_started=end.response_started,
            refusal=end.refusal,
            timeout=end.timeout,
            attempts=ticket.attempts,
            max_attempts=self.max_attempts,
            fault=end.fault,
            continuable=end.continuable,
        )
        pool = ticket.pool
        self.admission.settle(ticket, ruling, end.refusal, self.loop.time())
        if end.events:
            self.metrics.tokens.of((pool,)).inc(end.events)
        if end.first_byte_at is not None and end.events and end.response_started and not end.resumed:
            self._first_token(ticket, end.first_byte_at)
        if ruling.verdict in (Verdict.RETRY, Verdict.REQUEUE):
            self.metrics.retries.labels(pool, end.refusal or end.kind.value).inc()
        elif ruling.verdict is not Verdict.CONTINUE:
            self.closed(ticket, front, end.kind)
        if self.admission.waiting(pool):
            self._pump(pool)
        return ruling

    def served(self, ticket: Ticket, events: int, first_byte_at: float | None, front: str, now: float) -> Ruling:
        """`ended` for an attempt that gave the client its whole answer; what nearly all do. `first_byte_at` None: not
        to be counted."""
        pool = ticket.pool
        self.admission.settle(ticket, SERVED, "", now)
        if events:
            self.admission.answered(ticket, events)
            self.metrics.tokens.of((pool,)).inc(events)
            if first_byte_at is not None:
                self._first_token(ticket, first_byte_at)
        counted = self._served.get((pool, front))
        if counted is None:
            counted = self._served[pool, front] = self.metrics.requests.of((pool, front, OutcomeKind.OK.value))
        counted.total += 1
        if ticket.waited_s > 0:
            self.metrics.waited.labels(pool).observe(ticket.waited_s)
        if self.admission.waiting(pool):
            self._pump(pool)
        return SERVED

    def spare(self, ticket: Ticket) -> Ruling:
        """Frees a seat whose worker is not why the attempt ended: no blame, and the request may come back to it."""
        self.admission.settle(ticket, _SPARED, "", self.loop.time())
        ticket.attempts -= 1
        if self.admission.waiting(ticket.pool):
            self._pump(ticket.pool)
        return _SPARED

    def blame(self, seat: Seat, end: AttemptEnd) -> bool:
        """A worker failed that has no request to end. True: this opened its breaker."""
        doubtful = end.timeout in ("first_byte", "total")
        opened = seat.failed(self.loop.time(), doubtful)
        if opened:
            self.admission.demand(seat.worker.pool).trips_total += 1
        return opened

    def missed(self, pool: str, labels: Labels) -> None:
        """A request went without a worker of this pool: it is demand until such a one could be there."""
        now = self.loop.time()
        self.admission.demand(pool).rejected(now, self.admission.retry_after_s(pool, now), labels)
        self._demanded(pool)

    def _first_token(self, ticket: Ticket, at: float) -> None:
        ttft_s = max(0.0, at - ticket.arrived_at)
        self.admission.demand(ticket.pool).first_token(ttft_s)
        self.metrics.ttft.observe(ticket.pool, ttft_s)

    def closed(self, ticket: Ticket, front: str, kind: OutcomeKind) -> None:
        """The request is over: one count, whatever its attempts."""
        if kind is not OutcomeKind.OK and kind is not OutcomeKind.CLIENT_GONE:
            self.admission.demand(ticket.pool).failed_total += 1
        self.metrics.requests.of((ticket.pool, front, kind._value_)).inc()
        if ticket.waited_s > 0:
            self.metrics.waited.labels(ticket.pool).observe(ticket.waited_s)

    def route(self, ticket: Ticket, request_id: bytes, stream: bool, body: bytes | None = None) -> Route:
        """The way to the ticket's worker."""
        seat = ticket.seat
        assert seat is not None
        worker = seat.worker
        named = REQUEST_ID_HEADER, request_id
        plain = seat.spanned and not ticket.probe and not ticket.prefill
        return Route(
            _address(worker.endpoint),
            (_incarnation(worker.incarnation), named),
            (named,),
            self._probe_connect_s if ticket.probe else self._connect_s,
            self.first_byte_s,
            self._idle_s if stream else None,
            None if stream else self._total_s,
            seat,
            None,
            body,
            None if plain else self._first_byte(ticket, seat),
        )

    def question(self, seat: Seat, timeout_s: float) -> Route:
        """The way to a worker for a short question that is no request."""
        worker = seat.worker
        headers = (_incarnation(worker.incarnation),)
        return Route(_address(worker.endpoint), headers, (), timeout_s, timeout_s, None, timeout_s)

    def _first_byte(self, ticket: Ticket, seat: Seat) -> Callable[[float], None] | None:
        span = None if seat.spanned else self._span(seat, self.loop.time())
        if not (ticket.probe or ticket.prefill):
            return span

        def first_byte(at: float) -> None:
            if self.admission.first_byte(ticket, seat) and self.admission.waiting(ticket.pool):
                self._wake(ticket.pool, self.loop.time())
            if span is not None:
                span(at)

        return first_byte

    def _span(self, seat: Seat, started_at: float) -> Callable[[float], None]:
        def first_token(at: float) -> None:
            if seat.spanned:
                return
            seat.spanned = True
            offset = time.time() - self.loop.time()
            telemetry.emit_span(
                "springtide.route.first_token",
                traceparent=seat.worker.traceparent or None,
                start_s=started_at + offset,
                end_s=at + offset,
                attributes={
                    "springtide.pool": seat.worker.pool,
                    "springtide.worker": seat.worker.worker_id,
                    "springtide.incarnation": seat.worker.incarnation,
                    "springtide.node": seat.worker.node_id or None,
                },
                kind=telemetry.SpanKind.CLIENT,
            )

        return first_token

    # ------------------------------------------------------------ queues

    def _pump(self, pool: str) -> None:
        verdicts, wake_at = self.admission.pump(pool, self.loop.time())
        timer = self._timers.pop(pool, None)
        if timer is not None:
            timer[1].cancel()
        if wake_at is not None:
            self._wake(pool, wake_at)
        for verdict in verdicts:
            grant, deny = self._held.pop(verdict.ticket)
            if isinstance(verdict, Granted):
                grant()
                continue
            if verdict.error is not None:
                self._rejected(verdict.ticket, verdict.error)
            deny(verdict.error)

    def _wake(self, pool: str, at: float) -> None:
        timer = self._timers.get(pool)
        if timer is None or timer[0] > at:
            if timer is not None:
                timer[1].cancel()
            # The time is kept beside the handle: uvloop answers a time that has passed with one that does not know it.
            self._timers[pool] = (at, self.loop.call_at(at, self._timed, pool))

    def _timed(self, pool: str) -> None:
        self._timers.pop(pool, None)
        self._pump(pool)

    # ------------------------------------------------------------ demand

    def report(self) -> RouterReport:
        """For the control plane. From here on a pool without demand is cold: its next request is told at once."""
        report = self.admission.report(self.loop.time())
        self._hot = {pool.pool for pool in report.pools if pool.waiting or pool.rejected or pool.by_needs_waiting}
        return report

    def _demanded(self, pool: str) -> None:
        if pool not in self._hot:
            self._hot.add(pool)
            self.on_demand()

    def _rejected(self, ticket: Ticket, error: SpringtideError) -> None:
        self.metrics.rejected.labels(ticket.pool, error.reason).inc()
        if error.retry_after_s is not None:
            self._demanded(ticket.pool)

    def close(self) -> None:
        """Stops the timers; what is held is denied."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        held, self._held = self._held, {}
        for ticket, (_, deny) in held.items():
            self.admission.cancel(ticket)
            deny(None)
        if self.links is not None:
            self.links.close()
