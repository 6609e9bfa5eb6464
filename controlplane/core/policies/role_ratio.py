"""`role_ratio`: keeps a pool of one role in proportion to its partner: prefill to decode workers of the same model.

As `slo+role_ratio` it is a floor (or exact with `role_ratio_exact`) of one of the two pools; alone it follows the
partner. Inside the tolerance nothing moves. Without a partner pool it changes nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.policies.basis import as_settings, setting, values
from controlplane.core.policies.settings import Reader
from controlplane.core.policies.wrapping import noted, raised
from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs

PREFIX = "role_ratio_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRatio:
    """Settings have the prefix `role_ratio_`. `per_partner`: workers of this pool per worker of the partner (1 prefill
    to 3 decode workers: 0.33 in the prefill pool, 3 in the decode pool). `tolerance`: share that it may be off."""

    per_partner: float = setting(1.0, "Workers here per worker of the pool of the other role.", above=0)
    tolerance: float = setting(0.1, "Share by which that may be off.", at_least=0)
    exact: bool = setting(False, "false: a floor only; true: no more than that either.")

    @classmethod
    def read(cls, reader: Reader) -> "RoleRatio":
        """Raises InvalidArgument."""
        return cls(**values(cls, reader, PREFIX))

    @property
    def settings(self) -> Mapping[str, object]:
        return as_settings(self, PREFIX)

    def bound(self, inputs: PolicyInputs) -> PolicyInputs:
        return inputs

    def modify(self, answer: PolicyAnswer, inputs: PolicyInputs, policy: Policy) -> PolicyAnswer:
        partner = inputs.partner
        if partner is None:
            return noted(answer, "role_ratio", "no pool of the other role serves this model")
        exact = partner.desired * self.per_partner
        least = math.ceil(exact * (1 - self.tolerance) - 1e-9)
        most = max(least, math.floor(exact * (1 + self.tolerance) + 1e-9))
        count = max(answer.wanted, least)
        if self.exact:
            count = min(count, most)
        count = min(max(count, inputs.min_workers), inputs.max_workers)
        note = f"{partner.pool} wants {partner.desired} x {self.per_partner:g} = {exact:.2f} here"
        if count == answer.wanted:
            return noted(answer, "role_ratio", note)
        return raised(answer, "role_ratio", count, "RATIO_KEPT", note)
