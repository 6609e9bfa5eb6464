"""`greedy`: as many workers as there may be. For allocations that are paid for anyway."""

from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy(Basis):
    """`target`: fill up to it instead of max_workers; 0: max_workers."""

    title: ClassVar[str] = "greedy"

    target: int = setting(0, "Workers to fill up to; 0: max_workers.", at_least=0)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        wanted = self.target or inputs.max_workers
        course = Course(inputs, wanted, "GREEDY", f"fills up to {wanted} workers")
        bounds(course)
        return course.answer()
