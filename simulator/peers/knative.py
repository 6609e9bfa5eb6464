"""Knative's pod autoscaler (KPA), re-implemented.

stable: ceil(average of 60 s / target), within floor(ready / 2) and ready x 1000
panic:  the same over 6 s; entered when it is twice what is ready, left after 60 s below that; never down in panic
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds
from simulator.peers.history import load_of, mean_load, rolling


@dataclass(frozen=True, slots=True, kw_only=True)
class KnativeKpa(Basis):
    """Its defaults: concurrency target 100 at 70 %. Times in seconds."""

    title: ClassVar[str] = "peer_knative_kpa"

    monitoring_interval: float = setting(2.0, above=0)
    target: float = setting(70.0, above=0)
    stable_window_s: float = setting(60.0, above=0)
    panic_window_s: float = setting(6.0, above=0)
    panic_threshold: float = setting(2.0, above=0)
    max_scale_down_rate: float = setting(2.0, above=0)
    max_scale_up_rate: float = setting(1000.0, above=0)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        ready = max(inputs.active, 1)
        if inputs.present == 0:
            wanted = 1 if inputs.at_least > 0 else 0
            return self._answer(inputs, wanted, "FROM_ZERO" if wanted else "IDLE", "no pod")
        stable = math.ceil(mean_load(inputs.samples, inputs.now, self.stable_window_s) / self.target - 1e-9)
        panics = rolling(inputs.samples, self.panic_window_s, load_of)
        panic = math.ceil(panics[-1][1] / self.target - 1e-9) if panics else 0
        low, high = math.floor(ready / self.max_scale_down_rate), math.ceil(ready * self.max_scale_up_rate)
        stable, panic = min(max(stable, low), high), min(max(panic, low), high)
        if self._panicking(inputs, panics):
            wanted = max(stable, panic, inputs.present)
            return self._answer(inputs, wanted, "PANIC", f"stable {stable}, panic {panic}, never down")
        return self._answer(inputs, stable, "STABLE", f"stable {stable}, panic {panic}")

    def _panicking(self, inputs: PolicyInputs, panics: list[tuple[float, float]]) -> bool:
        ready = {sample.at: max(sample.active, 1) for sample in inputs.samples}
        return any(
            math.ceil(load / self.target - 1e-9) / ready[at] >= self.panic_threshold
            for at, load in panics
            if at > inputs.now - self.stable_window_s
        )

    def _answer(self, inputs: PolicyInputs, wanted: int, reason: str, message: str) -> PolicyAnswer:
        course = Course(inputs, wanted, reason, message)
        bounds(course)
        return course.answer()
