"""How fast a pool may move: cooldowns, steps, and whether a move is worth what it costs."""

import math
from collections.abc import Sequence

from controlplane.core.stages.course import Course

COSTS_LOOKED_AT = 3
COST_UNMEASURED_S = 10.0


def cooldown(course: Course, *, up_s: float, down_s: float, down_after_up: bool = False) -> None:
    """Holds a move so soon after the last one of its direction; shrinking also after growing when `down_after_up`."""
    inputs = course.inputs
    if course.grows:
        _cool(course, inputs.last_scale_up_at, up_s, "SCALE_UP_COOLDOWN")
    elif course.shrinks:
        _cool(course, inputs.last_scale_down_at, down_s, "SCALE_DOWN_COOLDOWN")
        if down_after_up and course.shrinks:
            _cool(course, inputs.last_scale_up_at, down_s, "SCALE_DOWN_COOLDOWN")


def _cool(course: Course, last: float | None, seconds: float, reason: str) -> None:
    now = course.inputs.now
    if last is not None and now - last < seconds:
        course.hold("cooldown", f"{last + seconds - now:.1f} s of cooldown left", reason, last + seconds)


def rate_limit(course: Course, *, up: int = 0, down: int = 0, up_factor: float = 0.0, down_factor: float = 0.0) -> None:
    """At most so many workers, or so many times the present count, in one decision. 0: no limit. A factor never
    forbids one worker."""
    present = course.inputs.present
    if course.grows:
        most = present + up if up else course.count
        if up_factor and present:
            most = min(most, max(math.ceil(present * up_factor), present + 1))
        if course.count > most:
            course.take("rate", most, f"at most {most - present} more at a time", "RATE_LIMITED")
    elif course.shrinks:
        least = present - down if down else course.count
        if down_factor:
            least = max(least, min(math.floor(present * down_factor), present - 1))
        if course.count < least:
            course.take("rate", least, f"at most {present - least} fewer at a time", "RATE_LIMITED")


def cost_gate(course: Course, *, benefit_s: float, costs_s: Sequence[float]) -> None:
    """Moves only when the benefit is worth more than the mean of the last three switches cost, both in seconds."""
    if course.count == course.inputs.present:
        return
    last = costs_s[-COSTS_LOOKED_AT:]
    cost = sum(last) / len(last) if last else COST_UNMEASURED_S
    measured = f"the mean of {len(last)} start-ups" if last else "not measured yet"
    if benefit_s <= cost:
        note = f"worth {benefit_s:.1f} s, a switch costs {cost:.1f} s ({measured})"
        course.hold("gate", note, "NOT_WORTH_IT")
    else:
        course.passed("gate", f"worth {benefit_s:.1f} s > {cost:.1f} s ({measured})")
