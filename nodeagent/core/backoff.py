"""Waiting between attempts: exponential, capped, with jitter."""

from typing import Protocol


class Rng(Protocol):
    """What `random.Random` offers of it."""

    def random(self) -> float: ...


def backoff_s(attempt: int, first_s: float, cap_s: float, rng: Rng) -> float:
    """Seconds to wait after failed attempt `attempt` (from 1): half of the doubled delay plus a random half."""
    delay_s = min(cap_s, first_s * 2.0 ** min(attempt - 1, 32))
    return delay_s / 2 + rng.random() * delay_s / 2
