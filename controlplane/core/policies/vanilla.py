"""`vanilla`: one worker more above `upper_task_ratio` requests per worker, fewer below `lower_task_ratio`.

Two rules of the documents that it follows. `declarative` (today's): one more than is ACTIVE, so that growth waits for
what is coming; down at once to what the requests need. `step` (the older): one worker fewer per decision.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, check_gap, known_load, setting
from controlplane.core.policies.settings import Reader
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds, last_in_use, pending, signal_age

RULES = ("declarative", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanilla(Basis):
    """Ratios are requests per worker."""

    title: ClassVar[str] = "vanilla"

    upper_task_ratio: float = setting(10.0, "Requests per worker above which there is one more.", above=0)
    lower_task_ratio: float = setting(1.0, "Below which there are fewer.", at_least=0)
    rule: str = setting(
        "declarative",
        "`declarative`: down at once to what the requests need; `step`: one fewer per decision.",
        choices=RULES,
    )

    def check(self, reader: Reader) -> None:
        check_gap(reader, "lower_task_ratio", self.lower_task_ratio, "upper_task_ratio", self.upper_task_ratio)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        tasks = known_load(inputs)
        count, reason, message = self.desired(tasks, inputs.active, inputs.present)
        course = Course(inputs, count, reason, message)
        signal_age(course)
        pending(course)
        last_in_use(course)
        bounds(course)
        return course.answer()

    def desired(self, tasks: int, active: int, present: int) -> tuple[int, str, str]:
        """(workers wanted, reason, sentence) for so many requests."""
        if present == 0:
            if tasks > 0:
                return 1, "FROM_ZERO", f"{tasks} requests and no worker"
            return 0, "IDLE", "no worker and no request"
        if active == 0:
            return present, "STARTING", f"{present} workers are starting, none is active yet"
        ratio = tasks / active
        text = f"{tasks} requests / {active} workers = {ratio:.2f}"
        if ratio > self.upper_task_ratio:
            return max(active + 1, present), "LOAD_ABOVE_THRESHOLD", f"{text} > {self.upper_task_ratio:g}"
        if ratio < self.lower_task_ratio:
            needed = math.ceil(tasks / self.upper_task_ratio) if tasks else 0
            fewer = present - 1 if self.rule == "step" else max(1, needed) if tasks else 0
            return min(fewer, present), "LOAD_BELOW_THRESHOLD", f"{text} < {self.lower_task_ratio:g}"
        return present, "WITHIN_THRESHOLDS", f"{text}"
