"""What one worker holds within latency targets, learned from a pool's own past; pure.

The past is cut into windows. Each has a load per ACTIVE worker (requests per second; or requests at a time, where no
router counts arrivals) and a share of requests that met the targets, estimated from the latencies that were reported.
A curve that never rises is fitted through them: load per worker -> share that is met. Windows of cold engines, and
those that only inherit a backlog, are left out.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controlplane.core.snapshot import LoadSample

PROBE = 1.25  # so far beyond the highest load seen the curve is taken to go on as it ended
LEAST_WINDOWS = 3
_ITL_SOFT = 0.2  # the mean time between tokens decides for all between 0.8 and 1.2 times its target


class Targets(NamedTuple):
    """Seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Means over it. `rate`: arrivals per second; `held`: requests inside workers and waiting; `met`: share of requests
    within the targets. None: unknown."""

    at: float
    active: float
    rate: float | None
    held: float | None
    met: float | None
    cold: bool = False

    def load(self, by_rate: bool) -> float | None:
        return self.rate if by_rate else self.held


def met_ttft(p50_s: float, p99_s: float, target_s: float) -> float:
    """Share of requests within a target, from two quantiles."""
    if p99_s <= target_s:
        return 1.0
    if p50_s > target_s:
        return 0.5 * target_s / p50_s
    return 0.5 + 0.49 * (target_s - p50_s) / (p99_s - p50_s)


def met_itl(mean_s: float, target_s: float) -> float:
    """Share of requests within a target, from their mean."""
    return min(1.0, max(0.0, (1 + _ITL_SOFT - mean_s / target_s) / (2 * _ITL_SOFT)))


def windows(samples: Sequence[LoadSample], width_s: float, now: float, warm_s: float, targets: Targets) -> list[Window]:
    """Whole windows that have ended by `now`, oldest first. They lie on multiples of the width, so that the same past
    is always cut in the same way. `samples`: oldest first."""
    found: list[Window] = []
    teaches = (warm_s, targets)
    before: LoadSample | None = None
    begin, count, usual = 0, len(samples), 1
    while begin < count:
        end_at = (int(samples[begin].at // width_s) + 1) * width_s
        if end_at > now:
            break
        end = min(begin + usual, count)  # windows are alike: the last one's length is the guess for this one
        while end < count and samples[end].at < end_at:
            end += 1
        while end > begin + 1 and samples[end - 1].at >= end_at:
            end -= 1
        group = samples[begin:end]
        found.append(_known_window(end_at, group, before, teaches))
        before, begin, usual = group[-1], end, end - begin
    return found


_Teaches = tuple[float, Targets]  # how long an engine is cold, seconds, and what is to be met
_Made = tuple[Sequence[LoadSample], LoadSample | None, _Teaches, Window]
_MADE_KEPT = 32768
_made: dict[int, _Made] = {}  # by the last sample's identity: a window that has ended is the same for ever


def _known_window(at: float, group: Sequence[LoadSample], before: LoadSample | None, teaches: _Teaches) -> Window:
    """`_window`, made once for the same samples. What it gives follows from its arguments alone."""
    last = group[-1]
    made = _made.get(id(last))
    if made is not None:
        made_of, made_after, made_for, window = made
        if made_after is before and made_of == group and made_for == teaches and window.at == at:
            return window
    window = _window(at, group, before, *teaches)
    if len(_made) >= _MADE_KEPT:
        _made.clear()
    _made[id(last)] = (group, before, teaches, window)
    return window


def _window(
    at: float, group: Sequence[LoadSample], before: LoadSample | None, warm_s: float, targets: Targets
) -> Window:
    first, last = before or group[0], group[-1]
    seconds = last.at - first.at
    held = [float(sample.load) for sample in group if sample.load is not None]
    shares = [
        met_ttft(sample.ttft_p50_s, sample.ttft_p99_s, targets.ttft_s)
        for sample in group
        if sample.ttft_p50_s is not None and sample.ttft_p99_s is not None
    ]
    met = sum(shares) / len(shares) if shares else None
    itl = _itl(first, group, seconds)
    if itl is not None:
        met = min(1.0 if met is None else met, met_itl(itl, targets.itl_s))
    return Window(
        at=at,
        active=sum(sample.active for sample in group) / len(group),
        rate=_arrivals(first, last),
        held=sum(held) / len(held) if held else None,
        met=met,
        cold=any(s.youngest_s is not None and s.youngest_s < warm_s for s in group),
    )


def _arrivals(first: LoadSample, last: LoadSample) -> float | None:
    """Requests per second. A router that came or went in between brings or takes its whole total: unknown."""
    if first.routers != last.routers:
        return None
    return _rate(first.arrivals_total, last.arrivals_total, last.at - first.at)


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    if before is None or after is None or seconds <= 0 or after < before:
        return None
    return (after - before) / seconds


def _itl(first: LoadSample, group: Sequence[LoadSample], seconds: float) -> float | None:
    """Sequences in engines over the tokens per second that came out of them: what one token of one stream takes."""
    tokens = _rate(first.tokens_total, group[-1].tokens_total, seconds)
    if not tokens or any(sample.active != first.active for sample in group):
        return None
    running = [s.in_flight - (s.engine_waiting or 0) for s in group if s.in_flight is not None]
    return sum(running) / len(running) / tokens if running else None


def recent_rate(samples: Sequence[LoadSample], seconds: float, now: float) -> float | None:
    """Arrivals per second of the last so many seconds; None when no router tells."""
    inside = [s for s in samples[-_some(seconds) :] if s.at >= now - seconds and s.arrivals_total is not None]
    return _arrivals(inside[0], inside[-1]) if inside else None


def recent_load(samples: Sequence[LoadSample], seconds: float, now: float) -> float | None:
    """Mean of the requests in workers and waiting over the last so many seconds; None when it is unknown."""
    known = [float(s.load) for s in samples[-_some(seconds) :] if s.at >= now - seconds and s.load is not None]
    return sum(known) / len(known) if known else None


def _some(seconds: float) -> int:
    """So many samples surely reach back so far (they are at least 0.1 s apart)."""
    return int(seconds * 10) + 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of requests within the targets by load per worker. `loads` ascend, `shares` never rise. Empty: nothing is
    known."""

    loads: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    windows: int = 0

    def met(self, load: float) -> float:
        """Between two points the share is interpolated; a little beyond the last it goes on, further out it is 0."""
        if not self.loads:
            return 1.0
        at = bisect_left(self.loads, load)
        if at == 0:
            return self.shares[0]
        if at == len(self.loads):
            return self.shares[-1] if load <= PROBE * self.loads[-1] else 0.0
        low, high = self.loads[at - 1], self.loads[at]
        return self.shares[at - 1] + (self.shares[at] - self.shares[at - 1]) * (load - low) / (high - low)

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
        load = window.load(by_rate)
        if load is None or window.met is None or window.active <= 0:
            continue
        each = load / window.active
        good = window.met >= 0.5
        if not window.cold and load > 0 and (good or each >= inherits):
            points.append((each, window.met, load))
        inherits = 0.0 if good else max(each, inherits)
    if len(points) < LEAST_WINDOWS:
        return Curve()
    loads: list[float] = []
    shares: list[float] = []
    for low, high, share, _ in _falling(sorted(points)):
        if loads and low > PROBE * loads[-1]:  # nothing was seen in between: not taken for good
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
    total = sum(requests for _, requests in past)
    if total <= 0:
        return 1.0
    if workers <= 0:
        return 0.0
    return sum(requests * curve.met(load / workers) for load, requests in past) / total
