"""What several orders look up, refuse and note."""

from controlplane.core.draft import Draft
from controlplane.core.snapshot import Snapshot
from springtide.errors import FailedPrecondition, NotFound
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.record import Event
from springtide.model.worker import Worker


def pool_named(snapshot: Snapshot, name: str) -> Pool:
    """Raises NotFound, which names those that exist."""
    pool = snapshot.pools.get(name)
    if pool is None:
        raise NotFound(kind="pool", name=name, known=snapshot.pools)
    return pool


def worker_named(snapshot: Snapshot, worker_id: str) -> Worker:
    worker = snapshot.workers.get(worker_id)
    if worker is None:
        raise NotFound(kind="worker", name=worker_id, known=snapshot.workers)
    return worker


def node_named(snapshot: Snapshot, node_id: str) -> Node:
    node = snapshot.nodes.get(node_id)
    if node is None:
        raise NotFound(kind="node", name=node_id, known=snapshot.nodes)
    return node


def check_not_deleting(pool: Pool) -> None:
    if pool.intent.deleting:
        raise FailedPrecondition(
            f"pool {pool.name!r} is being deleted.",
            reason="POOL_DELETING",
            field="pool",
            value=pool.name,
            remedy="Wait until it is gone, then create it again.",
        )


def pool_event(draft: Draft, name: str, action: str, status: str, message: str) -> None:
    draft.events.append(Event(draft.now, action, name, status, name, reason="OPERATOR", message=message))
