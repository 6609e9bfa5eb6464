"""`predictive`: a forecast as a floor under any policy (`slo+predictive`), or alone over the pool's lower bound.

The forecast looks as far ahead as a start takes: the median of the pool's measured start-ups. Its simplest form is the
rule of a document that the project follows: more workers when the forecast is above 1.2 times what the present ones
hold, fewer only when it is below 0.5 times. In between the floor is the present count. It never shrinks a pool by
itself: it says how far the policy inside may.

Methods: `trend` continues the load's damped trend; `peak` expects the highest load of the look-back again (for bursts
that come sooner than a start takes); `both` takes the higher one. `share` is for bursts that are not worth their peak:
what would have been enough for `predictive_share` of the requests of the look-back (each weighs the same, so that a
busy window counts for more than a quiet one), and never less than the trend.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from controlplane.core.forecast import Need, buckets, loads, peak, start_up_s, trend, weighted_quantile
from controlplane.core.policies.basis import as_settings, check_gap, setting, values
from controlplane.core.policies.settings import Reader
from controlplane.core.policies.wrapping import innermost, noted, raised
from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs

PREFIX = "predictive_"
METHODS = ("trend", "peak", "both", "share")


@runtime_checkable
class Needing(Protocol):
    """A policy that knows how many workers its past windows called for."""

    def needs(self, inputs: PolicyInputs) -> list[Need]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictive:
    """Settings have the prefix `predictive_`. `lead_s` 0: measured. Buckets and look-back in seconds.
    `capacity` 0: the policy's; requests per worker, where the policy inside has no measure of its own."""

    method: str = setting(
        "trend",
        "`trend` of the load; `peak` of the look-back again; `both`; `share`: enough for most requests of it.",
        choices=METHODS,
    )
    up_factor: float = setting(1.2, "More workers when the forecast is above so many times what is there.", above=0)
    down_factor: float = setting(0.5, "Fewer only when it is below so many times what is there.", at_least=0)
    lead_s: float = setting(0.0, "How far ahead, seconds; 0: the median of the pool's measured start-ups.", at_least=0)
    bucket_s: float = setting(10.0, "The load is averaged over so many seconds.", above=0)
    lookback_s: float = setting(600.0, "How far back the forecast looks, seconds.", above=0)
    capacity: int = setting(0, "Requests per worker; 0: the policy's.", at_least=0)
    share: float = setting(0.9, "Share of the requests of the look-back that `share` covers.", above=0)

    @classmethod
    def read(cls, reader: Reader) -> "Predictive":
        """Raises InvalidArgument."""
        modifier = cls(**values(cls, reader, PREFIX))
        check_gap(reader, f"{PREFIX}down_factor", modifier.down_factor, f"{PREFIX}up_factor", modifier.up_factor)
        return modifier

    @property
    def settings(self) -> Mapping[str, object]:
        return as_settings(self, PREFIX)

    def bound(self, inputs: PolicyInputs) -> PolicyInputs:
        return inputs

    def modify(self, answer: PolicyAnswer, inputs: PolicyInputs, policy: Policy) -> PolicyAnswer:
        lead = start_up_s(inputs.start_ups_s, self.lead_s)
        needs = self._needs(inputs, policy)
        if not needs:
            return noted(answer, "forecast", "no load is known to forecast from")
        ahead = self.forecast(needs, inputs.now, lead)
        present = inputs.present
        needed = math.ceil(ahead - 1e-9)
        if ahead > self.up_factor * present:
            floor, rule = needed, f"> {self.up_factor:g} x {present}"
        elif ahead < self.down_factor * present:
            floor, rule = needed, f"< {self.down_factor:g} x {present}"
        else:
            floor, rule = present, f"within {self.down_factor:g} to {self.up_factor:g} x {present}"
        floor = min(floor, inputs.max_workers)
        note = f"{ahead:.2f} workers needed in {lead:.0f} s ({self.method}) {rule}: floor {floor}"
        if floor <= answer.wanted:
            return noted(answer, "forecast", note)
        reason = "FORECAST" if floor > present else "FORECAST_HOLDS"
        return raised(answer, "forecast", floor, reason, note)

    def _needs(self, inputs: PolicyInputs, policy: Policy) -> list[Need]:
        """What past windows called for, oldest first: the policy's own view where it has one, else load / capacity."""
        since = inputs.now - self.lookback_s
        inside = innermost(policy)
        if isinstance(inside, Needing):
            return [need for need in inside.needs(inputs) if need.at > since]
        each = self.capacity or policy.capacity
        return [
            Need(b.at, b.value / each, b.value)
            for b in buckets(loads(inputs.samples, since), self.bucket_s, inputs.now)
        ]

    def forecast(self, needs: list[Need], now: float, lead_s: float) -> float:
        """Workers needed `lead_s` from now."""
        series = [need.workers for need in needs]
        width = (now - needs[0].at) / len(needs) or self.bucket_s
        trended = trend(series, lead_s / width)
        if self.method == "peak":
            return peak(series)
        if self.method == "both":
            return max(trended, peak(series))
        if self.method == "share":
            return max(trended, weighted_quantile([(n.workers, n.weight) for n in needs], self.share))
        return trended
