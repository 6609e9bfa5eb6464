"""The worker with the least used KV cache, corrected by what was sent there since its last report."""

from collections.abc import Iterable, Sequence

from router.core.policies.policy import Policy, Rng, least
from router.core.seat import Seat
from router.core.want import Want

_STEP = 0.02
"""Uses that differ by less count as equal: the requests decide then."""


class LeastKv(Policy):
    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        uses = estimated_kv(seats, now)
        if uses is None:
            return least(seats, now)
        ranked = zip(seats, uses, strict=True)
        return min(ranked, key=lambda x: (int(x[1] / _STEP), x[0].score(now), x[0].worker.worker_id))[0]


def estimated_kv(seats: Sequence[Seat], now: float) -> list[float] | None:
    """Use of each KV cache now, 0 to 1 and above. An unknown one is taken as the mean of the known ones, never as
    empty; None when none is known."""
    reported = [seat.kv_use if seat.kv_at > now - Seat.KV_MAX_AGE_S else None for seat in seats]
    known = [kv for kv in reported if kv is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    each = _of_one_request(seats, reported)
    present = (mean if kv is None else kv for kv in reported)
    return [kv + each * seat.sent_since_kv() for seat, kv in zip(seats, present, strict=True)]


def _of_one_request(seats: Iterable[Seat], reported: Iterable[float | None]) -> float:
    used, running, room = 0.0, 0, 0
    for seat, kv in zip(seats, reported, strict=True):
        room = max(room, seat.worker.max_in_flight)
        if kv is not None and seat.kv_in_flight > 0:
            used, running = used + kv, running + seat.kv_in_flight
    if running and used > 0:
        return used / running
    return 1 / room if room else _STEP
