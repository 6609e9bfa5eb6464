"""A pool's past in windows: what arrived or was held per window, and the share of requests that met the targets; pure.

Windows of equal width lie on multiples of it. The share is estimated from the latencies that routers and workers
report. Samples of engines that have just become ACTIVE mark their window as cold.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controlplane.core.snapshot import LoadSample

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
    asked = (width_s, warm_s, targets)
    found, sizes = _cut_before(samples, asked, now)
    begin, count, known = sum(sizes), len(samples), len(sizes)
    while begin < count:
        end_at = (int(samples[begin].at // width_s) + 1) * width_s
        if end_at > now:
            break
        end = begin + 1
        while end < count and samples[end].at < end_at:
            end += 1
        before = samples[begin - 1] if begin else None
        found.append(_window(end_at, samples[begin:end], before, warm_s, targets))
        sizes.append(end - begin)
        begin = end
    whole = len(sizes) if begin < count else len(sizes) - 1  # no sample after it: more of that window may be to come
    if whole > known:
        if len(_cuts) >= _CUTS_KEPT:
            del _cuts[next(iter(_cuts))]
        seen = samples[: sum(sizes[:whole])]
        _cuts[id(seen[-1])] = _Cut(asked, seen, tuple(found[:whole]), tuple(sizes[:whole]))
    return found


@dataclass(frozen=True, slots=True)
class _Cut:
    """Samples that were cut into whole windows, and how many are in each."""

    asked: tuple[float, float, Targets]
    samples: Sequence[LoadSample]
    windows: tuple[Window, ...]
    sizes: tuple[int, ...]


_CUTS_KEPT = 512
_cuts: dict[int, _Cut] = {}  # by the last sample's identity, which it keeps alive


def _cut_before(
    samples: Sequence[LoadSample], asked: tuple[float, float, Targets], now: float
) -> tuple[list[Window], list[int]]:
    """(windows, samples in each) of the longest part of this past that was cut before. Nothing is trusted but what is
    compared: the samples are the same ones, but that the oldest of them may have been forgotten since."""
    since = now - 3 * asked[0]
    for count in range(len(samples), 0, -1):
        if samples[count - 1].at < since:
            break
        cut = _cuts.get(id(samples[count - 1]))
        ended_by = min(now, samples[count].at) if count < len(samples) else now
        if cut is None or cut.asked != asked or cut.windows[-1].at > ended_by:
            continue
        gone = len(cut.samples) - count
        if gone >= 0 and cut.samples[gone:] == samples[:count]:
            return _without(cut, gone)
    return [], []


def _without(cut: _Cut, gone: int) -> tuple[list[Window], list[int]]:
    """The windows of a cut whose first `gone` samples are forgotten: the first that is left may have lost some, and has
    none before it."""
    if not gone:
        return list(cut.windows), list(cut.sizes)
    first, begin = 0, 0
    while begin + cut.sizes[first] <= gone:
        begin += cut.sizes[first]
        first += 1
    end = begin + cut.sizes[first]
    _, warm_s, targets = cut.asked
    shorter = _window(cut.windows[first].at, cut.samples[gone:end], None, warm_s, targets)
    return [shorter, *cut.windows[first + 1 :]], [end - gone, *cut.sizes[first + 1 :]]


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
    inside = [s for s in _since(samples, now - seconds) if s.arrivals_total is not None]
    return _arrivals(inside[0], inside[-1]) if inside else None


def recent_load(samples: Sequence[LoadSample], seconds: float, now: float) -> float | None:
    """Mean of the requests in workers and waiting over the last so many seconds; None when it is unknown."""
    known = [float(s.load) for s in _since(samples, now - seconds) if s.load is not None]
    return sum(known) / len(known) if known else None


def _since(samples: Sequence[LoadSample], at: float) -> Sequence[LoadSample]:
    """The samples from then on."""
    return samples[bisect_left(samples, at, key=lambda sample: sample.at) :]
