"""Which worker takes a request: the least in-flight, slow start considered, among those that may take it."""

from collections.abc import Collection, Iterable

from router.core.seat import Seat


def pick(seats: Iterable[Seat], excluded: Collection[tuple[str, int]], now: float) -> Seat | None:
    """The best seat or None. Ties go to the one that served least, then by id.

    One that others seem to fill is asked only when nothing better is there: the count is seconds old.
    """
    best: Seat | None = None
    best_rank: tuple[bool, float, int, str] | None = None
    for seat in seats:
        if seat.blocked_until > now or not seat.has_room() or seat.id in excluded:
            continue
        rank = (seat.likely_full(), seat.score(now), seat.requests_total, seat.worker.worker_id)
        if best_rank is None or rank < best_rank:
            best, best_rank = seat, rank
    return best
