"""What a pool's requests amount to: totals, rejections that still count as demand, first-token times, drain rate."""

import math
from collections import deque
from dataclasses import dataclass, field

_MAX_REJECTIONS = 4096
_MAX_SAMPLES = 2048
_RATE_SPAN_S = 10.0


@dataclass(slots=True)
class DispatchRate:
    """Requests per second that left the queue for a worker, over an exponentially weighted span of 10 s."""

    weight: float = 0.0
    at: float = 0.0

    def dispatched(self, now: float) -> None:
        self._decay(now)
        self.weight += 1.0

    def per_second(self, now: float) -> float:
        self._decay(now)
        return self.weight / _RATE_SPAN_S

    def _decay(self, now: float) -> None:
        if now > self.at:
            self.weight *= math.exp(-(now - self.at) / _RATE_SPAN_S)
            self.at = now


def retry_after_s(waiting: int, rate_per_s: float, wait_for_start_s: float | None) -> float:
    """When to come back: the time in which what waits would be dispatched at the measured rate.

    Without a rate (nothing serves): what a start took when last seen, else 5 s. Between 1 and 60 s.
    """
    if rate_per_s > 1e-3:
        wanted = (waiting + 1) / rate_per_s
    else:
        wanted = wait_for_start_s if wait_for_start_s is not None else 5.0
    return min(60.0, max(1.0, math.ceil(wanted)))


@dataclass(slots=True)
class Demand:
    """One pool's counters since the router started, and the samples of the running report interval."""

    requests_total: int = 0
    failed_total: int = 0
    retries_total: int = 0
    rate: DispatchRate = field(default_factory=DispatchRate)
    starved_since: float | None = None
    start_took_s: float | None = None
    """How long the pool was last without a routable worker while requests waited."""
    _rejected_until: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REJECTIONS))
    _ttft_s: list[float] = field(default_factory=list)

    def rejected(self, now: float, counts_for_s: float) -> None:
        """A request was refused for lack of a worker; it counts as demand until it may come back."""
        self._rejected_until.append(now + counts_for_s)

    def rejected_now(self, now: float) -> int:
        """Rejections that still count."""
        while self._rejected_until and self._rejected_until[0] <= now:
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
