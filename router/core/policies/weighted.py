"""In turn, in proportion to capacity: smooth weighted round robin, with the weights of slow start."""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng
from router.core.seat import Seat
from router.core.want import Want

_HEAVIEST = 1e6


class Weighted(Policy):
    """Each worker gains its weight at every choice; the richest is chosen and pays what all have gained."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._credit: dict[tuple[str, int], float] = {}

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        weights = [self._weight(seat) * seat.ramp(now) for seat in seats]
        # Only who can be chosen keeps credit: one that was away does not come back rich, and the table stays small.
        self._credit = {
            seat.id: self._credit.get(seat.id, 0.0) + weight for seat, weight in zip(seats, weights, strict=True)
        }
        chosen = max(seats, key=lambda seat: (self._credit[seat.id], -seat.requests_total, seat.worker.worker_id))
        self._credit[chosen.id] -= sum(weights)
        return chosen

    def _weight(self, seat: Seat) -> float:
        try:
            said = float(seat.worker.labels[self._label])
        except (KeyError, ValueError):
            said = 0.0
        if 0 < said <= _HEAVIEST:
            return said
        return float(min(seat.worker.max_in_flight, _HEAVIEST)) if seat.worker.max_in_flight > 0 else 1.0
