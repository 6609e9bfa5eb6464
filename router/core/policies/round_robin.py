"""One worker after the other, in the order of their ids."""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng
from router.core.seat import Seat
from router.core.want import Want


class RoundRobin(Policy):
    """Remembers the last one only: a worker that comes or goes does not restart the round."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        in_order = sorted(seats, key=lambda seat: seat.worker.worker_id)
        return next((seat for seat in in_order if seat.worker.worker_id > self._last), in_order[0])

    def sent(self, seat: Seat, want: Want) -> None:
        self._last = seat.worker.worker_id
