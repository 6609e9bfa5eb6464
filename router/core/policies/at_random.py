"""Any worker."""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng
from router.core.seat import Seat
from router.core.want import Want


class AtRandom(Policy):
    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        return seats[min(int(rng.random() * len(seats)), len(seats) - 1)]
