"""The pool's lower bound, and one worker where requests wait: what stands under a floor that is used alone."""

from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds, last_in_use, signal_age


@dataclass(frozen=True, slots=True, kw_only=True)
class Least(Basis):
    """No settings of its own."""

    title: ClassVar[str] = "least"

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        wanted = max(inputs.min_workers, 1 if inputs.at_least > 0 else 0)
        course = Course(inputs, wanted, "FLOOR", f"{wanted} at least")
        signal_age(course)
        last_in_use(course)
        bounds(course)
        return course.answer()
