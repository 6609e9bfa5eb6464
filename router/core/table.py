"""The routing table: a snapshot, then deltas in order of their revisions, all of one store.

Rules: a snapshot replaces the table, whatever its revision (a restored store goes back). A delta of another store than
the table's asks for a new snapshot; one that is not newer is old news. An *empty* snapshot of a foreign store never
takes routes away: an operator who lost a store has not lost the engines, so the last known good table stays until the
new store knows pools.
"""

from enum import Enum

from springtide.model.routing import RoutingDelta, RoutingTable


class Change(Enum):
    """What became of a snapshot or delta."""

    APPLIED = "applied"
    OLD = "old"
    FOREIGN = "foreign"
    """A delta of another store: a new snapshot is needed."""
    KEPT = "kept"
    """An empty snapshot of a foreign store: the table stays as it is."""


def apply_snapshot(table: RoutingTable, snapshot: RoutingTable) -> tuple[RoutingTable, Change]:
    """The table after a snapshot."""
    foreign = bool(table.store_id) and snapshot.store_id != table.store_id
    if foreign and table.pools and not snapshot.pools:
        return table, Change.KEPT
    return snapshot, Change.APPLIED


def apply_delta(table: RoutingTable, delta: RoutingDelta) -> tuple[RoutingTable, Change]:
    """The table after a delta."""
    if delta.store_id != table.store_id:
        return table, Change.FOREIGN
    if delta.revision <= table.revision:
        return table, Change.OLD
    pools = {name: pool for name, pool in table.pools.items() if name not in delta.removed_pools}
    pools.update((pool.name, pool) for pool in delta.pools)
    workers = {name: worker for name, worker in table.workers.items() if name not in delta.removed_workers}
    workers.update((worker.worker_id, worker) for worker in delta.workers)
    return RoutingTable(delta.store_id, delta.revision, pools, workers), Change.APPLIED
