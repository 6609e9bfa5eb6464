"""`load_ratio`: one worker more when the load ratio stays above a threshold, one less when it stays below another.

The ratio is the pool's load (in-flight of ACTIVE workers plus what routers hold back) over its capacity. Coming
workers count as capacity when it asks for more (ACTIVE + STARTING) and do not count when it asks for less (ACTIVE).
Comparisons are strict. A threshold is passed only when every sample of the last `min_stable_period` lies beyond it,
so a steep ramp is answered and a spike is not; a gap or an unknown sample inside that window holds. One decision
moves one worker, as in the document that the policy follows; the two cooldowns are independent of each other.

Deviations from that document's source, each on purpose: what waits counts as load; from zero, one waiting or refused
request starts a worker at once; the last worker of a pool in use is kept; `cross_threshold_guard` (off: the
document's own rule) refuses to shrink when the rest would be above the upper threshold. The guard does not look at
growth: growing is never refused for fear of shrinking, because the guard on shrinking already ends the oscillation.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controlplane.core.policies.basis import Declared, check_gap, known_load, setting, values
from controlplane.core.policies.settings import Reader, check_bounds
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.snapshot import LoadSample
from springtide.model.pool import Setting

_GAP_SLACK = 1.5  # a window counts as covered when no two samples are further apart than this many intervals


@dataclass(frozen=True, slots=True)
class LoadRatio(Declared):
    """The eleven settings of the document, in its order, and one of ours. Times in seconds, capacity in requests."""

    scale_down_threshold: float = setting(0.5, at_least=0)
    scale_up_threshold: float = setting(0.8, above=0)
    min_workers: int = setting(1, at_least=0)
    max_workers: int = setting(8, at_least=0)
    requests_per_worker_capacity: int = setting(8, at_least=1)
    monitoring_interval: float = setting(5.0, above=0)
    drain_timeout: float = setting(30.0, above=0)
    scale_down_cooldown: float = setting(60.0, at_least=0)
    scale_up_cooldown: float = setting(30.0, at_least=0)
    min_stable_period: float = setting(10.0, at_least=0)
    enable_elastic: bool = setting(True)
    cross_threshold_guard: bool = setting(True)

    @classmethod
    def read(cls, raw: Mapping[str, Setting], min_workers: int, max_workers: int) -> "LoadRatio":
        """Raises InvalidArgument for an unknown key, a value out of range, or values that contradict one another."""
        reader = Reader("load_ratio", raw)
        reader.reject_unknown(field.name for field in dataclasses.fields(cls))
        check_bounds(reader, min_workers, max_workers)
        policy = cls(**(values(cls, reader) | {"min_workers": min_workers, "max_workers": max_workers}))
        low, high = policy.scale_down_threshold, policy.scale_up_threshold
        check_gap(reader, "scale_down_threshold", low, "scale_up_threshold", high)
        if policy.monitoring_interval > policy.min_stable_period > 0:
            raise reader.bad(
                "monitoring_interval",
                f"{policy.monitoring_interval:g} s is longer than min_stable_period ({policy.min_stable_period:g} s), "
                "so no window would ever hold two looks",
                "Make monitoring_interval shorter or min_stable_period longer.",
            )
        return policy

    @property
    def name(self) -> str:
        return "load_ratio"

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        """One worker more, one less, or the present count."""
        present = inputs.active + inputs.starting
        if not self.enable_elastic:
            return self._hold(inputs, "ELASTIC_DISABLED", "enable_elastic is false")
        if present == 0:
            return self._from_zero(inputs)
        load, ratio_up = inputs.load, self._ratio(known_load(inputs), present)
        if ratio_up > self.scale_up_threshold:
            return self._up(inputs, present, ratio_up)
        if load is None:
            return self._hold(inputs, "UNKNOWN_LOAD", "a worker's or router's load is unknown; unknown is not zero")
        if inputs.active == 0:
            return self._hold(inputs, "STARTING", f"{inputs.starting} workers are starting, none is active yet")
        ratio_down = self._ratio(load, inputs.active)
        if ratio_down < self.scale_down_threshold:
            return self._down(inputs, present, load, ratio_down)
        return self._hold(
            inputs,
            "WITHIN_THRESHOLDS",
            f"{self._sum(inputs, inputs.active)} = {ratio_down:.3f} lies within "
            f"{self.scale_down_threshold:g} to {self.scale_up_threshold:g}",
        )

    def _from_zero(self, inputs: PolicyInputs) -> PolicyAnswer:
        if inputs.max_workers < 1:
            return self._hold(inputs, "AT_MAX", "max_workers is 0")
        if inputs.at_least > 0:
            wanted = max(1, inputs.min_workers)
            return PolicyAnswer(
                wanted, "FROM_ZERO", f"{inputs.at_least} requests wait and no worker is there: 0 -> {wanted}"
            )
        if inputs.load is None:
            return self._hold(inputs, "UNKNOWN_LOAD", "no router says whether requests wait")
        return self._hold(inputs, "IDLE", "no worker and no request")

    def _up(self, inputs: PolicyInputs, present: int, ratio: float) -> PolicyAnswer:
        text = f"{self._sum(inputs, present)} = {ratio:.3f} > {self.scale_up_threshold:g}"
        if present >= inputs.max_workers:
            return self._hold(inputs, "AT_MAX", f"{text}, but max_workers is {inputs.max_workers}")

        def above(sample: LoadSample) -> bool | None:
            load = sample.load if sample.load is not None else sample.at_least
            beyond = self._ratio(load, sample.active + sample.starting) > self.scale_up_threshold
            return True if beyond else (None if sample.load is None else False)

        window = self._window(inputs, above)
        if window is not None:
            return self._hold(inputs, *window, text=text)
        cooling = self._cooling(inputs.last_scale_up_at, self.scale_up_cooldown, inputs.now)
        if cooling is not None:
            return self._hold(
                inputs, "SCALE_UP_COOLDOWN", f"{text}, {cooling - inputs.now:.1f} s of cooldown left", cooling
            )
        message = f"{text} for {self.min_stable_period:g} s: {present} -> {present + 1}"
        return PolicyAnswer(present + 1, "LOAD_ABOVE_THRESHOLD", message)

    def _down(self, inputs: PolicyInputs, present: int, load: int, ratio: float) -> PolicyAnswer:
        text = f"{self._sum(inputs, inputs.active)} = {ratio:.3f} < {self.scale_down_threshold:g}"
        if present <= inputs.min_workers:
            return self._hold(inputs, "AT_MIN", f"{text}, but min_workers is {inputs.min_workers}")
        if present == 1 and load > 0:
            return self._hold(inputs, "LAST_IN_USE", f"{text}, but {load} requests use the last worker")
        left = self._ratio(load, present - 1)
        if self.cross_threshold_guard and load > 0 and left > self.scale_up_threshold:
            return self._hold(
                inputs,
                "WOULD_CROSS_THRESHOLD",
                f"{text}, but one worker less would be at {left:.3f} > {self.scale_up_threshold:g}",
            )

        def below(sample: LoadSample) -> bool | None:
            if sample.load is None:
                return None
            return sample.active > 0 and self._ratio(sample.load, sample.active) < self.scale_down_threshold

        window = self._window(inputs, below)
        if window is not None:
            return self._hold(inputs, *window, text=text)
        cooling = self._cooling(inputs.last_scale_down_at, self.scale_down_cooldown, inputs.now)
        if cooling is not None:
            return self._hold(
                inputs, "SCALE_DOWN_COOLDOWN", f"{text}, {cooling - inputs.now:.1f} s of cooldown left", cooling
            )
        message = f"{text} for {self.min_stable_period:g} s: {present} -> {present - 1}"
        return PolicyAnswer(present - 1, "LOAD_BELOW_THRESHOLD", message)

    def _window(
        self, inputs: PolicyInputs, beyond: Callable[[LoadSample], bool | None]
    ) -> tuple[str, str, float | None] | None:
        """None when every sample of the window lies beyond the threshold; else (reason, message, look again at)."""
        if self.min_stable_period == 0:
            return None
        start = inputs.now - self.min_stable_period
        longest_gap = _GAP_SLACK * max(self.monitoring_interval, inputs.sample_interval_s)
        inside: list[LoadSample] = []
        later = inputs.now
        for sample in reversed(inputs.samples):
            if later - sample.at > longest_gap:
                return "NOT_STABLE", f"no sample for {later - sample.at:.1f} s within the window", None
            if sample.at >= start:
                inside.append(sample)
            later = sample.at
            if sample.at <= start:
                break
        verdicts = [beyond(sample) for sample in inside]
        if False in verdicts:
            other = max(sample.at for sample, verdict in zip(inside, verdicts, strict=True) if verdict is False)
            again = other + self.min_stable_period
            return "NOT_STABLE", f"not yet for {self.min_stable_period:g} s", again
        if None in verdicts:
            return "UNKNOWN_LOAD", "the load was unknown within the window", None
        if later > start:
            again = later + self.min_stable_period
            return "NOT_STABLE", f"observed for {inputs.now - later:.1f} of {self.min_stable_period:g} s", again
        return None

    def _hold(
        self, inputs: PolicyInputs, reason: str, message: str, again: float | None = None, text: str = ""
    ) -> PolicyAnswer:
        present = inputs.active + inputs.starting
        return PolicyAnswer(present, reason, f"{text}, {message}" if text else message, again)

    def _ratio(self, load: int, workers: int) -> float:
        """Load over capacity; the capacity of no worker counts as one request, so that nothing divides by zero."""
        return load / max(workers * self.requests_per_worker_capacity, 1)

    def _sum(self, inputs: PolicyInputs, workers: int) -> str:
        if inputs.load is None:
            known = f"at least {inputs.at_least}"
        else:
            known = f"({inputs.in_flight} in flight + {inputs.waiting} waiting)"
        return f"{known} / ({workers} x {self.requests_per_worker_capacity})"

    @staticmethod
    def _cooling(last: float | None, cooldown: float, now: float) -> float | None:
        """When the cooldown ends, None when it has."""
        return last + cooldown if last is not None and now - last < cooldown else None
