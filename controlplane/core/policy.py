"""What a scaling policy is: a pure function from inputs to a wanted count, with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from controlplane.core.snapshot import LoadSample
from springtide.model.enums import Role


@dataclass(frozen=True, slots=True)
class Supply:
    """The pool's workers on the nodes of one provisioner that offer the same capability keys."""

    provisioner: str
    offers: frozenset[str] = frozenset()
    active: int = 0
    starting: int = 0
    most: int | None = None  # workers of this pool that fit there, those that are there included; None: no bound
    online: bool = True
    in_flight: int | None = None
    weight: float = 1.0  # capacity of one worker there, in standard workers

    @property
    def present(self) -> int:
        return self.active + self.starting


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests, waiting and running, that need the same capability keys."""

    needs: frozenset[str]
    tasks: int


@dataclass(frozen=True, slots=True)
class Partner:
    """The pool of the other role (prefill or decode) that serves the same model."""

    pool: str
    active: int
    starting: int
    desired: int


@dataclass(frozen=True, slots=True)
class ActiveWorker:
    """One ACTIVE worker as it reports itself. None is unknown."""

    worker_id: str
    in_flight: int | None = None
    engine_running: int | None = None
    engine_waiting: int | None = None
    kv_use: float | None = None


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
    start_ups_s: tuple[float, ...] = ()  # measured, from the order to ACTIVE, oldest first
    supplies: tuple[Supply, ...] = ()
    demands: tuple[Demand, ...] = ()  # () when nobody tells them apart: the whole load needs nothing in particular
    partner: Partner | None = None
    workers: tuple[ActiveWorker, ...] = ()  # ACTIVE workers, in id order
    role: Role = Role.MIXED

    @property
    def present(self) -> int:
        """STARTING and ACTIVE workers."""
        return self.active + self.starting

    @property
    def load(self) -> int | None:
        """In-flight plus waiting, requests; None when either is unknown."""
        return None if self.in_flight is None or self.waiting is None else self.in_flight + self.waiting


@dataclass(frozen=True, slots=True)
class Step:
    """What one stage made of a count, and why; part of the decision record."""

    stage: str
    before: int
    after: int
    note: str

    def __str__(self) -> str:
        count = f"{self.before}" if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{count}: {self.note}"


@dataclass(frozen=True, slots=True)
class Share:
    """Where some of the wanted workers belong: a provisioner (None: any) whose nodes offer the keys. A preference: a
    worker that finds no room there starts elsewhere, and none is moved for it."""

    workers: int
    provisioner: str | None = None
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """`wanted` workers (STARTING + ACTIVE), already within the bounds; equal to the present count means hold."""

    wanted: int
    reason: str  # UPPER_SNAKE
    message: str  # one sentence with the numbers
    look_again_at: float | None = None  # when time alone could change the answer
    trail: tuple[Step, ...] = ()  # the stages that the count went through, in order
    parts: Mapping[str, int] = field(default_factory=dict)  # of `wanted`, by provisioner or capability keys: for people
    shares: tuple[Share, ...] = ()  # the same for placement, in the order in which workers are counted for them


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
