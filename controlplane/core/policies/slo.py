"""`slo`: as few workers as keep the time to the first token and between tokens within their targets.

What a worker holds is learned from the pool's own windows (controlplane.core.capacity), in requests per second where
routers count arrivals, else in requests at a time. The need is the recent load over that, and what is left of a backlog
when a new worker would be there. Growth is answered at once. A pool shrinks to the most that the last `window_down_s`
called for, and only as far as the rest, simulated with the whole load, stays below `shrink_use` of what it holds.

`slo+predictive` adds the floor for what comes sooner than a start takes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.capacity import Capacity, Targets, Window, learn, windows
from controlplane.core.forecast import Need, start_up_s
from controlplane.core.policies.basis import Basis, known_load, setting
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds, cooldown, cross_threshold, last_in_use, pending, signal_age
from controlplane.core.stages.weights import workers_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(Basis):
    """Targets in seconds; `requests_per_worker_capacity` is what counts until a capacity is learned. `warm_s`: how long
    a new engine's samples are left out. `target_use`: share of the learned capacity that is planned with."""

    title: ClassVar[str] = "slo"

    ttft_target_s: float = setting(1.0, above=0)
    itl_target_s: float = setting(0.05, above=0)
    target_use: float = setting(0.8, above=0)
    shrink_use: float = setting(0.9, above=0)
    react_s: float = setting(10.0, above=0)
    learn_window_s: float = setting(10.0, above=0)
    window_down_s: float = setting(60.0, at_least=0)
    scale_down_cooldown: float = setting(15.0, at_least=0)
    warm_s: float = setting(10.0, at_least=0)

    @property
    def targets(self) -> Targets:
        return Targets(self.ttft_target_s, self.itl_target_s)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        if inputs.present == 0:
            return self._from_zero(inputs)
        past = windows(inputs.samples, self.learn_window_s, inputs.now, self.warm_s)
        by_rate, each = self._capacity(past)
        units, text = self._units(inputs, past, by_rate, each)
        needed = max(workers_for(inputs, units), 0)
        moves = needed - inputs.present
        reason = "WITHIN_TARGETS" if moves == 0 else "SLO_NEEDS_MORE" if moves > 0 else "SLO_NEEDS_LESS"
        course = Course(inputs, needed, reason, text)
        signal_age(course)
        self._down_window(course, past, by_rate, each)
        load = self._load(inputs, past, by_rate)
        cross_threshold(course, lambda count: load / max(count * each.value, 1e-9), upper=self.shrink_use)
        pending(course)
        cooldown(course, up_s=0.0, down_s=self.scale_down_cooldown)
        last_in_use(course)
        bounds(course)
        return course.answer()

    def needs(self, inputs: PolicyInputs) -> list[Need]:
        """The need of each past window, by what is known of the capacity now: for forecasts."""
        past = windows(inputs.samples, self.learn_window_s, inputs.now, self.warm_s)
        by_rate, each = self._capacity(past)
        found: list[Need] = []
        for window in past:
            load = window.rate if by_rate else window.held
            if load is not None:
                found.append(Need(window.at, load / (each.value * self.target_use), load))
        return found

    def _from_zero(self, inputs: PolicyInputs) -> PolicyAnswer:
        wanted = 1 if inputs.at_least > 0 else 0
        reason = "FROM_ZERO" if wanted else "UNKNOWN_LOAD" if inputs.load is None else "IDLE"
        course = Course(inputs, wanted, reason, f"{inputs.at_least} requests wait and no worker is there")
        bounds(course)
        return course.answer()

    def _capacity(self, past: list[Window]) -> tuple[bool, Capacity]:
        """(whether in requests per second, capacity)."""
        by_rate = learn(past, self.targets, 0.0, by_rate=True)
        if by_rate.windows:
            return True, by_rate
        return False, learn(past, self.targets, float(self.capacity), by_rate=False)

    def _load(self, inputs: PolicyInputs, past: list[Window], by_rate: bool) -> float:
        """The mean of the last `react_s`, in the capacity's unit."""
        recent = [w for w in past if w.at > inputs.now - self.react_s - 1e-9]
        found = [load for w in recent if (load := w.rate if by_rate else w.held) is not None]
        if found:
            return sum(found) / len(found)
        return 0.0 if by_rate else float(known_load(inputs))

    def _units(self, inputs: PolicyInputs, past: list[Window], by_rate: bool, each: Capacity) -> tuple[float, str]:
        """(standard workers needed, sentence)."""
        load = self._load(inputs, past, by_rate)
        planned = each.value * self.target_use
        units = load / planned
        if not by_rate:
            return units, f"{load:.1f} requests at {each}, planned to {self.target_use:.0%}: {units:.2f}"
        lead = start_up_s(inputs.start_ups_s)
        usual = load / each.value  # a worker holds about so many at a time when all is well
        held = known_load(inputs) - inputs.present * max(1.0, usual)
        left = max(0.0, held - max(0.0, inputs.present * each.value - load) * lead)
        units += left / (each.value * lead)
        text = f"{load:.2f} requests/s at {each}, planned to {self.target_use:.0%}"
        return units, f"{text}, {left:.0f} of a backlog left in {lead:.0f} s: {units:.2f}"

    def _down_window(self, course: Course, past: list[Window], by_rate: bool, each: Capacity) -> None:
        inputs = course.inputs
        if not course.shrinks or self.window_down_s <= 0:
            return
        inside = [w for w in past if w.at > inputs.now - self.window_down_s - 1e-9]
        loads = [w.rate if by_rate else w.held for w in inside]
        if not inputs.samples or inputs.samples[0].at > inputs.now - self.window_down_s:
            course.hold("window", f"not yet observed for {self.window_down_s:g} s", "NOT_STABLE")
        elif any(load is None for load in loads):
            course.hold("window", "the load was unknown within the window", "UNKNOWN_LOAD")
        else:
            most = max((load for load in loads if load is not None), default=0.0)
            count = math.ceil(most / (each.value * self.target_use) - 1e-9)
            count = min(max(course.count, count), inputs.present)
            course.take("window", count, f"{count} was the most of the last {self.window_down_s:g} s", "NOT_STABLE")
