"""What a pool's requests amount to: totals, rejections that still count as demand, first-token times, drain rate."""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from router.core.asked import Asked, Labels
from router.core.ticket import Ticket
from springtide.model.routing import PoolReport

_MAX_REJECTIONS = 4096
_MAX_SAMPLES = 2048
_RATE_SPAN_S = 10.0


@dataclass(slots=True)
class DispatchRate:
    """Requests per second that left the queue for a worker, over an exponentially weighted span of 10 s."""

    weight: float = 0.0
    at: float = 0.0

    def dispatched(self, now: float) -> None:
        if now > self.at:
            self._decay(now)
        self.weight += 1.0

    def per_second(self, now: float) -> float:
        self._decay(now)
        return self.weight / _RATE_SPAN_S

    def _decay(self, now: float) -> None:
        if now > self.at:
            self.weight *= math.exp(-(now - self.at) / _RATE_SPAN_S)
            self.at = now


def retry_after_s(waiting: int, rate_per_s: float, start_up_s: float | None, starved_s: float = 0.0) -> float:
    """When to come back: the time in which what waits would be dispatched at the measured rate, 1 to 60 s.

    Without a rate (nothing serves): what is left of a start, by how long the pool's starts take and how long it has
    been without a worker; for one that is overdue, a quarter of a start more. 1 to 600 s; 5 s where none was measured.
    """
    if rate_per_s > 1e-3:
        return min(60.0, max(1.0, math.ceil((waiting + 1) / rate_per_s)))
    if start_up_s is None:
        return 5.0
    left_s = start_up_s - starved_s
    return min(600.0, max(1.0, math.ceil(left_s if left_s > 0 else start_up_s / 4)))


@dataclass(slots=True)
class Demand:
    """One pool's counters since the router started, and the samples of the running report interval."""

    requests_total: int = 0
    failed_total: int = 0
    retries_total: int = 0
    trips_total: int = 0
    """Times that a worker's breaker opened."""
    rate: DispatchRate = field(default_factory=DispatchRate)
    starved_since: float | None = None
    start_took_s: float | None = None
    """How long the pool was last without a routable worker while requests waited."""
    asked: Asked = field(default_factory=Asked)
    _rejected_until: deque[tuple[float, Labels]] = field(default_factory=lambda: deque(maxlen=_MAX_REJECTIONS))
    _ttft_s: list[float] = field(default_factory=list)

    def looked(self, active: int, held: bool, now: float) -> None:
        """Measures how long a pool that is asked for takes to get a worker. `held`: requests wait for it already."""
        if active:
            if self.starved_since is not None and held:
                self.start_took_s = now - self.starved_since
            self.starved_since = None
        elif self.starved_since is None or not (held or self.rejected_now(now)):
            self.starved_since = now

    def retry_after_s(self, waiting: int, start_up_s: float | None, serves: bool, now: float) -> float:
        """When a refused request may come back. `start_up_s`: as the control plane measured it, else as seen here."""
        measured = self.start_took_s if start_up_s is None else start_up_s
        # What a pool did while it had workers says nothing about when it will have one.
        rate = self.rate.per_second(now) if serves else 0.0
        starved_s = 0.0 if self.starved_since is None else now - self.starved_since
        return retry_after_s(waiting, rate, measured, starved_s)

    def rejected(self, now: float, counts_for_s: float, labels: Labels = ()) -> None:
        """A request was refused for lack of a worker; it counts as demand until it may come back."""
        self._rejected_until.append((now + counts_for_s, labels))

    def rejected_now(self, now: float) -> int:
        """Rejections that still count."""
        while self._rejected_until and self._rejected_until[0][0] <= now:
            self._rejected_until.popleft()
        return len(self._rejected_until)

    def first_token(self, seconds: float) -> None:
        """Time from the request's arrival to its first token."""
        if len(self._ttft_s) < _MAX_SAMPLES:
            self._ttft_s.append(seconds)

    def take_ttft(self) -> tuple[float | None, float | None]:
        """p50 and p99 since the last call; None where nothing was measured."""
        samples, self._ttft_s = sorted(self._ttft_s), []
        if not samples:
            return None, None
        return samples[(len(samples) - 1) // 2], samples[math.ceil(0.99 * len(samples)) - 1]

    def report(self, pool: str, held: Collection[Ticket], running: int, now: float) -> PoolReport:
        """For the control plane. Takes the samples of the interval. `running`: own requests at the pool's workers."""
        p50, p99 = self.take_ttft()
        rejected = self.rejected_now(now)
        return PoolReport(
            pool,
            waiting=len(held),
            rejected=rejected,
            oldest_wait_s=max((now - t.waiting_since for t in held if t.waiting_since is not None), default=0.0),
            requests_total=self.requests_total,
            failed_total=self.failed_total,
            ttft_p50_s=p50,
            ttft_p99_s=p99,
            by_needs=self.asked.report(held, [labels for _, labels in self._rejected_until], running, now),
        )
