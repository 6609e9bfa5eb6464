"""Waiting between attempts: exponential, capped, with jitter where many wait at once. Pure."""

from typing import Protocol


class Rng(Protocol):
    """What `random.Random` offers of it."""

    def random(self) -> float: ...


def delay_s(attempt: int, first_s: float, cap_s: float) -> float:
    """Seconds to wait after failed attempt `attempt` (from 1): doubled with each, never more than the cap."""
    return min(cap_s, first_s * 2.0 ** min(attempt - 1, 32))


def backoff_s(attempt: int, first_s: float, cap_s: float, rng: Rng) -> float:
    """The same with jitter: half of the delay plus a random half."""
    delay = delay_s(attempt, first_s, cap_s)
    return delay / 2 + rng.random() * delay / 2
