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
    in_flight: int | None  # of ACTIVE workers' shims; what drains finishes where it is. None: unknown
    waiting: int | None  # in routers, and refused within one Retry-After; None: unknown
    samples: tuple[LoadSample, ...]  # oldest first
    last_scale_up_at: float | None
    last_scale_down_at: float | None
    sample_interval_s: float = 1.0  # how often samples are taken
    at_least: int = 0  # the known part of in_flight + waiting: a lower bound when the whole is unknown

    @property
    def load(self) -> int | None:
        """In-flight plus waiting, requests; None when either is unknown."""
        return None if self.in_flight is None or self.waiting is None else self.in_flight + self.waiting


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """`wanted` workers (STARTING + ACTIVE), already within the bounds; equal to the present count means hold."""

    wanted: int
    reason: str  # UPPER_SNAKE
    message: str  # one sentence with the numbers
    look_again_at: float | None = None  # when time alone could change the answer


class Policy(Protocol):
    @property
    def name(self) -> str: ...

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
