"""What a run costs and how it looked: worker-seconds by pool and state, and one sample of everything per interval."""

from collections import defaultdict
from dataclasses import dataclass

from controlplane.store.store import Records
from springtide.model.enums import State

COUNTED = (State.STARTING, State.ACTIVE, State.DRAINING)


@dataclass(frozen=True, slots=True)
class Look:
    """One sample: counts of requests and of workers by state, all pools together."""

    at_s: float
    arrived: int
    ended: int
    in_flight: int
    waiting: int
    starting: int
    active: int
    draining: int


class Meter:
    """Integrates over time: tell it of every commit."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, State], float] = defaultdict(float)
        self._counts: dict[tuple[str, State], int] = {}
        self._at: float | None = None

    def begin(self, now: float) -> None:
        """What was before does not count."""
        self.seconds.clear()
        self._at = now

    def committed(self, records: Records, now: float) -> None:
        """The records changed at `now`."""
        self.advance(now)
        counts: dict[tuple[str, State], int] = {}
        for worker in records.workers.values():
            if worker.state in COUNTED:
                key = (worker.pool, worker.state)
                counts[key] = counts.get(key, 0) + 1
        self._counts = counts

    def advance(self, now: float) -> None:
        if self._at is not None and now > self._at:
            for key, count in self._counts.items():
                self.seconds[key] += count * (now - self._at)
        self._at = now if self._at is not None else None

    def counts(self) -> dict[State, int]:
        """Workers by state now."""
        found = dict.fromkeys(COUNTED, 0)
        for (_, state), count in self._counts.items():
            found[state] += count
        return found

    def worker_seconds(self, pool: str = "") -> float:
        """STARTING, ACTIVE and DRAINING workers: all that hold GPUs for the pool (or for all)."""
        return sum(seconds for (name, _), seconds in self.seconds.items() if pool in ("", name))
