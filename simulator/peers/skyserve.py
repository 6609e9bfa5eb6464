"""SkyServe's request-rate autoscaler, re-implemented, without spot instances.

    target = ceil(requests of the last 60 s / 60 / target queries per second)

Looked at every 20 s (5 s at zero); a change counts when each look of 300 s (up) or 1200 s (down) asked for it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.snapshot import LoadSample
from controlplane.core.stages import Course, bounds
from simulator.peers.history import last_move, stood_for


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyServe(Basis):
    """Its defaults. `target_qps_per_replica` is the user's to choose: 2 is about what one worker of the modelled 70B
    engine holds."""

    title: ClassVar[str] = "peer_skyserve"

    monitoring_interval: float = setting(20.0, above=0)
    target_qps_per_replica: float = setting(2.0, above=0)
    qps_window_s: float = setting(60.0, above=0)
    upscale_delay_s: float = setting(300.0, at_least=0)
    downscale_delay_s: float = setting(1200.0, at_least=0)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        present = inputs.present
        if present == 0:
            wanted = 1 if inputs.at_least > 0 else 0
            return self._answer(inputs, wanted, "FROM_ZERO" if wanted else "IDLE", "no replica")
        looks = self._targets(inputs)
        if not looks:
            return self._answer(inputs, present, "UNKNOWN_LOAD", "no look yet")
        target = looks[-1][1]
        since = last_move(inputs)
        text = f"{target} replicas for the last {self.qps_window_s:g} s"
        for up, delay in ((True, self.upscale_delay_s), (False, self.downscale_delay_s)):
            if (target > present) if up else (target < present):
                verdicts = [(at, (count > present) if up else (count < present)) for at, count in looks if at > since]
                if stood_for(verdicts, inputs.now, delay - self.monitoring_interval):
                    return self._answer(inputs, target, "DELAY_PASSED", text)
                return self._answer(inputs, present, "DELAY", text)
        return self._answer(inputs, present, "ON_TARGET", text)

    def _targets(self, inputs: PolicyInputs) -> list[tuple[float, int]]:
        """(time, target) of each look, oldest first."""
        known = [sample for sample in inputs.samples if sample.arrivals_total is not None]
        found: list[tuple[float, int]] = []
        start = 0
        begin = known[0] if known else None
        for sample in known:
            while known[start].at < sample.at - self.qps_window_s:
                start += 1
            before = known[start] if known[start].at > (begin or sample).at else begin
            found.append((sample.at, self._target(before or sample, sample)))
        return found

    def _target(self, before: LoadSample, sample: LoadSample) -> int:
        count = max(0, (sample.arrivals_total or 0) - (before.arrivals_total or 0))
        return math.ceil(count / self.qps_window_s / self.target_qps_per_replica - 1e-9)

    def _answer(self, inputs: PolicyInputs, wanted: int, reason: str, message: str) -> PolicyAnswer:
        course = Course(inputs, wanted, reason, message)
        bounds(course)
        return course.answer()
