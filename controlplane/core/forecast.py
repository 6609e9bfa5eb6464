"""Forecasts of a series, pure and small: damped trend over buckets, and the peak of a look-back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.snapshot import LoadSample

UNMEASURED_START_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Mean of what was known in `[at, at + width)`."""

    at: float
    value: float


@dataclass(frozen=True, slots=True)
class Need:
    """Workers that a past window called for, and how many requests arrived (or were held) in it."""

    at: float
    workers: float
    weight: float


def buckets(points: Sequence[tuple[float, float]], width_s: float, now: float) -> list[Bucket]:
    """Means of buckets that end at `now`, oldest first; a bucket without a point is left out."""
    sums: dict[int, tuple[float, int]] = {}
    for at, value in points:
        index = math.floor((now - at) / width_s)
        total, count = sums.get(index, (0.0, 0))
        sums[index] = (total + value, count + 1)
    return [Bucket(now - (i + 1) * width_s, sums[i][0] / sums[i][1]) for i in sorted(sums, reverse=True)]


def trend(
    series: Sequence[float], steps: float, *, level: float = 0.5, slope: float = 0.2, damping: float = 0.9
) -> float:
    """Holt's damped trend, `steps` buckets ahead; never below 0."""
    if not series:
        return 0.0
    now, change = series[0], 0.0
    for value in series[1:]:
        before = now
        now = level * value + (1 - level) * (now + damping * change)
        change = slope * (now - before) + (1 - slope) * damping * change
    ahead = damping * (1 - damping**steps) / (1 - damping) if damping < 1 else steps
    return max(0.0, now + change * ahead)


def peak(series: Sequence[float]) -> float:
    """The highest bucket."""
    return max(series, default=0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def weighted_quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """The value that covers `share` of the weight, of (value, weight) pairs; 0 of none."""
    left = share * sum(weight for _, weight in values)
    for value, weight in sorted(values):
        left -= weight
        if left <= 1e-9:
            return value
    return max((value for value, _ in values), default=0.0)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def start_up_s(measured_s: Sequence[float], given_s: float = 0.0) -> float:
    """Lead time: what is set, else the median of the measured start-ups, else a guess."""
    return given_s or (median(measured_s) if measured_s else UNMEASURED_START_UP_S)


def loads(samples: Sequence[LoadSample], since: float) -> list[tuple[float, float]]:
    """(time, load) of the samples from `since` on whose load is known."""
    return [(s.at, float(s.load)) for s in samples if s.at >= since and s.load is not None]
