"""The routing table: what routers hold, as a whole and as changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import Role
from springtide.model.pool import RoutingSpec


@dataclass(frozen=True, slots=True)
class RoutedPool:
    name: str
    served_model_name: str
    max_waiting: int = 1024
    waiting_timeout_s: float = 300.0
    starting: int = 0  # coming workers: a reason to wait rather than refuse
    max_workers: int = 0  # 0: nothing will ever come
    engine: str = ""
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    role: Role | None = Role.MIXED  # None: one of a later version; reached by the pool's own name only
    start_up_s: float | None = None  # measured, from the order to ACTIVE; None: none was seen


@dataclass(frozen=True, slots=True)
class RoutedWorker:
    """ACTIVE with admission OPEN. `endpoint` is host:port of its shim."""

    worker_id: str
    pool: str
    incarnation: int
    endpoint: str
    max_in_flight: int = 0
    ramp_s: float = 0.0  # slow start, counted from when the router first sees the incarnation
    traceparent: str = ""
    weight_version: str = ""
    node_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # of its node and its pool


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """The whole table of one store at one revision."""

    store_id: str = ""
    revision: int = 0
    pools: Mapping[str, RoutedPool] = field(default_factory=dict)
    workers: Mapping[str, RoutedWorker] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingDelta:
    """What changed from a table to the one at `revision`. Without changes it still carries its revision."""

    store_id: str
    revision: int
    pools: tuple[RoutedPool, ...] = ()  # added or changed
    removed_pools: tuple[str, ...] = ()
    workers: tuple[RoutedWorker, ...] = ()  # added or changed
    removed_workers: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.pools or self.removed_pools or self.workers or self.removed_workers)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """In-flight as the worker's shim counts it. None is unknown."""

    worker_id: str
    incarnation: int
    in_flight: int | None = None
    kv_use: float | None = None


MOST_NEEDS = 64  # entries of a pool's demand by labels; a report joins what is beyond


@dataclass(frozen=True, slots=True)
class NeedReport:
    """Demand of requests that ask for the same labels, which a worker must have all; () asks for none."""

    labels: tuple[tuple[str, str], ...]  # sorted
    waiting: int = 0  # held, and refused within one Retry-After
    running: int = 0

    @property
    def tasks(self) -> int:
        return self.waiting + self.running


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What one router holds back for one pool, and how its requests fared since the router started."""

    pool: str
    waiting: int
    rejected: int = 0  # refused for lack of a worker within one Retry-After
    oldest_wait_s: float = 0.0
    requests_total: int = 0
    failed_total: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    by_needs: tuple[NeedReport, ...] = ()  # everything by labels; empty: no demand, or a router that does not tell

    @property
    def by_needs_waiting(self) -> int:
        """What waits by labels: beside `waiting` and `rejected` what was refused since no worker has its labels."""
        return sum(need.waiting for need in self.by_needs)


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """One router's share of a worker."""

    worker_id: str
    incarnation: int
    in_flight: int = 0
    failures_total: int = 0
    requests_total: int = 0


@dataclass(frozen=True, slots=True)
class RouterReport:
    """A pool that is left out is unknown."""

    pools: tuple[PoolReport, ...] = ()
    workers: tuple[WorkerUse, ...] = ()
