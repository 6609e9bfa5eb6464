"""Stages that a wanted count goes through, shared by policies. Each is a function of a `Course`, visible in the record.

age -> windows -> hysteresis, guard -> pending -> pace -> gate -> bounds
"""

from controlplane.core.stages.age import signal_age
from controlplane.core.stages.course import Course
from controlplane.core.stages.guards import bounds, cross_threshold, hysteresis, last_in_use, pending
from controlplane.core.stages.pace import cooldown, cost_gate, rate_limit
from controlplane.core.stages.windows import panic_window, stable_window

__all__ = [
    "Course",
    "bounds",
    "cooldown",
    "cost_gate",
    "cross_threshold",
    "hysteresis",
    "last_in_use",
    "panic_window",
    "pending",
    "rate_limit",
    "signal_age",
    "stable_window",
]
