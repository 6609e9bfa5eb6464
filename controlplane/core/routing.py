"""The routing table: pools, and the workers that requests may go to now."""

from collections.abc import Mapping

from controlplane.core.policies.content import routing_of
from controlplane.core.snapshot import Snapshot
from springtide.model.enums import State
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingDelta, RoutingTable

__all__ = ["RoutedPool", "RoutedWorker", "RoutingDelta", "RoutingTable", "diff", "routing_table"]


def routing_table(snapshot: Snapshot) -> RoutingTable:
    """Only ACTIVE workers with admission OPEN and a known endpoint are in it. One that fails its probes is in it only
    while its pool has no other."""
    workers: dict[str, RoutedWorker] = {}
    starting: dict[str, int] = {}
    sound = {w.pool for w in snapshot.workers.values() if w.routable and w.observed.endpoint and not w.failing}
    for worker_id in sorted(snapshot.workers):
        worker = snapshot.workers[worker_id]
        pool = snapshot.pools.get(worker.pool)
        if worker.state is State.STARTING:
            starting[worker.pool] = starting.get(worker.pool, 0) + 1
        if pool is None or not worker.routable or not worker.observed.endpoint:
            continue
        if worker.failing and worker.pool in sound:
            continue
        workers[worker_id] = RoutedWorker(
            worker_id=worker_id,
            pool=worker.pool,
            incarnation=worker.observed.incarnation,
            endpoint=worker.observed.endpoint,
            max_in_flight=worker.observed.max_in_flight,
            ramp_s=pool.spec.ramp_s,
            traceparent=worker.intent.traceparent,
            weight_version=worker.observed.weight_version,
            node_id=worker.intent.node_id,
            labels={**_node_labels(snapshot, worker.intent.node_id), **pool.spec.labels},
        )
    pools = {
        name: RoutedPool(
            name=name,
            served_model_name=pool.spec.model_name,
            max_waiting=pool.spec.max_waiting,
            waiting_timeout_s=pool.spec.waiting_timeout_s,
            starting=starting.get(name, 0),
            max_workers=0 if pool.intent.deleting else pool.spec.max_workers,
            engine=pool.spec.engine,
            routing=routing_of(pool.spec),
            role=pool.spec.role,
            start_up_s=_start_up_s(snapshot, name),
        )
        for name, pool in sorted(snapshot.pools.items())
    }
    return RoutingTable(snapshot.store_id, snapshot.revision, pools, workers)


def _node_labels(snapshot: Snapshot, node_id: str) -> Mapping[str, str]:
    node = snapshot.nodes.get(node_id)
    return node.observed.labels if node is not None else {}


def _start_up_s(snapshot: Snapshot, pool: str) -> float | None:
    """The median of the pool's last start-ups; None when this leader has seen none."""
    measured = sorted(snapshot.live.start_ups_s.get(pool, ()))
    return measured[(len(measured) - 1) // 2] if measured else None


def diff(old: RoutingTable, new: RoutingTable) -> RoutingDelta | None:
    """From `old` to `new`; None when they belong to different stores: then only a snapshot will do."""
    if old.store_id != new.store_id:
        return None
    return RoutingDelta(
        store_id=new.store_id,
        revision=new.revision,
        pools=tuple(pool for name, pool in new.pools.items() if _differ(old.pools.get(name), pool)),
        removed_pools=tuple(name for name in old.pools if name not in new.pools),
        workers=tuple(worker for key, worker in new.workers.items() if _differ(old.workers.get(key), worker)),
        removed_workers=tuple(key for key in old.workers if key not in new.workers),
    )


def _differ(old: object, new: object) -> bool:
    """Most entries are the very same ones: comparing those field by field is most of the work."""
    return old is not new and old != new
