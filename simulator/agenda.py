"""Virtual time: what happens when. Ties happen in the order in which they were entered, so a run repeats exactly."""

import heapq
from collections.abc import Callable
from typing import Any

_Entry = tuple[float, int, Callable[..., Any], tuple[Any, ...]]


class Agenda:
    """Calls that are due at times (seconds). `now` only moves forward."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[_Entry] = []
        self._number = 0

    @property
    def calls_total(self) -> int:
        """Calls that were made, the one under way included."""
        return self._number - len(self._heap)

    def at(self, time: float, call: Callable[..., Any], *args: Any) -> None:
        """Calls at `time`, or now when that has passed. Who may change its mind checks a version of its own."""
        self._number += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._number, call, args))

    def after(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        """Calls `seconds` from now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(seconds, 0.0), self._number, call, args))

    def next_at(self) -> float | None:
        """When the next call is due; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def run_until(self, time: float) -> None:
        """All calls that are due by `time`, which is the present afterwards."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time:
            at, _, call, args = pop(heap)
            self.now = at
            call(*args)
        self.now = max(self.now, time)
