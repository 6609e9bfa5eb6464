"""How long a held ticket waits, and what it is told that cannot be served."""

from collections.abc import Sequence

from router.core.pick import meets
from router.core.seat import Seat
from router.core.ticket import Ticket
from router.core.want import Needs
from springtide.errors import Unavailable
from springtide.model.routing import RoutedPool


def patience_ends(ticket: Ticket, pool: RoutedPool | None) -> float:
    """When the ticket will have waited as long as its pool holds requests, all its waits together."""
    timeout_s = pool.waiting_timeout_s if pool is not None and pool.waiting_timeout_s > 0 else 300.0
    since = ticket.waiting_since if ticket.waiting_since is not None else ticket.arrived_at
    return since + timeout_s - ticket.waited_s


def due(ticket: Ticket, pool: RoutedPool | None, now: float) -> float:
    """When time alone may change something for it."""
    times = [patience_ends(ticket, pool), ticket.deadline, ticket.hopeless_at, *ticket.excluded.values()]
    return min((t for t in times if t is not None and t > now), default=now + 0.05)


def check_labels(ticket: Ticket, seats: Sequence[Seat]) -> None:
    """Raises Unavailable where workers serve and none of them has the labels that are asked for."""
    wanted = Needs(ticket.want.needs.labels)
    if not seats or any(meets(seat.worker, wanted) for seat in seats):
        return
    asked = ", ".join(f"{key}={value}" for key, value in wanted.labels)
    known = sorted({f"{key}={value}" for seat in seats for key, value in seat.worker.labels.items()})
    raise Unavailable(
        f"No worker of pool {ticket.pool} has the labels {asked}.",
        reason="NO_WORKER_HAS_LABELS",
        field="x-require-labels",
        value=asked,
        remedy=f"Known: {', '.join(known[:20]) or 'none'}.",
        retry_after_s=5.0,
    )
