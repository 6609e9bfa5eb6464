"""Which worker takes a request: the pool's policy chooses among the seats that may take it."""

from collections.abc import Collection, Sequence

from router.core.policies.capabilities import has_labels
from router.core.policies.policy import Policy, Rng
from router.core.policies.weight_version import is_within
from router.core.seat import Seat
from router.core.want import NO_NEEDS, NOTHING, Needs, Want
from springtide.model.routing import RoutedWorker


def pick(
    policy: Policy,
    seats: Sequence[Seat],
    excluded: Collection[tuple[str, int]],
    now: float,
    rng: Rng,
    want: Want = NOTHING,
) -> Seat | None:
    """The chosen seat or None. No policy ever sees one that is blocked, full, excluded or lacks what the request needs.

    One that others seem to fill is asked only when nothing better is there: the count is seconds old.
    """
    free: list[Seat] = []
    full: list[Seat] = []
    needs = want.needs
    for seat in seats:
        load = seat.load_if_admits(now)
        if load is None or (excluded and seat.id in excluded):
            continue
        if needs is not NO_NEEDS and not meets(seat.worker, needs):
            continue
        (full if 0 < seat.worker.max_in_flight <= load else free).append(seat)
    candidates = free or full
    if not candidates:
        return None
    chosen = policy.choose(candidates, want, now, rng) if len(candidates) > 1 else candidates[0]
    policy.sent(chosen, want)
    return chosen


def meets(worker: RoutedWorker, needs: Needs) -> bool:
    """Labels and weight version."""
    return has_labels(worker, needs.labels) and is_within(worker, needs.min_weight_version, needs.max_weight_version)
