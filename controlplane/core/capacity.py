"""What one worker holds within latency targets, learned from a pool's own past; pure.

The past is cut into windows (controlplane.core.past). Each has a load per ACTIVE worker (requests per second; or
requests at a time, where no router counts arrivals) and a share of requests that met the targets. A curve that never
rises is fitted through them: load per worker -> share that is met. Windows of cold engines, and those that only inherit
a backlog, are left out.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.past import Targets, Window, met_itl, met_ttft, windows

__all__ = ["PROBE", "Curve", "Targets", "Window", "expected", "learn", "met_itl", "met_ttft", "windows"]

PROBE = 1.25  # so far beyond the highest load seen the curve is taken to go on as it ended
LEAST_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of requests within the targets by load per worker. `loads` ascend, `shares` never rise. Empty: nothing is
    known."""

    loads: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    windows: int = 0

    def met(self, load: float) -> float:
        """Between two points the share is interpolated; a little beyond the last it goes on, further out it is 0."""
        return self.each_met((load,))[0]

    def each_met(self, of: Sequence[float]) -> list[float]:
        """`met` of each load."""
        loads, shares = self.loads, self.shares
        found: list[float] = []
        for load in of:
            at = bisect_left(loads, load)
            if 0 < at < len(loads):
                low, share = loads[at - 1], shares[at - 1]
                found.append(share + (shares[at] - share) * (load - low) / (loads[at] - low))
            elif at == 0:
                found.append(shares[0] if shares else 1.0)
            else:
                found.append(shares[-1] if load <= PROBE * loads[-1] else 0.0)
        return found

    @property
    def best(self) -> float:
        """What an almost idle worker meets: long prompts may miss the target by themselves."""
        return self.shares[0] if self.shares else 1.0

    def holds(self, goal: float) -> float:
        """The highest load per worker at which `goal` is met; 0 when it never is."""
        if not self.loads or self.met(self.loads[0]) < goal:
            return 0.0
        for index in range(1, len(self.loads)):
            if self.shares[index] < goal:
                low, high = self.loads[index - 1], self.loads[index]
                drop = self.shares[index - 1] - self.shares[index]
                return low + (high - low) * (self.shares[index - 1] - goal) / drop
        return PROBE * self.loads[-1]


def learn(past: Sequence[Window], *, by_rate: bool) -> Curve:
    """The curve through the windows, each with the weight of its requests. Empty while there are too few."""
    points: list[tuple[float, float, float]] = []
    inherits = 0.0  # load per worker of the bad window before: a lower one after it only drains what that left
    for window in past:
        load, met = window.rate if by_rate else window.held, window.met
        if load is None or met is None or window.active <= 0:
            continue
        each = load / window.active
        good = met >= 0.5
        if not window.cold and load > 0 and (good or each >= inherits):
            points.append((each, met, load))
        inherits = 0.0 if good else max(each, inherits)
    if len(points) < LEAST_WINDOWS:
        return Curve()
    loads: list[float] = []
    shares: list[float] = []
    for low, high, share, _ in _falling(sorted(points)):
        if loads and low > PROBE * loads[-1] > loads[-1]:  # nothing was seen in between: not taken for good
            loads.append(PROBE * loads[-1])
            shares.append(share)
        loads.append(low)
        shares.append(share)
        if high != low:
            loads.append(high)
            shares.append(share)
    return Curve(tuple(loads), tuple(shares), len(points))


def _falling(points: list[tuple[float, float, float]]) -> list[tuple[float, float, float, float]]:
    """Blocks of neighbouring windows that share one value: (lowest load, highest load, share, weight). Neighbours whose
    share rises are merged until none does (pool adjacent violators), and those of equal load, which differ by rounding
    only."""
    blocks: list[tuple[float, float, float, float]] = []
    for load, met, requests in points:
        low, share, weight = load, met, requests
        while blocks and (blocks[-1][2] <= share or blocks[-1][1] == low):
            low, _, share_below, weight_below = blocks.pop()
            both = weight_below + weight
            share, weight = (share_below * weight_below + share * weight) / both, both
        blocks.append((low, load, share, weight))
    return blocks


def expected(curve: Curve, past: Sequence[tuple[float, float]], workers: float) -> float:
    """Share of the requests of past windows, (load, requests) each, that so many workers would have met."""
    total = sum([requests for _, requests in past])
    if total <= 0:
        return 1.0
    if workers <= 0:
        return 0.0
    shares = curve.each_met([load / workers for load, _ in past])
    return sum([requests * share for (_, requests), share in zip(past, shares, strict=True)]) / total
