"""Requests on their way to a worker: dispatched at once, held in a bounded queue per pool, or refused.

`Admission` owns the fleet, queues and demand. Callers open a `Ticket`, then `admit` it; a held ticket is granted or
denied by a later `pump` of its pool, which is due after every change and at the time that `pump` gives.
"""

from bisect import insort
from dataclasses import dataclass, field
from itertools import count

from router.core.demand import Demand, retry_after_s
from router.core.fleet import Fleet
from router.core.pick import pick
from router.core.retry import Blame, Ruling, Verdict
from router.core.seat import Seat
from springtide.errors import Exhausted, NotFound, SpringtideError, Unavailable
from springtide.model.routing import (
    PoolReport,
    RoutedPool,
    RouterReport,
    WorkerUse,
)

DOUBT_S = 5.0
"""After a fault: how long the failed incarnation is left alone by the request, for the table to say whether it died."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. `number` is its place in line. `seat` is set while a worker has it."""

    pool: str
    number: int
    arrived_at: float
    deadline: float | None = None
    """The client's own; None: only the pool's waiting time-out."""
    attempts: int = 0
    excluded: dict[tuple[str, int], float] = field(default_factory=dict)
    """Incarnations that failed it, and until when they are not tried again by it."""
    seat: Seat | None = None
    waiting_since: float | None = None
    waited_s: float = 0.0
    hopeless_at: float | None = None
    """With a doubtful fault and no other worker: when to give up if the failed incarnation is still there."""

    def __lt__(self, other: "Ticket") -> bool:
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class Granted:
    """A held ticket has a worker (`ticket.seat`)."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Denied:
    """A held ticket is refused. `error` None: pass on the fault that it had."""

    ticket: Ticket
    error: SpringtideError | None


Verdicts = list[Granted | Denied]


class Admission:
    """See the module."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._numbers = count(1)
        self._queues: dict[str, list[Ticket]] = {}
        self._due_at: dict[str, float] = {}
        self._demand: dict[str, Demand] = {}

    # ------------------------------------------------------------ tickets

    def open(self, model: str, now: float, deadline: float | None = None) -> Ticket:
        """A ticket for a new request. Raises NotFound, Unavailable."""
        pool = self.fleet.pool_of(model)
        self.demand(pool.name).requests_total += 1
        return Ticket(pool.name, next(self._numbers), now, deadline)

    def admit(self, ticket: Ticket, now: float) -> bool:
        """True: it has a seat. False: it is held. Raises Unavailable or Exhausted with `retry_after_s`."""
        queue = self._queues.setdefault(ticket.pool, [])
        pool = self.fleet.table.pools.get(ticket.pool)
        if pool is None:
            raise self._gone(ticket)
        # Nobody passes those that wait, unless it is older than they are (a retried one).
        if (not queue or ticket < queue[0]) and self._seat(ticket, now):
            return True
        if not self.fleet.active(ticket.pool) and pool.max_workers == 0 and pool.starting == 0:
            raise self._reject(ticket, now, "POOL_AT_ZERO", f"Pool {pool.name} may have no worker (max_workers = 0).")
        if len(queue) >= max(1, pool.max_waiting):
            message = f"{len(queue)} requests wait for pool {pool.name} already, as many as are held."
            raise self._reject(ticket, now, "QUEUE_FULL", message, full=True)
        ticket.waiting_since = now
        insort(queue, ticket)
        due_at = self._due(ticket, pool, now)
        self._due_at[ticket.pool] = min(due_at, self._due_at.get(ticket.pool) or due_at)
        return False

    def settle(self, ticket: Ticket, ruling: Ruling, refusal: str, now: float) -> None:
        """The attempt on `ticket.seat` ended: frees the seat and remembers what that says about the worker."""
        seat = ticket.seat
        if seat is None:
            return
        ticket.seat = None
        seat.leave(now)
        if seat.own == 0:
            self.fleet.emptied(seat)
        if ruling.blame is Blame.SUCCESS:
            seat.succeeded()
        elif ruling.blame is Blame.FAILURE:
            seat.failed(now, ruling.doubtful)
        elif ruling.blame is Blame.REFUSAL:
            seat.refused(refusal, now)
            ticket.attempts -= 1
        if ruling.verdict is Verdict.RETRY:
            ticket.excluded[seat.id] = now + DOUBT_S
            ticket.hopeless_at = now + DOUBT_S if ruling.doubtful else None
            self.demand(ticket.pool).retries_total += 1

    def cancel(self, ticket: Ticket) -> None:
        """The client of a held ticket left."""
        queue = self._queues.get(ticket.pool)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
        ticket.waiting_since = None

    def _seat(self, ticket: Ticket, now: float) -> bool:
        excluded = [key for key, until in ticket.excluded.items() if until > now]
        seat = pick(self.fleet.of(ticket.pool), excluded, now)
        if seat is None:
            return False
        seat.enter(now)
        ticket.seat = seat
        ticket.attempts += 1
        ticket.hopeless_at = None
        if ticket.waiting_since is not None:
            ticket.waited_s += now - ticket.waiting_since
            ticket.waiting_since = None
        self.demand(ticket.pool).rate.dispatched(now)
        return True

    # ------------------------------------------------------------ queues

    def pump(self, pool_name: str, now: float) -> tuple[Verdicts, float | None]:
        """Grants and denies what can be now; and when to look again if nothing else happens (None: never)."""
        queue = self._queues.get(pool_name)
        if not queue:
            self._queues.pop(pool_name, None)
            self._due_at.pop(pool_name, None)
            return [], None
        self._watch_start(self.demand(pool_name), pool_name, now)
        verdicts: Verdicts = []
        if now >= self._due_at.get(pool_name, 0.0) or pool_name not in self.fleet.table.pools:
            verdicts += self._expire(pool_name, queue, now)
        at = 0
        while at < len(queue):
            ticket = queue[at]
            if self._seat(ticket, now):
                del queue[at]
                verdicts.append(Granted(ticket))
            elif ticket.excluded:
                at += 1  # another one behind it may take what this one avoids
            else:
                break
        if not queue:
            return verdicts, None
        wake_at = self._due_at[pool_name]
        for seat in self.fleet.of(pool_name):
            if seat.blocked_until > now:
                wake_at = min(wake_at, seat.blocked_until)
        return verdicts, wake_at

    def _expire(self, pool_name: str, queue: list[Ticket], now: float) -> Verdicts:
        """Takes out what waited too long, and computes when the next look is due."""
        pool = self.fleet.table.pools.get(pool_name)
        verdicts: Verdicts = []
        held = []
        for ticket in queue:
            denied = self._denial(ticket, pool, now)
            if denied is None:
                held.append(ticket)
            else:
                ticket.waiting_since = None
                verdicts.append(denied)
        queue[:] = held
        self._due_at[pool_name] = min((self._due(t, pool, now) for t in held), default=0.0)
        return verdicts

    def _denial(self, ticket: Ticket, pool: RoutedPool | None, now: float) -> Denied | None:
        if pool is None:
            return Denied(ticket, self._gone(ticket))
        if ticket.hopeless_at is not None and ticket.hopeless_at <= now:
            seats = self.fleet.of(ticket.pool)
            if seats and all(seat.id in ticket.excluded for seat in seats):
                return Denied(ticket, None)
            ticket.hopeless_at = None  # another one is there, or what failed it has gone and is being replaced
        if now >= _patience_ends(ticket, pool):
            message = f"No worker of pool {pool.name} took the request within {pool.waiting_timeout_s:g} s."
            return Denied(ticket, self._reject(ticket, now, "WAITING_TIMEOUT", message))
        if ticket.deadline is not None and now >= ticket.deadline:
            return Denied(ticket, self._reject(ticket, now, "DEADLINE", "The request's own deadline passed."))
        return None

    def _due(self, ticket: Ticket, pool: RoutedPool | None, now: float) -> float:
        times = [_patience_ends(ticket, pool), ticket.deadline, ticket.hopeless_at, *ticket.excluded.values()]
        return min((t for t in times if t is not None and t > now), default=now + 0.05)

    def _watch_start(self, demand: Demand, pool_name: str, now: float) -> None:
        """Measures how long a pool without workers takes to get one."""
        if not self.fleet.active(pool_name):
            if demand.starved_since is None:
                demand.starved_since = now
        elif demand.starved_since is not None:
            demand.start_took_s = now - demand.starved_since
            demand.starved_since = None

    def _reject(self, ticket: Ticket, now: float, reason: str, message: str, full: bool = False) -> SpringtideError:
        demand = self.demand(ticket.pool)
        waiting = len(self._queues.get(ticket.pool, ()))
        after_s = retry_after_s(waiting, demand.rate.per_second(now), demand.start_took_s)
        demand.rejected(now, after_s)
        kind = Exhausted if full else Unavailable
        return kind(message, reason=reason, remedy=f"Try again in {after_s:g} s.", retry_after_s=after_s)

    def _gone(self, ticket: Ticket) -> SpringtideError:
        return NotFound(kind="pool", name=ticket.pool, known=self.fleet.table.pools)

    # ------------------------------------------------------------ reports

    def demand(self, pool: str) -> Demand:
        """The counters of a pool."""
        found = self._demand.get(pool)
        if found is None:
            found = self._demand[pool] = Demand()
        return found

    def waiting(self, pool: str) -> int:
        """Requests held for a pool."""
        return len(self._queues.get(pool, ()))

    def waiting_pools(self) -> list[str]:
        """Pools with held requests."""
        return [name for name, queue in self._queues.items() if queue]

    def report(self, now: float) -> RouterReport:
        """What the control plane is told. Takes the first-token samples of the interval."""
        for name in [n for n in self._demand if n not in self.fleet.table.pools and not self._queues.get(n)]:
            del self._demand[name]
        pools = []
        for name in self.fleet.table.pools:
            demand = self.demand(name)
            p50, p99 = demand.take_ttft()
            queue = self._queues.get(name, ())
            oldest = max((now - t.waiting_since for t in queue if t.waiting_since is not None), default=0.0)
            pools.append(
                PoolReport(
                    name,
                    waiting=len(queue),
                    rejected=demand.rejected_now(now),
                    oldest_wait_s=oldest,
                    requests_total=demand.requests_total,
                    failed_total=demand.failed_total,
                    ttft_p50_s=p50,
                    ttft_p99_s=p99,
                )
            )
        uses = [WorkerUse(*s.id, s.own, s.failures_total, s.requests_total) for s in self.fleet.all()]
        return RouterReport(tuple(pools), tuple(uses))


def _patience_ends(ticket: Ticket, pool: RoutedPool | None) -> float:
    """When the ticket will have waited as long as its pool holds requests, all its waits together."""
    timeout_s = pool.waiting_timeout_s if pool is not None and pool.waiting_timeout_s > 0 else 300.0
    since = ticket.waiting_since if ticket.waiting_since is not None else ticket.arrived_at
    return since + timeout_s - ticket.waited_s
