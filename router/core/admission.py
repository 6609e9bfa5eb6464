"""Requests on their way to a worker: dispatched at once, held in a bounded queue per pool, or refused.

`Admission` owns the fleet, queues and demand. Callers open a `Ticket`, then `admit` it; a held ticket is granted or
denied by a later `pump` of its pool, which is due after every change and at the time that `pump` gives.
"""

from bisect import insort
from itertools import count

from router.core.board import ONE_PROCESS, Board
from router.core.demand import Demand
from router.core.fleet import Fleet
from router.core.patience import check_labels, due, patience_ends
from router.core.pick import pick
from router.core.policies.book import PolicyBook
from router.core.policies.policy import Policy, Rng
from router.core.retry import SERVED, Blame, Ruling, Verdict
from router.core.seat import Seat
from router.core.ticket import Denied, Granted, Ticket
from router.core.want import NO_NEEDS, NOTHING, Needs, Want
from springtide.errors import Exhausted, NotFound, SpringtideError, Unavailable
from springtide.model.routing import RoutedPool, RouterReport, WorkerUse

DOUBT_S = 5.0
"""After a fault: how long the failed incarnation is left alone by the request, for the table to say whether it died."""
_LOOK_AGAIN_S = 0.01
"""How soon a full worker is looked at again that the router's other processes may have left."""
_TOO_LATE = "No worker took the request by its own deadline."
_LEARNING = 0.1
"""Weight of one more answer in the expected length of the next."""
Verdicts = list[Granted | Denied]
__all__ = ["DOUBT_S", "Admission", "Denied", "Granted", "Ticket"]


class Admission:
    """See the module."""

    def __init__(self, rng: Rng, board: Board = ONE_PROCESS) -> None:
        self.fleet = Fleet(board)
        self._rng = rng
        self._policies = PolicyBook()
        self._shed: dict[str, list[Granted | Denied]] = {}
        self._numbers = count(1)
        self._queues: dict[str, list[Ticket]] = {}
        self._due_at: dict[str, float] = {}
        self._demand: dict[str, Demand] = {}

    # ------------------------------------------------------------ tickets

    def open(self, model: str, now: float, deadline: float | None = None, want: Want = NOTHING) -> Ticket:
        """A ticket for a new request. Raises NotFound, Unavailable."""
        pool = self.fleet.pool_of(model, want.role)
        demand = self._demand.get(pool.name) or self.demand(pool.name)
        demand.requests_total += 1
        ticket = Ticket(pool.name, next(self._numbers), now, deadline, want)
        ticket.call_deadline = deadline
        if want.deadline_s is not None:
            ticket.deadline = min(deadline or float("inf"), now + want.deadline_s)
        return ticket

    def admit(self, ticket: Ticket, now: float) -> bool:
        """True: it has a seat. False: it is held. Raises Unavailable or Exhausted with `retry_after_s`.

        A full queue makes room for a higher priority: its last one is denied by the next `pump`.
        """
        queue = self._queues.get(ticket.pool)
        pool = self.fleet.table.pools.get(ticket.pool)
        if pool is None:
            raise self._gone(ticket)
        seats, demand = self.fleet.of(ticket.pool), self._demand.get(ticket.pool) or self.demand(ticket.pool)
        if not seats or demand.starved_since is not None:
            demand.looked(len(seats), bool(queue), now)
        # Nobody passes those that wait, unless it is older than they are (a retried one).
        if (not queue or ticket < queue[0]) and self._seat(ticket, now):
            return True
        if queue is None:
            queue = self._queues[ticket.pool] = []
        if not seats and pool.max_workers == 0 and pool.starting == 0:
            raise self._reject(ticket, now, "POOL_AT_ZERO", f"Pool {pool.name} may have no worker (max_workers = 0).")
        if ticket.deadline is not None and ticket.deadline <= now:
            raise self._reject(ticket, now, "DEADLINE", _TOO_LATE)
        if ticket.want.needs.labels and pool.starting == 0:
            self._check_labels(ticket, now)
        cell = self.fleet.waiting_cell(pool.name)
        if not ticket.had_seat and len(queue) + cell.siblings() >= max(1, pool.max_waiting):
            message = f"{pool.max_waiting} requests wait for pool {pool.name} already, as many as are held."
            last = next((held for held in reversed(queue) if not held.had_seat), ticket)
            if last.want.priority >= ticket.want.priority:
                raise self._reject(ticket, now, "QUEUE_FULL", message, full=True)
            denied = Denied(last, self._reject(last, now, "QUEUE_FULL", message, full=True))
            self._shed.setdefault(pool.name, []).append(denied)
            last.waiting_since = None
            queue.remove(last)
        ticket.waiting_since = now
        insort(queue, ticket)
        cell.put(len(queue))
        due_at = due(ticket, pool, now)
        self._due_at[ticket.pool] = min(due_at, self._due_at.get(ticket.pool) or due_at)
        return False

    def settle(self, ticket: Ticket, ruling: Ruling, refusal: str, now: float) -> None:
        """The attempt on `ticket.seat` ended: frees the seat and remembers what that says about the worker."""
        seat = ticket.seat
        if seat is None:
            return
        ticket.seat = None
        if ticket.want.needs is not NO_NEEDS:
            self.demand(ticket.pool).asked.left(ticket.want.needs.labels)
        seat.leave(now)
        if ticket.tokens:
            seat.own_tokens -= ticket.tokens
            seat.own_prefill -= ticket.prefill
            ticket.tokens = ticket.prefill = 0
        if ticket.probe:
            ticket.probe = False
            seat.breaker.probe_over()
        if seat.own == 0:
            self.fleet.emptied(seat)
        if ruling is SERVED:
            seat.succeeded()
            return
        if ruling.blame is Blame.SUCCESS:
            seat.succeeded()
        elif ruling.blame is Blame.FAILURE:
            if seat.failed(now, ruling.doubtful):
                self.demand(ticket.pool).trips_total += 1
        elif ruling.blame is Blame.REFUSAL:
            seat.refused(refusal, now)
            ticket.attempts -= 1
        if ruling.verdict is Verdict.CONTINUE and ticket.weight_version is None:
            ticket.weight_version = seat.worker.weight_version
        if ruling.verdict in (Verdict.RETRY, Verdict.CONTINUE):
            ticket.excluded = {**ticket.excluded, seat.id: now + DOUBT_S}
            ticket.hopeless_at = now + DOUBT_S if ruling.doubtful else None
            self.demand(ticket.pool).retries_total += 1

    def first_byte(self, ticket: Ticket, seat: Seat) -> bool:
        """The first token of the attempt there came. True: a worker that had broken is open to everybody again."""
        if ticket.seat is not seat:
            return False
        seat.own_prefill -= ticket.prefill
        ticket.prefill = 0
        if not ticket.probe:
            return False
        ticket.probe = False
        seat.succeeded()
        return True

    def answered(self, ticket: Ticket, tokens: int) -> None:
        """An answer of so many tokens ended well: what the pool's next ones may be expected to have."""
        policy = self.policy(ticket.pool)
        seen = policy.expected_output_tokens
        policy.expected_output_tokens = tokens if seen is None else seen + _LEARNING * (tokens - seen)

    def cancel(self, ticket: Ticket) -> None:
        """The client of a held ticket left."""
        queue = self._queues.get(ticket.pool)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            self.fleet.waiting_cell(ticket.pool).put(len(queue))
        shed = self._shed.get(ticket.pool)
        if shed:
            shed[:] = [denied for denied in shed if denied.ticket is not ticket]
        ticket.waiting_since = None

    def policy(self, pool: str) -> Policy:
        """The pool's routing policy; a new one when what the pool says has changed."""
        routed = self.fleet.table.pools.get(pool)
        return self._policies.of(pool, routed.routing) if routed is not None else self._policies.of(pool)

    def _seat(self, ticket: Ticket, now: float) -> bool:
        name, want = ticket.pool, ticket.want
        seats = self.fleet.of(name)
        excluded: list[tuple[str, int]] = []
        if ticket.excluded:
            excluded = [key for key, until in ticket.excluded.items() if until > now]
        if ticket.weight_version is not None:
            excluded += [seat.id for seat in seats if not ticket.suits(seat)]
        policy = self.policy(name)
        seat = pick(policy, seats, excluded, now, self._rng, want)
        if seat is None:
            return False
        ticket.probe = seat.enter(now)
        tokens, prefill = policy.cost(want)
        if tokens:
            ticket.tokens, ticket.prefill = tokens, prefill
            seat.own_tokens += tokens
            seat.own_prefill += prefill
        ticket.seat = seat
        ticket.had_seat = True
        ticket.deadline = ticket.call_deadline
        want.placed()
        ticket.attempts += 1
        ticket.hopeless_at = None
        if ticket.waiting_since is not None:
            ticket.waited_s += now - ticket.waiting_since
            ticket.waiting_since = None
        demand = self._demand.get(name) or self.demand(name)
        demand.rate.dispatched(now)
        if ticket.want.needs is not NO_NEEDS:
            demand.asked.entered(ticket.want.needs.labels)
        return True

    def _check_labels(self, ticket: Ticket, now: float) -> None:
        """What no worker may take is refused, and wanted of the control plane until it may come back. With the routing
        policy `capabilities` it waits: such a pool starts workers for what requests ask for."""
        pool = self.fleet.table.pools.get(ticket.pool)
        if pool is not None and pool.routing.name == "capabilities":
            return
        try:
            check_labels(ticket, self.fleet.of(ticket.pool))
        except Unavailable as error:
            self.demand(ticket.pool).asked.missed(ticket.want.needs.labels, now + (error.retry_after_s or 0.0))
            raise

    # ------------------------------------------------------------ queues

    def pump(self, pool_name: str, now: float) -> tuple[Verdicts, float | None]:
        """Grants and denies what can be now; and when to look again if nothing else happens (None: never)."""
        queue = self._queues.get(pool_name)
        verdicts: Verdicts = self._shed.pop(pool_name, [])
        if not queue:
            self._queues.pop(pool_name, None)
            self._due_at.pop(pool_name, None)
            return verdicts, None
        self.demand(pool_name).looked(self.fleet.active(pool_name), True, now)
        if now >= self._due_at.get(pool_name, 0.0) or pool_name not in self.fleet.table.pools:
            verdicts += self._expire(pool_name, queue, now)
        verdicts += self._dispatch(queue, now)
        self.fleet.waiting_cell(pool_name).put(len(queue))
        if not queue:
            return verdicts, None
        wake_at = self._due_at[pool_name]
        for seat in self.fleet.of(pool_name):
            if seat.free_at() > now:
                wake_at = min(wake_at, seat.free_at())
            elif seat.cell.siblings():
                wake_at = min(wake_at, now + _LOOK_AGAIN_S)
        return verdicts, wake_at

    def _dispatch(self, queue: list[Ticket], now: float) -> Verdicts:
        """In order; who finds nothing that suits it does not hold up those behind it."""
        granted: Verdicts = []
        in_vain: set[Needs] = set()
        at = 0
        while at < len(queue):
            ticket = queue[at]
            if ticket.want.needs not in in_vain and self._seat(ticket, now):
                del queue[at]
                granted.append(Granted(ticket))
            elif ticket.excluded:
                at += 1  # another one behind it may take what this one avoids
            elif ticket.want.needs is not NO_NEEDS:
                at += 1
                in_vain.add(ticket.want.needs)
            else:
                break
        return granted

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
        self._due_at[pool_name] = min((due(t, pool, now) for t in held), default=0.0)
        return verdicts

    def _denial(self, ticket: Ticket, pool: RoutedPool | None, now: float) -> Denied | None:
        if pool is None:
            return Denied(ticket, self._gone(ticket))
        if ticket.hopeless_at is not None and ticket.hopeless_at <= now:
            seats = self.fleet.of(ticket.pool)
            if seats and all(seat.id in ticket.excluded for seat in seats):
                return Denied(ticket, None)
            ticket.hopeless_at = None  # another one is there, or what failed it has gone and is being replaced
        if ticket.weight_version is not None:
            seats = self.fleet.of(ticket.pool)
            if seats and not any(ticket.suits(seat) for seat in seats):
                return Denied(ticket, None)  # the pool has moved on to other weights
        if now >= patience_ends(ticket, pool):
            message = f"No worker of pool {pool.name} took the request within {pool.waiting_timeout_s:g} s."
            return Denied(ticket, self._reject(ticket, now, "WAITING_TIMEOUT", message))
        if ticket.deadline is not None and now >= ticket.deadline:
            return Denied(ticket, self._reject(ticket, now, "DEADLINE", _TOO_LATE))
        return None

    def retry_after_s(self, pool_name: str, now: float) -> float:
        """When a request for the pool may come back, whole seconds."""
        pool = self.fleet.table.pools.get(pool_name)
        start_up_s = pool.start_up_s if pool is not None else None
        serves = self.fleet.active(pool_name) > 0
        return self.demand(pool_name).retry_after_s(self.waiting(pool_name), start_up_s, serves, now)

    def _reject(self, ticket: Ticket, now: float, reason: str, message: str, full: bool = False) -> SpringtideError:
        after_s = self.retry_after_s(ticket.pool, now)
        self.demand(ticket.pool).rejected(now, after_s, ticket.want.needs.labels)
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

    def trips(self, pool: str) -> int:
        """Times that a breaker of the pool's workers opened. Makes nothing: it is read from another thread."""
        demand = self._demand.get(pool)
        return demand.trips_total if demand is not None else 0

    def waiting(self, pool: str) -> int:
        """Requests held for a pool."""
        return len(self._queues.get(pool, ()))

    def waiting_pools(self) -> list[str]:
        """Pools with held requests."""
        return [name for name, queue in self._queues.items() if queue]

    def report(self, now: float) -> RouterReport:
        """What the control plane is told. Takes the first-token samples of the interval."""
        known = self.fleet.table.pools
        for name in [n for n in self._demand if n not in known and not self._queues.get(n)]:
            del self._demand[name]
        self._policies.keep(known)
        running: dict[str, int] = {}
        for seat in self.fleet.all():
            running[seat.worker.pool] = running.get(seat.worker.pool, 0) + seat.own
        pools = tuple(
            self.demand(name).report(name, self._queues.get(name, ()), running.get(name, 0), now) for name in known
        )
        uses = tuple(WorkerUse(*s.id, s.own, s.failures_total, s.requests_total) for s in self.fleet.all())
        return RouterReport(pools, uses)
