"""`thresholds`: one worker more or fewer by a queue's length, by the use of capacity, or by what loads a role.

`signal = "queue"`: up when more than `up` requests wait, down when the use of capacity is below `down`. `"use"`: in
flight and waiting over capacity. `"role"`: what the roles of the fourth document are measured by: a prefill pool by its
prompt tokens (requests times `mean_prompt_tokens` over `tokens_per_worker`), a decode pool by its fullest KV memory, a
mixed one by its use; up above 0.8, down below 0.3.
"""

from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, known_load, setting
from controlplane.core.policies.settings import Reader
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from controlplane.core.stages import Course, bounds, cooldown, cross_threshold, last_in_use, pending, signal_age
from springtide.model.enums import Role

SIGNALS = ("role", "use", "queue")
_DEFAULT_UP = {"role": 0.8, "use": 0.8, "queue": 10.0}
_DEFAULT_DOWN = {"role": 0.3, "use": 0.2, "queue": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds(Basis):
    """`up` and `down` 0: the signal's own defaults."""

    title: ClassVar[str] = "thresholds"

    signal: str = setting(
        "role",
        "`queue`: what waits; `use`: of capacity; `role`: prompt tokens of prefill, KV memory of decode pools.",
        choices=SIGNALS,
    )
    up: float = setting(0.0, "One worker more above it; 0: the signal's (0.8, for `queue` 10).", at_least=0)
    down: float = setting(0.0, "One worker fewer below it; 0: the signal's (`role` 0.3, else 0.2).", at_least=0)
    cooldown_s: float = setting(5.0, "From one move to the next, seconds.", at_least=0)
    mean_prompt_tokens: int = setting(1024, "Of a request, for `role` in a prefill pool.", at_least=1)
    tokens_per_worker: int = setting(10_000, "Prompt tokens that one prefill worker holds.", at_least=1)

    def check(self, reader: Reader) -> None:
        up, down = self._lines()
        if self.signal != "queue" and down >= up:
            raise reader.bad("down", f"it must be below up ({up:g})", "Leave a gap between them, e.g. 0.3 and 0.8.")

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        up, down = self._lines()
        present, level, text = inputs.present, self._level(inputs), ""
        use = known_load(inputs) / max(inputs.active * self.capacity, 1)
        if present == 0:
            wanted, reason = (1, "FROM_ZERO") if inputs.at_least > 0 else (0, "IDLE")
        elif level is None:
            wanted, reason = present, "UNKNOWN_LOAD"
        else:
            text = f"{self.signal} {level:.3f} between {down:g} and {up:g}"
            low = use if self.signal == "queue" else level
            wanted, reason = present, "WITHIN_THRESHOLDS"
            if level > up:
                wanted, reason, text = inputs.active + 1, "LOAD_ABOVE_THRESHOLD", f"{self.signal} {level:.3f} > {up:g}"
                wanted = max(wanted, present)
            elif low < down and inputs.active > 0:
                wanted, reason, text = present - 1, "LOAD_BELOW_THRESHOLD", f"{low:.3f} < {down:g}"
        course = Course(inputs, wanted, reason, text or reason.lower().replace("_", " "))
        signal_age(course)
        if level is not None and self.signal != "queue":
            worth = level * inputs.active
            cross_threshold(course, lambda count: worth / max(count, 1), upper=up)
        pending(course)
        cooldown(course, up_s=self.cooldown_s, down_s=self.cooldown_s)
        last_in_use(course)
        bounds(course)
        return course.answer()

    def _lines(self) -> tuple[float, float]:
        return self.up or _DEFAULT_UP[self.signal], self.down or _DEFAULT_DOWN[self.signal]

    def _level(self, inputs: PolicyInputs) -> float | None:
        if self.signal == "queue":
            return None if inputs.waiting is None else float(inputs.waiting)
        role = inputs.role if self.signal == "role" else Role.MIXED
        if role is Role.DECODE:
            return inputs.samples[-1].kv_use if inputs.samples else None
        if inputs.load is None or inputs.active == 0:
            return None
        if role is Role.PREFILL:
            return inputs.load * self.mean_prompt_tokens / (inputs.active * self.tokens_per_worker)
        return inputs.load / (inputs.active * self.capacity)
