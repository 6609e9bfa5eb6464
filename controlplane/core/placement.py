"""Where a worker can go: free, disjoint GPU slices of nodes that are up.

Among the nodes that fit, the one with most free GPUs is taken, then the smallest id. Spreading means that the loss of
one node takes the fewest workers with it and that engines share a host's memory bandwidth as little as possible; the
price, that a big worker finds no empty node sooner, is paid where pools of unlike sizes share nodes: labels keep them
apart.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from controlplane.core.fences import has_ended
from controlplane.core.snapshot import NodeLive, Snapshot
from springtide.model.enums import NodeState
from springtide.model.node import Node
from springtide.model.pool import Pool, PoolSpec
from springtide.model.worker import Worker


@dataclass(frozen=True, slots=True)
class Slice:
    """The GPUs of one worker."""

    node_id: str
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CannotPlace:
    """Why no node can take it: one sentence per node, by node id."""

    reasons: Mapping[str, str]
    awaited: int = 0  # workers that have a node coming
    outlook: str = ""  # which nodes are coming, or why none is

    def __str__(self) -> str:
        return f"{self.outlook}; {self._why()}" if self.outlook else self._why()

    def _why(self) -> str:
        if not self.reasons:
            return "no node is known; start an agent"
        shown = [f"{node_id}: {reason}" for node_id, reason in list(self.reasons.items())[:8]]
        more = len(self.reasons) - len(shown)
        return "; ".join(shown) + (f"; and {more} more nodes" if more > 0 else "")


def free_gpus(
    node: Node, workers: Iterable[Worker], live: NodeLive | None, lent: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """GPUs of the node that no worker record reserves and no engine is reported on, in the node's order. Engines count
    whoever asked for them: another store's, and ours that the records have already let go. `lent`: GPUs of sleeping
    workers that may be borrowed."""
    taken = {gpu for worker in workers if worker.intent.node_id == node.node_id for gpu in worker.intent.gpu_ids}
    if live is not None:
        taken |= {gpu for report in live.reports.values() if not has_ended(report) for gpu in report.gpu_ids}
    taken -= lent
    return tuple(gpu.id for gpu in node.observed.gpus if gpu.id not in taken)


def foreign_workers(snapshot: Snapshot, node_id: str) -> int:
    """Live engines on the node that this store has no record of."""
    live = snapshot.live.nodes.get(node_id)
    if live is None:
        return 0
    return sum(
        1
        for report in live.reports.values()
        if not has_ended(report) and (report.store_id != snapshot.store_id or report.worker_id not in snapshot.workers)
    )


def slots(gpus: int, tensor_parallel_size: int) -> tuple[int, int]:
    """(workers that a node of `gpus` GPUs can hold, GPUs left over)."""
    return gpus // tensor_parallel_size, gpus % tensor_parallel_size


def place(
    spec: PoolSpec,
    nodes: Mapping[str, Node],
    workers: Mapping[str, Worker],
    pools: Mapping[str, Pool],
    live: Mapping[str, NodeLive],
    avoid: str = "",
    prefer: Callable[[Node], int] | None = None,
    lent: Mapping[str, frozenset[str]] | None = None,
) -> Slice | CannotPlace:
    """A slice for one worker of the pool. `avoid` is a node that just failed it: taken only when no other fits.
    `prefer` ranks nodes before their free GPUs do; the smallest is best. `lent`: by node, GPUs that may be borrowed."""
    reasons: dict[str, str] = {}
    best: tuple[tuple[bool, int, int, str], tuple[str, ...]] | None = None
    holders: dict[str, list[Worker]] = {}
    for worker in workers.values():
        if worker.intent.gpu_ids:
            holders.setdefault(worker.intent.node_id, []).append(worker)
    for node_id in sorted(nodes):
        node, held = nodes[node_id], holders.get(node_id, [])
        if node.state is NodeState.GONE and node.provided is not None:
            continue  # given back: it says nothing about what could be
        free = free_gpus(node, held, live.get(node_id), (lent or {}).get(node_id, frozenset()))
        reason = _refusal(spec, node, live.get(node_id), free, held, pools)
        if reason is not None:
            reasons[node_id] = reason
            continue
        rank = (node_id == avoid, 0 if prefer is None else prefer(node), -len(free), node_id)
        if best is None or rank < best[0]:
            best = (rank, free)
    if best is None:
        return CannotPlace(reasons)
    (_, _, _, node_id), free = best
    return Slice(node_id, _cut(nodes[node_id], free, spec.tensor_parallel_size))


def _refusal(
    spec: PoolSpec,
    node: Node,
    live: NodeLive | None,
    free: tuple[str, ...],
    held: list[Worker],
    pools: Mapping[str, Pool],
) -> str | None:
    tp, gpus = spec.tensor_parallel_size, len(node.observed.gpus)
    if node.state is not NodeState.UP:
        return f"it is {node.state} ({node.reason})"
    if node.spec.cordoned:
        return f"it is cordoned{node.spec.cordon_reason and ' (' + node.spec.cordon_reason + ')'}"
    if live is None or not live.connected:
        return "its agent is not connected"
    if not live.reported:
        return "its agent has not yet reported what runs there"
    missing = [
        f"{key}={value}" for key, value in sorted(spec.placement.items()) if node.observed.labels.get(key) != value
    ]
    if missing:
        return f"it lacks the label {', '.join(missing)}"
    if tp > gpus:
        return f"it has {gpus} GPUs, tensor_parallel_size is {tp}"
    if slots(gpus, tp)[1]:
        return f"tensor_parallel_size {tp} does not divide its {gpus} GPUs (remainder {slots(gpus, tp)[1]})"
    if len(free) < tp:
        return f"{len(free)} of its {gpus} GPUs are free, {tp} are needed"
    for key, amount in sorted(spec.resources.items()):
        left = node.observed.resources.get(key, 0) - sum(_takes(worker, key, pools) for worker in held)
        if left < amount:
            return f"{left} {key} are left, {amount} are needed"
    return None


def _takes(worker: Worker, key: str, pools: Mapping[str, Pool]) -> int:
    pool = pools.get(worker.pool)
    return pool.spec.resources.get(key, 0) if pool is not None else 0


def _cut(node: Node, free: tuple[str, ...], size: int) -> tuple[str, ...]:
    """GPUs that NVLink joins where there are enough: an aligned block of one group, else any of the group that has
    the fewest free. Without them an aligned block (neighbours often share the fast links, and blocks do not fragment),
    else the first."""
    group = {gpu.id: gpu.link_group for gpu in node.observed.gpus}
    ids, available = list(group), set(free)
    aligned = [tuple(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    blocks = [block for block in aligned if available.issuperset(block)]
    joined = [block for block in blocks if group[block[0]] and len({group[gpu] for gpu in block}) == 1]
    if joined and size > 1:
        return joined[0]
    by_group: dict[str, list[str]] = {}
    for gpu in free:
        if group.get(gpu):
            by_group.setdefault(group[gpu], []).append(gpu)
    enough = [members for members in by_group.values() if len(members) >= size]
    if enough and size > 1:
        return tuple(min(enough, key=len)[:size])
    return blocks[0] if blocks else free[:size]
