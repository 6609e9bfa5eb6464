"""The routing table: pools, and the workers that requests may go to now."""

from controlplane.core.snapshot import Snapshot
from springtide.model.enums import State
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingDelta, RoutingTable

__all__ = ["RoutedPool", "RoutedWorker", "RoutingDelta", "RoutingTable", "diff", "routing_table"]


def routing_table(snapshot: Snapshot) -> RoutingTable:
    """Only ACTIVE workers with admission OPEN and a known endpoint are in it."""
    workers: dict[str, RoutedWorker] = {}
    starting: dict[str, int] = {}
    for worker_id in sorted(snapshot.workers):
        worker = snapshot.workers[worker_id]
        pool = snapshot.pools.get(worker.pool)
        if worker.state is State.STARTING:
            starting[worker.pool] = starting.get(worker.pool, 0) + 1
        if pool is None or not worker.routable or not worker.observed.endpoint:
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
        )
        for name, pool in sorted(snapshot.pools.items())
    }
    return RoutingTable(snapshot.store_id, snapshot.revision, pools, workers)


def diff(old: RoutingTable, new: RoutingTable) -> RoutingDelta | None:
    """From `old` to `new`; None when they belong to different stores: then only a snapshot will do."""
    if old.store_id != new.store_id:
        return None
    return RoutingDelta(
        store_id=new.store_id,
        revision=new.revision,
        pools=tuple(pool for name, pool in new.pools.items() if old.pools.get(name) != pool),
        removed_pools=tuple(name for name in old.pools if name not in new.pools),
        workers=tuple(worker for key, worker in new.workers.items() if old.workers.get(key) != worker),
        removed_workers=tuple(key for key in old.workers if key not in new.workers),
    )
