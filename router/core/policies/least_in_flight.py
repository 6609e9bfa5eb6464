"""The worker with the fewest requests: the shims' counts, corrected by what was sent since."""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng, least
from router.core.seat import Seat
from router.core.want import Want


class LeastInFlight(Policy):
    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        return least(seats, now)
