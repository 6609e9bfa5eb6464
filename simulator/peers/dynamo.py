"""Dynamo's load-based planner in its SLA form, re-implemented for engines that prefill and decode.

    up one    when every engine's estimate of the time to the first or between tokens is above its target
    down one  when, with the load of one more spread over the rest (N / (N - 1)), every engine's prefill queue leaves
              less than 0.8 of what the target allows besides the request's own prefill, its KV memory holds, and the
              time between tokens is below 0.8 of its target

One step per 5 s, none while scaling. It estimates from a profile of the engine, as Dynamo does before deployment.
"""

from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policy import ActiveWorker, PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoLoad(Basis):
    """Targets in seconds. The profile is that of the modelled 70B engine; `mean_prompt_tokens` is what its frontends
    would have measured: the mean of both Azure traces."""

    title: ClassVar[str] = "peer_dynamo_load"

    monitoring_interval: float = setting(5.0, above=0)
    ttft_sla_s: float = setting(1.0, above=0)
    itl_sla_s: float = setting(0.05, above=0)
    sensitivity: float = setting(0.8, above=0)
    max_kv: float = setting(0.9, above=0)
    mean_prompt_tokens: int = setting(1600, at_least=1)
    prefill_tokens_per_s: float = setting(8000.0, above=0)
    decode_base_s: float = setting(0.010, above=0)
    decode_per_request_s: float = setting(0.0002, at_least=0)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        present = inputs.present
        if present == 0:
            wanted = 1 if inputs.at_least > 0 else 0
            return self._answer(inputs, wanted, "FROM_ZERO" if wanted else "IDLE", "no engine")
        if inputs.starting or inputs.draining:
            return self._answer(inputs, present, "SCALING", "none while scaling")
        engines = [r for r in inputs.workers if r.engine_waiting is not None and r.engine_running is not None]
        if not engines or len(engines) < len(inputs.workers):
            return self._answer(inputs, present, "UNKNOWN_LOAD", "an engine does not tell its load")
        own = self.mean_prompt_tokens / self.prefill_tokens_per_s
        ttfts = [own + self._queue_s(engine, inputs) for engine in engines]
        itls = [self._itl_s(engine.engine_running or 0) for engine in engines]
        text = f"TTFT {min(ttfts):.2f} to {max(ttfts):.2f} s, ITL {min(itls):.3f} to {max(itls):.3f} s"
        if min(ttfts) > self.ttft_sla_s or min(itls) > self.itl_sla_s:
            return self._answer(inputs, present + 1, "SLA_EXCEEDED", text)
        n = len(engines)
        if n >= 2:
            more = n / (n - 1)
            queues = [self._queue_s(engine, inputs) * more for engine in engines]
            calm = max(queues) < (self.ttft_sla_s - own) * self.sensitivity
            held = max((engine.kv_use or 0.0) * more for engine in engines) < self.max_kv
            quick = (
                max(self._itl_s((e.engine_running or 0) * more) for e in engines) < self.itl_sla_s * self.sensitivity
            )
            if calm and held and quick:
                return self._answer(inputs, present - 1, "FEWER_SUFFICE", text)
        return self._answer(inputs, present, "WITHIN_SLA", text)

    def _queue_s(self, engine: ActiveWorker, inputs: PolicyInputs) -> float:
        """Until the prompts that wait there are computed; what waits in routers is shared by all."""
        waiting = (engine.engine_waiting or 0) + (inputs.waiting or 0) / max(len(inputs.workers), 1)
        return waiting * self.mean_prompt_tokens / self.prefill_tokens_per_s

    def _itl_s(self, running: float) -> float:
        return self.decode_base_s + self.decode_per_request_s * running

    def _answer(self, inputs: PolicyInputs, wanted: int, reason: str, message: str) -> PolicyAnswer:
        course = Course(inputs, wanted, reason, message)
        bounds(course)
        return course.answer()
