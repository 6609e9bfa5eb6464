"""`fixed_elastic`: a pinned tier that is started once and never stopped, and a burst tier that follows the demand.

A provisioner is pinned when `pinned` names it (comma-joined), or, when that is empty, when it holds one worker only.
Where there is no such provisioner, the pool's first `pinned_workers` are the pinned tier. Only the burst tier grows
above `upper_task_ratio` requests per worker and shrinks below `lower_task_ratio`, one worker per decision.
"""

from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, check_gap, known_load, setting
from controlplane.core.policies.settings import Reader
from controlplane.core.policy import PolicyAnswer, PolicyInputs, Share, Supply
from controlplane.core.stages import Course, bounds, last_in_use, pending, signal_age


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedElastic(Basis):
    """`pinned_workers`: what each pinned provisioner keeps; `burst_workers`: the burst tier's cap, 0: none of its
    own."""

    title: ClassVar[str] = "fixed_elastic"

    pinned: str = setting("", "Provisioners whose workers never stop, comma-joined; empty: those that hold one worker.")
    pinned_workers: int = setting(1, "What each of them keeps; without any, the first workers of the pool.", at_least=0)
    burst_workers: int = setting(0, "The most of the tier above; 0: max_workers decides.", at_least=0)
    upper_task_ratio: float = setting(10.0, "Requests per worker above which the burst tier grows.", above=0)
    lower_task_ratio: float = setting(1.0, "Below which it shrinks.", at_least=0)

    def check(self, reader: Reader) -> None:
        check_gap(reader, "lower_task_ratio", self.lower_task_ratio, "upper_task_ratio", self.upper_task_ratio)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        pinned = [supply for supply in inputs.supplies if self._is_pinned(supply)]
        if pinned:
            fixed = sum(min(self.pinned_workers, s.most or self.pinned_workers) for s in pinned if s.online)
            fixed_there = sum(supply.present for supply in pinned)
        else:
            fixed = self.pinned_workers
            fixed_there = min(fixed, inputs.present)
        burst_there = inputs.present - fixed_there
        burst, reason, message = self._burst(inputs, burst_there, fixed_there)
        if fixed_there < fixed:
            reason = "PINNED_TIER"
            message = f"the pinned tier has {fixed_there} of {fixed}; {message}"
        course = Course(inputs, max(fixed, fixed_there) + burst, reason, message)
        signal_age(course)
        pending(course)
        last_in_use(course)
        bounds(course)
        shares = [Share(min(self.pinned_workers, s.most or self.pinned_workers), s.provisioner) for s in pinned]
        others = {s.provisioner for s in inputs.supplies if s not in pinned}
        shares += [Share(burst, name) for name in sorted(others)[:1]] if len(others) == 1 else [Share(burst)]
        return course.answer({"pinned": max(fixed, fixed_there), "burst": burst}, shares if pinned else ())

    def _burst(self, inputs: PolicyInputs, there: int, fixed_there: int) -> tuple[int, str, str]:
        tasks = known_load(inputs)
        if inputs.active == 0:
            if inputs.starting == 0 and tasks > 0 and self.pinned_workers == 0:
                return 1, "FROM_ZERO", f"{tasks} requests and no worker"
            return there, "STARTING" if inputs.starting else "IDLE", f"{inputs.starting} workers are starting"
        ratio = tasks / inputs.active
        text = f"{tasks} requests / {inputs.active} workers = {ratio:.2f}"
        if ratio > self.upper_task_ratio:
            if inputs.starting:
                return there, "STARTING", f"{text}, and {inputs.starting} are starting"
            if self.burst_workers and there >= self.burst_workers:
                return there, "AT_MAX", f"{text}, but the burst tier's cap is {self.burst_workers}"
            return there + 1, "LOAD_ABOVE_THRESHOLD", f"{text} > {self.upper_task_ratio:g}"
        if ratio < self.lower_task_ratio:
            if there == 0:
                return 0, "PINNED_TIER", f"{text}, but only the pinned tier is there"
            return there - 1, "LOAD_BELOW_THRESHOLD", f"{text} < {self.lower_task_ratio:g}"
        return there, "WITHIN_THRESHOLDS", text

    def _is_pinned(self, supply: Supply) -> bool:
        named = [name.strip() for name in self.pinned.split(",") if name.strip()]
        return supply.provisioner in named if named else supply.most == 1
