"""Where a pool's workers are, what requests ask for, and the pool that it works together with: inputs of policies."""

from collections.abc import Mapping

from controlplane.core.draft import Draft
from controlplane.core.nodes.offers import likely_nodes
from controlplane.core.placement import free_gpus
from controlplane.core.policy import ActiveWorker, Demand, Partner, Supply
from controlplane.core.signals import fresh_reports, is_leaving, live_routers, total
from controlplane.core.sleeping import is_spare
from controlplane.core.snapshot import Snapshot
from springtide.model.enums import NodeState, Role, State
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.worker import Worker

PROVISIONER_LABEL = "provisioner"
DEFAULT_PROVISIONER = "static"
WEIGHT_LABEL = "capacity_weight"
_OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def provisioner_of(node: Node) -> str:
    """Who gives the node: its label `provisioner`."""
    return node.observed.labels.get(PROVISIONER_LABEL, DEFAULT_PROVISIONER)


def offers_of(node: Node, pool: Pool) -> frozenset[str]:
    """The capability keys of a worker there: the names of the node's and the pool's labels and of the node's resources
    (whatever the amount), and gpu; and each label with its value, as requests ask for it: `zone=a`."""
    labels = {**node.observed.labels, **pool.spec.labels}
    gpu = {"gpu"} if node.observed.gpus else set()
    names = {*labels, *node.observed.resources, *gpu} - {PROVISIONER_LABEL, WEIGHT_LABEL}
    return frozenset(names | {f"{name}={value}" for name, value in labels.items()})


def weight_of(node: Node) -> float:
    """What a worker there holds, in standard workers: its label `capacity_weight`; what is no number > 0 reads as 1."""
    try:
        weight = float(node.observed.labels.get(WEIGHT_LABEL, "1"))
    except ValueError:
        return 1.0
    return weight if 0 < weight < 1e6 else 1.0


def keys(text: str) -> frozenset[str]:
    """Capability keys from their comma-joined form."""
    return frozenset(key.strip() for key in text.split(",") if key.strip())


def supplies_of(draft: Draft, pool: Pool, asked: frozenset[str] = frozenset()) -> tuple[Supply, ...]:
    """One per provisioner, set of offered keys and weight, in that order; nodes that the pool's placement rules out are
    none of its supplies. Nodes that differ only in values of labels that nobody asks for (`asked`) are one."""
    nodes: dict[tuple[str, frozenset[str], float], list[Node]] = {}
    coming: dict[str, int] = {}  # by node id: workers that fit on nodes that are, or could be, asked for
    for node in [*(draft.nodes[node_id] for node_id in sorted(draft.nodes)), *likely_nodes(draft, pool.spec, coming)]:
        if node.provided is not None and node.state in (NodeState.GONE, NodeState.REQUESTED):
            continue
        labels = node.observed.labels
        if all(labels.get(key) == value for key, value in pool.spec.placement.items()):
            offers = frozenset(key for key in offers_of(node, pool) if "=" not in key or key in asked)
            nodes.setdefault((provisioner_of(node), offers, weight_of(node)), []).append(node)
    if not nodes:
        return ()
    held: dict[str, list[Worker]] = {}
    for worker in draft.workers.values():
        held.setdefault(worker.intent.node_id, []).append(worker)
    groups = sorted(nodes.items(), key=lambda item: (item[0][0], sorted(item[0][1]), item[0][2]))
    return tuple(_supply(draft, pool, *group, members, held, coming) for group, members in groups)


def _supply(
    draft: Draft,
    pool: Pool,
    provisioner: str,
    offers: frozenset[str],
    weight: float,
    members: list[Node],
    held: dict[str, list[Worker]],
    coming: Mapping[str, int],
) -> Supply:
    own = [worker for node in members for worker in held.get(node.node_id, ()) if worker.pool == pool.name]
    staying = [worker for worker in own if not is_leaving(worker, draft.nodes)]
    active = [worker for worker in staying if worker.state is State.ACTIVE]
    starting = sum(1 for worker in staying if worker.state is State.STARTING and not worker.intent.spare)
    there = [node for node in members if node.node_id not in coming]
    usable = [node for node in there if node.state is NodeState.UP and not node.spec.cordoned]
    room = sum(
        len(free_gpus(node, held.get(node.node_id, ()), draft.live(node.node_id))) // pool.spec.tensor_parallel_size
        for node in usable
    ) + sum(coming.get(node.node_id, 0) for node in members)
    reports = fresh_reports(draft.snapshot, active, draft.now)
    in_flight, _ = total([None if report is None else report.in_flight for report in reports])
    return Supply(
        provisioner=provisioner,
        offers=offers,
        active=len(active),
        starting=starting,
        most=room + len(active) + starting + sum(1 for worker in own if is_spare(worker)),
        online=any(node.state is NodeState.UP for node in members),
        in_flight=in_flight,
        weight=weight,
    )


def active_workers_of(snapshot: Snapshot, workers: list[Worker], now: float) -> tuple[ActiveWorker, ...]:
    """ACTIVE workers with what they last reported, where that is fresh."""
    active = [worker for worker in workers if worker.state is State.ACTIVE]
    return tuple(
        [
            ActiveWorker(worker.worker_id)
            if r is None
            else ActiveWorker(worker.worker_id, r.in_flight, r.engine_running, r.engine_waiting, r.kv_use)
            for worker, r in zip(active, fresh_reports(snapshot, active, now), strict=True)
        ]
    )


def demands_of(snapshot: Snapshot, pool: str, now: float) -> tuple[Demand, ...]:
    """What routers tell apart, summed up. () unless every live router tells."""
    counts: dict[frozenset[str], int] = {}
    for router in live_routers(snapshot, now):
        demand = router.demand.get(pool)
        if demand is None or (not demand.by_needs and demand.waiting):
            return ()
        for text, tasks in demand.by_needs.items():
            counts[keys(text)] = counts.get(keys(text), 0) + tasks
    return tuple(Demand(needs, counts[needs]) for needs in sorted(counts, key=sorted))


def partner_of(draft: Draft, pool: Pool) -> Partner | None:
    """The decode pool of a prefill pool, and the other way round: the same model's, the first by name."""
    wanted = _OTHER_ROLE.get(pool.spec.role)
    if wanted is None:
        return None
    for name in sorted(draft.pools):
        other = draft.pools[name]
        if other.spec.role is wanted and other.spec.model_name == pool.spec.model_name and not other.intent.deleting:
            return Partner(
                name,
                draft.count(name, State.ACTIVE),
                draft.count(name, State.STARTING),
                other.intent.desired_workers,
            )
    return None
