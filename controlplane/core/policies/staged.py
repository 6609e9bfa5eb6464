"""Shared stages around any policy: settings with the prefix `stage_`; none of them acts unless it is set.

Windows ask the policy inside again for each past sample, so that one that only looks at the present becomes steady.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.policies.basis import as_settings, setting, values
from controlplane.core.policies.settings import Reader
from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs
from controlplane.core.snapshot import LoadSample
from controlplane.core.stages import (
    Course,
    bounds,
    cooldown,
    cost_gate,
    hysteresis,
    panic_window,
    pending,
    rate_limit,
    stable_window,
)

PREFIX = "stage_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Times in seconds, steps in workers, tolerance as a share of the present count. 0 or false: the stage is off."""

    window_up_s: float = setting(0.0, "Grows only when that was right for so many seconds.", at_least=0)
    window_down_s: float = setting(0.0, "Shrinks only when that was right for so many seconds.", at_least=0)
    panic_window_s: float = setting(
        0.0, "A load so far above capacity in this short window grows at once and shrinks nothing.", at_least=0
    )
    panic_factor: float = setting(2.0, "How many times the present count the short window must ask for.", above=0)
    tolerance: float = setting(0.0, "Holds while the need is within this share of the present count.", at_least=0)
    up_cooldown_s: float = setting(0.0, "From one scale-up to the next.", at_least=0)
    down_cooldown_s: float = setting(0.0, "From one scale-down to the next.", at_least=0)
    max_up: int = setting(0, "Workers more in one decision, at most.", at_least=0)
    max_down: int = setting(0, "Workers fewer in one decision, at most.", at_least=0)
    max_up_factor: float = setting(0.0, "Times the present count in one decision, at most.", at_least=0)
    cost_gate: bool = setting(False, "Moves only when the gain is worth the measured cost of a start.")

    @classmethod
    def read(cls, reader: Reader, interval_s: float) -> "Staged":
        """`interval_s`: between two looks. Raises InvalidArgument."""
        stages = cls(**values(cls, reader, PREFIX))
        for name in ("window_up_s", "window_down_s", "panic_window_s"):
            window_s = getattr(stages, name)
            if 0 < window_s < interval_s:
                raise reader.bad(
                    f"{PREFIX}{name}",
                    f"the policy is asked every {interval_s:g} s, which is longer",
                    "Make the window longer or monitoring_interval shorter.",
                )
        return stages

    @property
    def settings(self) -> Mapping[str, object]:
        return as_settings(self, PREFIX)

    def bound(self, inputs: PolicyInputs) -> PolicyInputs:
        return inputs

    def modify(self, answer: PolicyAnswer, inputs: PolicyInputs, policy: Policy) -> PolicyAnswer:
        course = Course(inputs, answer.wanted, answer.reason, answer.message)
        course.again = answer.look_again_at
        course.steps = list(answer.trail)
        if inputs.present == 0 and course.grows:
            return answer  # from zero passes every window and cooldown

        def need(sample: LoadSample) -> float | None:
            then = as_of(inputs, sample)
            return None if then.load is None else float(policy.decide(then).wanted)

        stable_window(course, need, up_s=self.window_up_s, down_s=self.window_down_s)
        panic_window(
            course, need, panic_s=self.panic_window_s, factor=self.panic_factor, stable_s=self.window_down_s or 60.0
        )
        hysteresis(course, float(course.count), tolerance=self.tolerance)
        pending(course)
        rate_limit(course, up=self.max_up, down=self.max_down, up_factor=self.max_up_factor)
        cooldown(course, up_s=self.up_cooldown_s, down_s=self.down_cooldown_s)
        if self.cost_gate:
            cost_gate(course, benefit_s=benefit_s(inputs, course.count, policy), costs_s=inputs.start_ups_s)
        bounds(course)
        return course.answer(answer.parts, answer.shares)


def as_of(inputs: PolicyInputs, sample: LoadSample) -> PolicyInputs:
    """The inputs as they were at a past sample."""
    kept = tuple(s for s in inputs.samples if s.at <= sample.at)
    return dataclasses.replace(
        inputs,
        now=sample.at,
        active=sample.active,
        starting=sample.starting,
        in_flight=sample.in_flight,
        waiting=sample.waiting,
        at_least=sample.at_least,
        samples=kept,
        demands=(),
    )


def benefit_s(inputs: PolicyInputs, count: int, policy: Policy) -> float:
    """What a move is worth, in seconds of a worker. Growing: the work that is beyond the present capacity has waited
    for that long. Shrinking: what is taken has been in surplus for that long."""
    capacity = max(policy.capacity, 1)
    since: float | None = None
    for sample in reversed(inputs.samples):
        if sample.load is None:
            break
        beyond = sample.load > inputs.present * capacity
        surplus = sample.load <= count * capacity
        if not (beyond if count > inputs.present else surplus):
            break
        since = sample.at
    return 0.0 if since is None else (inputs.now - since) * abs(count - inputs.present)
