"""`slo`: as few workers as let `attainment` of the requests meet the targets for the first token and between tokens.

What a worker holds is learned from the pool's own windows (controlplane.core.capacity). Two counts come of it: what the
present load needs, a backlog that would be left when a new worker comes included, answered at once; and the fewest that
would have met the goal over all requests of the last `memory_s`. The second one is how it shrinks: N-1 workers are
simulated on that whole past first. Until enough is learned, a worker holds `requests_per_worker_capacity` at a time.

`slo+predictive` adds a floor for a load that grows while a worker starts.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.capacity import Curve, expected, learn
from controlplane.core.forecast import Need, start_up_s
from controlplane.core.past import Targets, Window, recent_load, recent_rate, windows
from controlplane.core.policies.basis import Basis, known_load, setting
from controlplane.core.policies.settings import Reader
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds, cooldown, last_in_use, pending, rate_limit, signal_age
from controlplane.core.stages.weights import workers_for

_LONGEST_MEMORY_S = 1200.0


@dataclass(frozen=True, slots=True)
class Known:
    """What has been learned: the curve, and its unit. `holds` is the load at which a worker just meets the goal."""

    by_rate: bool
    curve: Curve
    goal: float
    holds: float
    learned: bool

    def __str__(self) -> str:
        unit = "/s" if self.by_rate else " at a time"
        source = f"learned from {self.curve.windows} windows" if self.learned else "given"
        return f"{self.holds:.2f}{unit} a worker ({source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(Basis):
    """Targets and times in seconds. `attainment`: share of requests that shall meet both targets, of those that an idle
    worker would meet; `dead_band`: how far the past may be off it before the count follows. `warm_s`: how long a new
    engine's samples teach nothing; `shrink_factor`: what at least stays of the present count in one decision."""

    title: ClassVar[str] = "slo"

    ttft_target_s: float = setting(1.0, "Time to first token that a request shall meet, seconds.", above=0)
    itl_target_s: float = setting(0.05, "Time between its tokens that it shall meet, seconds.", above=0)
    attainment: float = setting(
        0.9, "Share of the requests that shall meet both, of those that an idle worker would meet.", above=0
    )
    memory_s: float = setting(
        600.0,
        "It shrinks only to what would have met the targets over so many seconds; 0: it follows the load.",
        at_least=0,
    )
    dead_band: float = setting(0.02, "How far the share of the memory may be off before the count follows.", at_least=0)
    react_s: float = setting(10.0, "The load of the present is the mean of so many seconds.", above=0)
    learn_window_s: float = setting(10.0, "Loads and latencies are compared over windows of so many seconds.", above=0)
    scale_down_cooldown: float = setting(
        60.0, "From one scale-down, or a scale-up, to the next scale-down, seconds.", at_least=0
    )
    shrink_factor: float = setting(0.8, "Share of the present count that stays, at least, in one decision.", above=0)
    warm_s: float = setting(10.0, "So long a new engine teaches nothing, seconds.", at_least=0)

    def check(self, reader: Reader) -> None:
        if self.memory_s > _LONGEST_MEMORY_S:
            raise reader.bad(
                "memory_s",
                f"the control plane remembers loads for {_LONGEST_MEMORY_S:g} s only",
                f"Give at most {_LONGEST_MEMORY_S:g}.",
            )

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        if inputs.present == 0:
            return self._from_zero(inputs)
        past = self._past(inputs)
        known = self._known(past)
        load = self._load(inputs, known.by_rate)
        if load is None:
            return Course(inputs, inputs.present, "UNKNOWN_LOAD", "no router tells what arrives").answer()
        units, text = self._units(inputs, load, known)
        needed = max(workers_for(inputs, units), 0)
        moves = needed - inputs.present
        reason = "WITHIN_TARGETS" if moves == 0 else "SLO_NEEDS_MORE" if moves > 0 else "SLO_NEEDS_LESS"
        course = Course(inputs, needed, reason, text)
        signal_age(course)
        self._bear(course, load, known)
        self._remember(course, past, known)
        pending(course)
        rate_limit(course, down_factor=self.shrink_factor)
        cooldown(course, up_s=0.0, down_s=self.scale_down_cooldown, down_after_up=True)
        last_in_use(course)
        bounds(course)
        return course.answer()

    def needs(self, inputs: PolicyInputs) -> list[Need]:
        """What past windows called for, by what is known now: for forecasts."""
        past = self._past(inputs)
        known = self._known(past)
        loads = [(window.at, load) for window in past if (load := window.load(known.by_rate)) is not None]
        return [Need(at, load / known.holds, load) for at, load in loads]

    def _past(self, inputs: PolicyInputs) -> list[Window]:
        targets = Targets(self.ttft_target_s, self.itl_target_s)
        return windows(inputs.samples, self.learn_window_s, inputs.now, self.warm_s, targets)

    def _from_zero(self, inputs: PolicyInputs) -> PolicyAnswer:
        wanted = 1 if inputs.at_least > 0 else 0
        reason = "FROM_ZERO" if wanted else "UNKNOWN_LOAD" if inputs.load is None else "IDLE"
        course = Course(inputs, wanted, reason, f"{inputs.at_least} requests wait and no worker is there")
        bounds(course)
        return course.answer()

    def _known(self, past: list[Window]) -> Known:
        """In requests per second where that can be learned, else at a time, else as given."""
        for by_rate in (True, False):
            curve = learn(past, by_rate=by_rate)
            goal = self.attainment * curve.best
            holds = curve.holds(goal)
            if holds > 0 and curve.best > 0.5:
                return Known(by_rate, curve, goal, holds, True)
        return Known(False, Curve(), self.attainment, float(self.capacity), False)

    def _load(self, inputs: PolicyInputs, by_rate: bool) -> float | None:
        """The mean of the last `react_s`; None when it is unknown."""
        if by_rate:
            return recent_rate(inputs.samples, self.react_s, inputs.now)
        load = recent_load(inputs.samples, self.react_s, inputs.now)
        return float(known_load(inputs)) if load is None else load

    def _units(self, inputs: PolicyInputs, load: float, known: Known) -> tuple[float, str]:
        """(standard workers that the present needs, sentence)."""
        units = load / known.holds
        if not known.by_rate:
            return units, f"{load:.1f} requests at {known}: {units:.2f} workers"
        lead = start_up_s(inputs.start_ups_s)
        left = max(0.0, queued(inputs) - max(0.0, inputs.present * known.holds - load) * lead)
        units += left / (known.holds * lead)
        backlog = f", {left:.0f} of a backlog left in {lead:.0f} s" if left else ""
        return units, f"{load:.2f} requests/s at {known}{backlog}: {units:.2f} workers"

    def _bear(self, course: Course, load: float, known: Known) -> None:
        """What the present count meets but for the dead band, and for the noise of so few arrivals (one standard
        deviation of a count), is no reason to grow."""
        present = course.inputs.present
        if course.grows and known.learned and present > 0:
            surely = load - math.sqrt(load / self.react_s) if known.by_rate else load
            met = known.curve.met(surely / present)
            if met >= known.goal - self.dead_band and queued(course.inputs) <= present:
                course.hold(
                    "hysteresis",
                    f"{present} meet {met:.1%} but for noise, {known.goal:.1%} is wanted",
                    "WITHIN_TARGETS",
                )

    def _remember(self, course: Course, past: list[Window], known: Known) -> None:
        """Not fewer than would have met the goal over the last `memory_s`, simulated on it."""
        inputs = course.inputs
        if self.memory_s <= 0:
            return
        began = inputs.samples[0].at if inputs.samples else inputs.now
        if course.shrinks and began > inputs.now - self.memory_s:
            seen = f"observed for {inputs.now - began:.0f} of {self.memory_s:g} s"
            course.hold("memory", f"{seen}: nothing is given back before", "NOT_STABLE", began + self.memory_s)
            return
        inside = [w for w in past if w.at > inputs.now - self.memory_s]
        loads = [(load, load) for w in inside if (load := w.load(known.by_rate)) is not None and load > 0]
        if not known.learned:
            least = math.ceil(max((load for load, _ in loads), default=0.0) / known.holds - 1e-9)
            course.take(
                "memory",
                max(course.count, least),
                f"{least} for the most of the last {self.memory_s:g} s",
                "MEMORY_HOLDS",
            )
            return
        present = min(inputs.present, inputs.max_workers)
        met = expected(known.curve, loads, present)
        least, goal = present, known.goal
        if met < goal - self.dead_band:
            least = self._fewest(known.curve, loads, goal, inputs.max_workers)
        elif present > 1:
            fewer = self._fewest(known.curve, loads, min(goal + self.dead_band, known.curve.best), present)
            least = min(present, fewer)
        count = max(course.count, least)
        note = f"{present} would have met {met:.1%} of the last {self.memory_s:g} s, {goal:.1%} is wanted: {least}"
        course.take("memory", count, note, "MEMORY_HOLDS" if count <= inputs.present else "SLO_NEEDS_MORE")

    @staticmethod
    def _fewest(curve: Curve, loads: list[tuple[float, float]], goal: float, most: int) -> int:
        """The fewest workers that would have met the goal, at most `most`."""
        low, high = 0, max(most, 1)
        asked = high - 1  # first: mostly nobody can go
        while low < high:
            if expected(curve, loads, asked) >= goal:
                high = asked
            else:
                low = asked + 1
            asked = (low + high) // 2
        return low


def queued(inputs: PolicyInputs) -> int:
    """Requests that wait for their first step, in routers and in engines, as far as that is known."""
    inside = inputs.samples[-1].engine_waiting if inputs.samples else None
    return (inputs.waiting or 0) + (inside or 0)
