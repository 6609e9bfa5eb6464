"""Windows: a need counts when it has stood for a while, and at once when a short window shows a panic."""

import itertools
import math
from collections.abc import Callable

from controlplane.core.snapshot import LoadSample
from controlplane.core.stages.course import Course

Need = Callable[[LoadSample], float | None]  # workers that a past sample called for; None: unknown

_GAP_S = 15.0  # a window with a longer hole in it is not covered


def inside(samples: tuple[LoadSample, ...], start: float) -> list[LoadSample]:
    """Samples from `start` on and the last one before it, oldest first."""
    found: list[LoadSample] = []
    for sample in reversed(samples):
        found.append(sample)
        if sample.at <= start:
            break
    found.reverse()
    return found


def stable_window(course: Course, need: Need, *, up_s: float, down_s: float) -> None:
    """Grows to the least that each sample of the last `up_s` called for, shrinks to the most of the last `down_s`. An
    unknown sample or a window that is not covered holds."""
    seconds = up_s if course.grows else down_s
    if seconds <= 0 or course.count == course.inputs.present:
        return
    now, present, grows = course.inputs.now, course.inputs.present, course.grows
    window = inside(course.inputs.samples, now - seconds)
    if not window or window[0].at > now - seconds:
        seen = now - window[0].at if window else 0.0
        again = now + seconds - seen
        course.hold("window", f"observed for {seen:.1f} of {seconds:g} s", "NOT_STABLE", again)
        return
    gap = max((b.at - a.at for a, b in itertools.pairwise(window)), default=0.0)
    if gap > max(_GAP_S, seconds / 4):
        course.hold("window", f"no sample for {gap:.1f} s within the window", "NOT_STABLE")
        return
    needs = [need(sample) for sample in window]
    known = [value for value in needs if value is not None]
    if len(known) < len(needs):
        course.hold("window", "the load was unknown within the window", "UNKNOWN_LOAD")
        return
    extreme = math.ceil((min if grows else max)(known) - 1e-9)
    count = min(course.count, max(extreme, present)) if grows else max(course.count, min(extreme, present))
    word = "least" if grows else "most"
    course.take("window", count, f"{extreme} was the {word} of the last {seconds:g} s", "NOT_STABLE")


def panic_window(course: Course, need: Need, *, panic_s: float, factor: float, stable_s: float) -> None:
    """While the average need of a short window is `factor` times what is ACTIVE, and for `stable_s` after it: never
    down, and up to that average at once."""
    if panic_s <= 0:
        return
    inputs = course.inputs
    window = inside(inputs.samples, inputs.now - stable_s - panic_s)
    total, start, average = 0.0, 0, 0.0
    last: float | None = None
    kept: list[tuple[float, float]] = []
    for sample in window:
        value = need(sample)
        if value is None:
            continue
        kept.append((sample.at, value))
        total += value
        while kept[start][0] < sample.at - panic_s:
            total -= kept[start][1]
            start += 1
        average = total / (len(kept) - start)
        if sample.active > 0 and average >= factor * sample.active and sample.at >= inputs.now - stable_s:
            last = sample.at
    if last is None:
        course.passed("panic", f"{average:.1f} workers needed over {panic_s:g} s: no panic")
        return
    wanted = max(course.count, math.ceil(average - 1e-9), inputs.present)
    note = f"panic {inputs.now - last:.0f} s ago: {average:.1f} needed over {panic_s:g} s, never down"
    course.take("panic", wanted, note, "PANIC", last + stable_s)
