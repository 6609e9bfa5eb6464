"""The waist of the control plane: what `plan` sees and what it answers.

    plan(snapshot, now) -> Plan

A snapshot is the store's records at one revision plus the live view: signals and reports that never enter the store.
The live view belongs to the leader's memory and starts unknown. A plan is committed as a whole: it is refused when
one of the records that it read has moved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.node import Node, NodeObserved
from springtide.model.pool import Pool
from springtide.model.record import Decision, Event
from springtide.model.worker import Worker, WorkerReport


@dataclass(frozen=True, slots=True)
class NodeLive:
    """What the leader has heard of one node since it leads."""

    connected: bool
    last_heard_at: float  # seconds, leader's clock
    session_id: str = ""
    hello: NodeObserved | None = None
    stopping: bool = False
    stop_deadline_at: float | None = None
    goodbye: bool = False
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)  # by worker id, its own and foreign ones
    reported: bool = (
        False  # at least one heartbeat in this session: absence from `reports` now means absence on the node
    )


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What one router holds back for one pool. `rejected` counts requests that were refused within one Retry-After."""

    waiting: int
    rejected: int = 0
    oldest_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterLive:
    connected: bool
    last_heard_at: float
    acked_revision: int = 0  # of this store; 0 when it holds another store's table
    demand: Mapping[str, PoolDemand] = field(default_factory=dict)  # a missing pool is unknown


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One look at a pool's load: in-flight of its ACTIVE workers, and what routers hold back. None is unknown."""

    at: float
    in_flight: int | None
    waiting: int | None
    active: int
    starting: int
    at_least: int = 0  # the part of the load that is known: a lower bound when the whole is not

    @property
    def load(self) -> int | None:
        """In-flight plus what waits in routers, requests."""
        return None if self.in_flight is None or self.waiting is None else self.in_flight + self.waiting


@dataclass(frozen=True, slots=True)
class LiveView:
    nodes: Mapping[str, NodeLive] = field(default_factory=dict)
    routers: Mapping[str, RouterLive] = field(default_factory=dict)
    samples: Mapping[str, tuple[LoadSample, ...]] = field(default_factory=dict)  # by pool, oldest first, bounded
    evaluated_at: Mapping[str, float] = field(default_factory=dict)  # by pool: last time its policy was asked
    last_decision: Mapping[str, Decision] = field(default_factory=dict)  # by pool: the standing one


@dataclass(frozen=True, slots=True)
class Timing:
    """Settings of the control plane that decisions depend on, seconds."""

    heartbeat_interval_s: float = 1.0
    signal_max_age_s: float = 5.0  # older reports are unknown
    suspect_after_s: float = 3.0
    unhealthy_after_s: float = 60.0  # probes that fail for so long end an ACTIVE worker: it hangs
    lease_s: float = 15.0  # silence of an agent after which its workers are LOST
    grace_s: float = 30.0  # after a start, a leader change, or a third of the agents silent at once
    ack_timeout_s: float = 2.0  # longest wait for routers in UNROUTING
    router_lease_s: float = 5.0  # a router silent for longer is not waited for
    sample_interval_s: float = 1.0
    start_backoff_s: float = 1.0  # first; doubles per failed attempt
    start_backoff_max_s: float = 60.0
    inactive_retention_s: float = 3600.0  # an INACTIVE record that nothing needs is forgotten after it
    monitoring_interval_s: float = 5.0  # longest sleep between plans


@dataclass(frozen=True, slots=True)
class Snapshot:
    store_id: str
    revision: int
    pools: Mapping[str, Pool]
    nodes: Mapping[str, Node]
    workers: Mapping[str, Worker]
    live: LiveView
    timing: Timing = Timing()
    grace_until: float = 0.0  # no lease expires before


@dataclass(frozen=True, slots=True)
class Put:
    """Creates or replaces a record. Which one follows from the type."""

    record: Pool | Node | Worker


@dataclass(frozen=True, slots=True)
class Delete:
    kind: str  # "pool", "node" or "worker"
    key: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to commit, and when time alone could change the answer.

    `writes` compare against the revisions of the records they replace. `decisions` with the id of a standing decision
    update its count. `samples` are for the live view, not for the store. `notes` say, for logs, why nothing was done.
    A `wake_at` that is not later than now means: plan again right after the commit.
    """

    writes: tuple[Put | Delete, ...] = ()
    decisions: tuple[Decision, ...] = ()
    events: tuple[Event, ...] = ()
    samples: Mapping[str, LoadSample] = field(default_factory=dict)
    evaluated: tuple[str, ...] = ()  # pools whose policy was asked in this plan
    wake_at: float | None = None
    notes: tuple[str, ...] = ()
