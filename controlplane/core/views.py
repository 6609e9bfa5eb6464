"""What operators see: counts, the status of a pool, seven figures and eight counts, all from one snapshot."""

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.core.policies import make_policy
from controlplane.core.signals import in_flight_of, total, waiting_of
from controlplane.core.snapshot import Snapshot
from controlplane.core.weights import is_behind
from controlplane.core.worker import id_order
from springtide.errors import NotFound, SpringtideError
from springtide.model.enums import NodeState, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker

_CAPACITY_UNKNOWN = 8  # of a pool whose policy cannot be made: the policies' own default


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """PoolStatus of types.proto. None is unknown or not set."""

    desired_workers: int
    active: int
    starting: int
    draining: int
    inactive: int
    total: int
    pending: int
    manual_workers: int | None
    hold_until: float | None
    hold_reason: str
    in_flight: int | None
    waiting: int | None
    load_ratio: float | None
    total_capacity: int
    conditions: tuple[str, ...]
    weight_version: str
    weight_source: str
    sleeping: int
    weights_behind: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """The seven figures of GetMetrics, under the names of the document that they come from."""

    active_workers: int
    draining_workers: int
    total_workers: int
    active_requests: int | None
    pending_requests: int | None
    load_ratio: float | None
    total_capacity: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The eight counts of GetSummary, under the names of the document that they come from."""

    active_instances: int
    scaling_up_instances: int
    draining_instances: int
    active_servers: int
    scaling_up_servers: int
    pending_server_scale_downs: int
    total_servers: int
    total_instances: int


def workers_of(snapshot: Snapshot, pool: str = "", node_id: str = "") -> list[Worker]:
    """Workers in id order, of one pool and one node where these are named."""
    found = [
        worker
        for worker in snapshot.workers.values()
        if (not pool or worker.pool == pool) and (not node_id or worker.intent.node_id == node_id)
    ]
    return sorted(found, key=lambda worker: id_order(worker.worker_id))


def capacity_of(pool: Pool) -> int:
    """Requests that one worker of the pool is expected to hold."""
    try:
        return make_policy(pool.spec.policy, pool.spec.min_workers, pool.spec.max_workers).capacity
    except SpringtideError:
        return _CAPACITY_UNKNOWN


def pool_status(snapshot: Snapshot, name: str, now: float) -> PoolStatus:
    """Raises NotFound."""
    pool = snapshot.pools.get(name)
    if pool is None:
        raise NotFound(kind="pool", name=name, known=snapshot.pools)
    workers = workers_of(snapshot, name)
    counts = _counts(workers)
    in_flight, waiting = _load(snapshot, name, workers, now)
    capacity = counts[State.ACTIVE] * capacity_of(pool)
    return PoolStatus(
        desired_workers=pool.intent.desired_workers,
        active=counts[State.ACTIVE],
        starting=counts[State.STARTING],
        draining=counts[State.DRAINING],
        inactive=counts[State.INACTIVE],
        total=len(workers),
        pending=max(0, pool.intent.desired_workers - counts[State.ACTIVE]),
        manual_workers=pool.intent.manual_workers,
        hold_until=pool.intent.hold_until,
        hold_reason=pool.intent.hold_reason,
        in_flight=in_flight,
        waiting=waiting,
        load_ratio=load_ratio(in_flight, waiting, capacity),
        total_capacity=capacity,
        conditions=pool.intent.conditions,
        weight_version=pool.intent.weight_version,
        weight_source=pool.intent.weight_source,
        sleeping=sum(1 for worker in workers if worker.asleep),
        weights_behind=sum(1 for worker in workers if worker.state is State.ACTIVE and is_behind(worker, pool)),
    )


def load_ratio(in_flight: int | None, waiting: int | None, capacity: int) -> float | None:
    """(in-flight + waiting) / capacity; unknown when a part is. No capacity and no load is 0, never a division by zero;
    load without capacity counts each request as a whole one."""
    if in_flight is None or waiting is None:
        return None
    return (in_flight + waiting) / max(capacity, 1)


def metrics(snapshot: Snapshot, pool: str, now: float) -> Metrics:
    """Of one pool, or of all together when `pool` is empty. Raises NotFound."""
    if pool and pool not in snapshot.pools:
        raise NotFound(kind="pool", name=pool, known=snapshot.pools)
    names = [pool] if pool else sorted(snapshot.pools)
    all_of = [pool_status(snapshot, name, now) for name in names]
    in_flight, _ = total([status.in_flight for status in all_of])
    waiting, _ = total([status.waiting for status in all_of])
    capacity = sum(status.total_capacity for status in all_of)
    return Metrics(
        active_workers=sum(status.active for status in all_of),
        draining_workers=sum(status.draining for status in all_of),
        total_workers=sum(status.total for status in all_of),
        active_requests=in_flight,
        pending_requests=waiting,
        load_ratio=load_ratio(in_flight, waiting, capacity),
        total_capacity=capacity,
    )


def summary(snapshot: Snapshot) -> Summary:
    """Workers by state and nodes by state."""
    counts = _counts(snapshot.workers.values())
    nodes = [node.state for node in snapshot.nodes.values()]
    return Summary(
        active_instances=counts[State.ACTIVE],
        scaling_up_instances=counts[State.STARTING],
        draining_instances=counts[State.DRAINING],
        active_servers=nodes.count(NodeState.UP),
        scaling_up_servers=nodes.count(NodeState.REQUESTED),
        pending_server_scale_downs=nodes.count(NodeState.RELEASING),
        total_servers=len(nodes) - nodes.count(NodeState.GONE),
        total_instances=len(snapshot.workers) - counts[State.INACTIVE],
    )


def _counts(workers: Iterable[Worker]) -> dict[State, int]:
    counts = dict.fromkeys(State, 0)
    for worker in workers:
        counts[worker.state] += 1
    return counts


def _load(snapshot: Snapshot, name: str, workers: list[Worker], now: float) -> tuple[int | None, int | None]:
    """In-flight of the pool's ACTIVE and DRAINING workers, and what waits in routers."""
    busy = [worker for worker in workers if worker.state in (State.ACTIVE, State.DRAINING)]
    in_flight, _ = total([in_flight_of(snapshot, worker, now) for worker in busy])
    waiting, _ = waiting_of(snapshot, name, now, rejected=False)
    return in_flight, waiting
