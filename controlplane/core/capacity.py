"""What one worker holds within latency targets, learned from a pool's own past; pure.

The past is cut into windows. Each has a load per ACTIVE worker (requests per second, or requests inside it where no
router counts arrivals) and a verdict: did the latencies stay within their targets? The capacity is the load that
divides good windows from bad ones with the fewest requests on the wrong side. Windows of cold engines, and those that
only inherit a backlog, are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.snapshot import LoadSample

PROBE = 1.25  # nothing has been bad yet: so much more than the highest load seen is tried
RETREAT = 0.8  # everything has been bad: so much of the lowest load seen
TTFT_SHARE = 0.5  # the median may take half of the target: the tail is a multiple of it
ITL_SHARE = 0.8
LEAST_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Means over it. `rate`: arrivals per second; `held`: requests inside workers and waiting. None: unknown."""

    at: float
    active: float
    rate: float | None
    held: float | None
    ttft_s: float | None
    itl_s: float | None
    cold: bool

    def good(self, targets: Targets) -> bool | None:
        """Whether the latencies were within their targets; None when neither is known."""
        if self.ttft_s is None and self.itl_s is None:
            return None
        slow = self.ttft_s is not None and self.ttft_s > targets.ttft_s * TTFT_SHARE
        return not (slow or (self.itl_s is not None and self.itl_s > targets.itl_s * ITL_SHARE))


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one worker. `windows` 0: nothing is known, `value` is what was given."""

    value: float
    windows: int = 0
    wrong: float = 0.0  # share of the requests on the wrong side of it
    bounded: bool = False  # good and bad windows were seen: no guess

    def __str__(self) -> str:
        if not self.windows:
            return f"{self.value:.2f} a worker (given)"
        kind = "measured" if self.bounded else "not reached yet"
        return f"{self.value:.2f} a worker ({kind}, {self.windows} windows)"


def windows(samples: Sequence[LoadSample], width_s: float, now: float, warm_s: float) -> list[Window]:
    """Whole windows that end at `now`, oldest first."""
    groups: dict[int, list[LoadSample]] = {}
    for sample in samples:
        groups.setdefault(int((now - sample.at) // width_s), []).append(sample)
    found: list[Window] = []
    before: LoadSample | None = None
    for index in sorted(groups, reverse=True):
        group = groups[index]
        found.append(_window(now - index * width_s, group, before, warm_s))
        before = group[-1]
    return found


def _window(at: float, group: list[LoadSample], before: LoadSample | None, warm_s: float) -> Window:
    first, last = before or group[0], group[-1]
    seconds = last.at - first.at
    held = [float(sample.load) for sample in group if sample.load is not None]
    ttfts = [sample.ttft_p50_s for sample in group if sample.ttft_p50_s is not None]
    active = sum(sample.active for sample in group) / len(group)
    return Window(
        at=at,
        active=active,
        rate=_rate(first.arrivals_total, last.arrivals_total, seconds),
        held=sum(held) / len(held) if held else None,
        ttft_s=sum(ttfts) / len(ttfts) if ttfts else None,
        itl_s=_itl(first, group, seconds),
        cold=any(s.youngest_s is not None and s.youngest_s < warm_s for s in group),
    )


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    if before is None or after is None or seconds <= 0 or after < before:
        return None
    return (after - before) / seconds


def _itl(first: LoadSample, group: list[LoadSample], seconds: float) -> float | None:
    """Sequences in engines over the tokens per second that came out of them: what one token of one stream takes."""
    tokens = _rate(first.tokens_total, group[-1].tokens_total, seconds)
    if not tokens or any(sample.active != first.active for sample in group):
        return None
    running = [s.in_flight - (s.engine_waiting or 0) for s in group if s.in_flight is not None]
    return sum(running) / len(running) / tokens if running else None


def learn(past: Sequence[Window], targets: Targets, given: float, *, by_rate: bool) -> Capacity:
    """Load that one worker holds: requests per second with `by_rate`, else requests at a time."""
    points: list[tuple[float, bool, float]] = []
    inherits = 0.0  # load per worker of the bad window before: a lower one after it only drains what it left
    for window in past:
        load, good = (window.rate if by_rate else window.held), window.good(targets)
        if load is None or good is None or window.active <= 0:
            continue
        each = load / window.active
        if not window.cold and load > 0 and (good or each >= inherits):
            points.append((each, good, load))
        inherits = 0.0 if good else max(each, inherits)
    if len(points) < LEAST_WINDOWS:
        return Capacity(given)
    points.sort()
    total = sum(weight for _, _, weight in points)
    wrong = best = sum(weight for _, good, weight in points if good)  # everything above the line
    line = points[0][0] * RETREAT
    for index, (each, good, weight) in enumerate(points):
        wrong += -weight if good else weight
        if wrong < best - 1e-9:
            best = wrong
            last = index + 1 == len(points)
            line = each * PROBE if last else (each + points[index + 1][0]) / 2
    bounded = points[0][0] <= line <= points[-1][0]
    return Capacity(line, len(points), best / total, bounded)
