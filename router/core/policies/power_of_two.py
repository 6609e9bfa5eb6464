"""The least loaded of a few drawn at random: as good as nearly all, and many routers do not run to the same worker."""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng, least
from router.core.seat import Seat
from router.core.want import Want


class PowerOfTwo(Policy):
    def __init__(self, choices: int) -> None:
        self._choices = choices

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        left = list(seats)
        wanted = min(self._choices, len(left))
        return least([left.pop(min(int(rng.random() * len(left)), len(left) - 1)) for _ in range(wanted)], now)
