"""What a scaling policy is: a pure function from inputs to a wanted count, with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controlplane.core.snapshot import LoadSample


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """All that a policy may look at. Counts are workers, loads are requests, times seconds."""

    now: float
    min_workers: int
    max_workers: int
    active: int
    starting: int
    draining: int
    desired: int
    in_flight: int | None  # of ACTIVE and DRAINING workers' shims; None: unknown
    waiting: int | None  # in routers; None: unknown
    samples: tuple[LoadSample, ...]  # oldest first
    last_scale_up_at: float | None
    last_scale_down_at: float | None


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """`wanted` workers (STARTING + ACTIVE), already within the bounds; equal to the present count means hold."""

    wanted: int
    reason: str  # UPPER_SNAKE
    message: str  # one sentence with the numbers
    look_again_at: float | None = None  # when time alone could change the answer


class Policy(Protocol):
    name: str

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer: ...

    @property
    def monitoring_interval_s(self) -> float: ...

    @property
    def capacity(self) -> int:
        """Requests that one worker is expected to hold, for load_ratio and total_capacity."""
        ...

    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings with defaults filled in."""
        ...
