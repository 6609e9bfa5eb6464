"""`static` (also `no`): keeps what is there. For fixed pools, outside orchestrators and manual control."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.policies.settings import Reader, check_bounds
from controlplane.core.policy import PolicyAnswer, PolicyInputs
from springtide.model.pool import Setting


@dataclass(frozen=True, slots=True)
class Static:
    """`workers`: the fixed count within the bounds; None keeps the pool's present desired count."""

    workers: int | None = None
    requests_per_worker_capacity: int = 8
    name: str = "static"

    @classmethod
    def read(cls, raw: Mapping[str, Setting], min_workers: int, max_workers: int) -> "Static":
        reader = Reader("static", raw)
        reader.reject_unknown(("workers", "requests_per_worker_capacity", "min_workers", "max_workers"))
        check_bounds(reader, min_workers, max_workers)
        return cls(
            workers=reader.integer("workers", None, at_least=0),
            requests_per_worker_capacity=reader.integer("requests_per_worker_capacity", 8, at_least=1) or 8,
        )

    @property
    def monitoring_interval_s(self) -> float:
        return 5.0

    @property
    def capacity(self) -> int:
        return self.requests_per_worker_capacity

    @property
    def drain_timeout_s(self) -> float:
        return 30.0

    @property
    def settings(self) -> Mapping[str, object]:
        return {"workers": self.workers, "requests_per_worker_capacity": self.requests_per_worker_capacity}

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        asked = inputs.desired if self.workers is None else self.workers
        wanted = min(max(asked, inputs.min_workers), inputs.max_workers)
        return PolicyAnswer(wanted, "STATIC", f"the policy is static: {wanted} workers")
