"""Time as an argument: wall-clock seconds that never jump while a process lives."""

import time
from typing import Protocol


class Clock(Protocol):
    """Gives the present as seconds since the epoch."""

    def now(self) -> float: ...


class SystemClock:
    """Wall clock read once, then advanced by the monotonic clock, so that a clock step never moves a deadline."""

    def __init__(self) -> None:
        self._wall_at_start = time.time()
        self._monotonic_at_start = time.monotonic()

    def now(self) -> float:
        return self._wall_at_start + (time.monotonic() - self._monotonic_at_start)


class ManualClock:
    """A clock for tests: moves only when told to."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Moves forward by `seconds` (>= 0) and returns the new time."""
        if seconds < 0:
            raise ValueError(f"seconds = {seconds}: time only moves forward")
        self._now += seconds
        return self._now
