"""llm-d's workload variant autoscaler (WVA), saturation based, re-implemented for one variant.

A replica is saturated when its KV use reaches 0.80 or 5 requests wait in it. The spare of a replica is the threshold
less its use, averaged over those that are not saturated.

    up one    when the spare KV is below 0.10 or the spare queue below 3
    down one  with two or more, when the whole over one fewer leaves both spares at or above these triggers

Nothing while a replica is pending.
"""

from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdWva(Basis):
    """Its defaults. It looks once per minute."""

    title: ClassVar[str] = "peer_llmd_wva"

    monitoring_interval: float = setting(60.0, above=0)
    kv_threshold: float = setting(0.80, above=0)
    queue_threshold: float = setting(5.0, above=0)
    kv_spare_trigger: float = setting(0.10, at_least=0)
    queue_spare_trigger: float = setting(3.0, at_least=0)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        present = inputs.present
        if present == 0:
            wanted = 1 if inputs.at_least > 0 else 0
            return self._answer(inputs, wanted, "FROM_ZERO" if wanted else "IDLE", "no replica")
        if inputs.starting:
            return self._answer(inputs, present, "STARTING", f"{inputs.starting} replicas are pending")
        seen = [(r.kv_use, float(r.engine_waiting)) for r in inputs.workers if r.engine_waiting is not None]
        loads = [(kv, queue) for kv, queue in seen if kv is not None]
        if not loads:
            return self._answer(inputs, present, "UNKNOWN_LOAD", "no replica tells its use")
        free = [(kv, queue) for kv, queue in loads if kv < self.kv_threshold and queue < self.queue_threshold]
        if not free:
            return self._answer(inputs, present + 1, "SATURATED", f"all {len(loads)} replicas are saturated")
        spare_kv = sum(self.kv_threshold - kv for kv, _ in free) / len(free)
        spare_queue = sum(self.queue_threshold - queue for _, queue in free) / len(free)
        text = f"spare KV {spare_kv:.3f}, spare queue {spare_queue:.2f}"
        if spare_kv < self.kv_spare_trigger or spare_queue < self.queue_spare_trigger:
            return self._answer(inputs, present + 1, "SPARE_TOO_SMALL", text)
        if len(free) >= 2 and present >= 2:
            kv = sum(kv for kv, _ in free) / (len(free) - 1)
            queue = sum(queue for _, queue in free) / (len(free) - 1)
            enough = self.kv_threshold - kv >= self.kv_spare_trigger
            if enough and self.queue_threshold - queue >= self.queue_spare_trigger:
                return self._answer(inputs, present - 1, "SPARE_ENOUGH", text)
        return self._answer(inputs, present, "WITHIN_SPARE", text)

    def _answer(self, inputs: PolicyInputs, wanted: int, reason: str, message: str) -> PolicyAnswer:
        course = Course(inputs, wanted, reason, message)
        bounds(course)
        return course.answer()
