"""Guards against oscillation, and the bounds that always hold."""

from collections.abc import Callable

from controlplane.core.stages.course import Course


def hysteresis(course: Course, exact: float, *, tolerance: float) -> None:
    """Holds while the exact need lies within `tolerance` (a share) of the present count."""
    present = course.inputs.present
    if tolerance <= 0 or present == 0 or course.count == present:
        return
    off = exact / present - 1
    if abs(off) <= tolerance:
        course.hold("hysteresis", f"{exact:.2f} is within {tolerance:.0%} of {present}", "WITHIN_TOLERANCE")
    else:
        course.passed("hysteresis", f"{exact:.2f} is {off:+.0%} off {present}")


def cross_threshold(course: Course, use: Callable[[int], float], *, upper: float) -> None:
    """Shrinks only as far as what remains would not have to grow again: its use stays at or below `upper`."""
    if not course.shrinks:
        return
    count = course.count
    while count < course.inputs.present and use(count) > upper:
        count += 1
    if count == course.count:
        course.passed("guard", f"{count} workers would be used to {use(count):.2f}, not above {upper:g}")
        return
    note = f"{count - 1} workers would be used to {use(count - 1):.2f} > {upper:g}"
    course.take("guard", count, note, "WOULD_CROSS_THRESHOLD")


def pending(course: Course) -> None:
    """STARTING workers are coming capacity: what they cover is not asked for again."""
    starting = course.inputs.starting
    if starting:
        course.passed("pending", f"{starting} of {course.inputs.present} are starting and count")


def last_in_use(course: Course) -> None:
    """The last worker stays while requests are there, whatever the arithmetic says."""
    inputs = course.inputs
    if course.count == 0 and inputs.present > 0 and (inputs.load is None or inputs.load > 0):
        course.take("last_in_use", 1, "requests use the last worker", "LAST_IN_USE")


def bounds(course: Course) -> None:
    """min_workers and max_workers. A present count outside of them is the plan's to mend."""
    inputs = course.inputs
    within = min(max(course.count, inputs.min_workers), inputs.max_workers)
    if within > course.count:
        reason = "BELOW_MIN" if inputs.present < inputs.min_workers else "AT_MIN"
        course.take("bounds", within, f"min_workers is {inputs.min_workers}", reason)
    elif within < course.count:
        course.take("bounds", within, f"max_workers is {inputs.max_workers}", "AT_MAX")
