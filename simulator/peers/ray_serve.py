"""Ray Serve's request-based autoscaling, re-implemented.

    desired = running x ongoing / (target x running), smoothed by a factor, rounded up

A change counts when it has been asked for in the same direction for the whole delay. From zero it counts at once.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds
from simulator.peers.history import load_of, rolling


@dataclass(frozen=True, slots=True, kw_only=True)
class RayServe(Basis):
    """Its defaults. Times in seconds. Its loop of 0.1 s runs once per second here."""

    title: ClassVar[str] = "peer_ray_serve"

    monitoring_interval: float = setting(1.0, above=0)
    target_ongoing_requests: float = setting(2.0, above=0)
    upscale_delay_s: float = setting(30.0, at_least=0)
    downscale_delay_s: float = setting(600.0, at_least=0)
    upscaling_factor: float = setting(1.0, above=0)
    downscaling_factor: float = setting(1.0, above=0)
    look_back_period_s: float = setting(30.0, above=0)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        present = inputs.present
        ongoing = rolling(inputs.samples, self.look_back_period_s, load_of)
        if present == 0:
            wanted = 1 if inputs.at_least > 0 else 0
            return self._answer(inputs, wanted, "FROM_ZERO" if wanted else "IDLE", "no replica")
        if not ongoing:
            return self._answer(inputs, present, "UNKNOWN_LOAD", "no sample")
        desired = self._desired(ongoing[-1][1], present)
        text = f"{ongoing[-1][1]:.2f} ongoing / {self.target_ongoing_requests:g}: {desired}"
        direction = (desired > present) - (desired < present)
        if direction == 0:
            return self._answer(inputs, present, "ON_TARGET", text)
        delay = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
        moves = [at for at in (inputs.last_scale_up_at, inputs.last_scale_down_at) if at is not None]
        since = max([ongoing[0][0], *moves])
        for at, load in reversed(ongoing):
            then = self._desired(load, present)
            if (then > present) - (then < present) != direction:
                since = max(since, at)
                break
        if inputs.now - since < delay:
            return self._answer(inputs, present, "DELAY", f"{text} for {inputs.now - since:.0f} of {delay:g} s")
        return self._answer(inputs, desired, "DELAY_PASSED", text)

    def _desired(self, ongoing: float, present: int) -> int:
        raw = ongoing / self.target_ongoing_requests
        factor = self.upscaling_factor if raw > present else self.downscaling_factor
        desired = math.ceil(present + factor * (raw - present) - 1e-9)
        if raw < present and desired == present and math.ceil(raw) < present:
            desired -= 1  # a factor must not leave it stuck
        return desired

    def _answer(self, inputs: PolicyInputs, wanted: int, reason: str, message: str) -> PolicyAnswer:
        course = Course(inputs, wanted, reason, message)
        bounds(course)
        return course.answer()
