"""Signal ageing: a load that is missing or too old is unknown, and unknown never shrinks a pool."""

from controlplane.core.stages.course import Course


def signal_age(course: Course) -> None:
    """Holds what would shrink on an unknown load. Growth on the known part of it stands: more can only be worse."""
    inputs = course.inputs
    if inputs.load is not None:
        newest = inputs.samples[-1].at if inputs.samples else inputs.now
        course.passed("age", f"all signals are fresh, the last look is {inputs.now - newest:.1f} s old")
    elif course.shrinks:
        course.hold("age", "a worker's or router's load is unknown; unknown is not zero", "UNKNOWN_LOAD")
    else:
        course.passed("age", f"the load is unknown; at least {inputs.at_least} requests are known")
