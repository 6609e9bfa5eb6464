"""Who sleeps instead of being stopped, which sleepers wake first, and whose GPUs are lent meanwhile.

A sleeping worker keeps its slice. With the pool's `lend_gpus` a worker of another pool may be placed on it (a loan
shows in nothing but two records with the same GPUs); before the sleeper wakes, the borrower drains and stops, and the
node starts to wake it when the borrower is gone. An operator may lend a sleeper's GPUs to a job outside (`lent_to`):
then it neither wakes nor gives its slice away before they are claimed back.
"""

from collections.abc import Iterable, Mapping

from controlplane.core.draft import Draft
from controlplane.core.signals import is_leaving
from controlplane.core.snapshot import NodeLive
from controlplane.core.worker import id_order
from springtide.model.enums import NodeState, Phase, ReportedPhase, ScaleDown, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker


def wanted_level(draft: Draft, pool: Pool) -> int:
    """The level at which the next worker that scaling takes out shall sleep; 0: it is stopped."""
    spec = pool.spec
    if pool.intent.deleting:
        return 0
    if spec.scale_down is not ScaleDown.STOP or len(spares_of(draft, pool)) < spec.spares:
        return spec.sleep_level
    return 0


def spares_of(draft: Draft, pool: Pool) -> list[Worker]:
    """Sleepers that may be woken, and those that will be: starts that end asleep, drains that do."""
    return [worker for worker in draft.workers_of(pool.name) if is_spare(worker) or _becomes_spare(worker)]


def is_spare(worker: Worker) -> bool:
    """Asleep, and the loop may wake it."""
    return worker.asleep and not worker.intent.held and not worker.intent.lent_to


def _becomes_spare(worker: Worker) -> bool:
    intent = worker.intent
    drains = intent.state is State.DRAINING and intent.sleep_level > 0 and not intent.held and not intent.kill
    return drains or (intent.state is State.STARTING and intent.spare)


def level_of(draft: Draft, worker: Worker) -> tuple[int, str]:
    """(level at which a worker that is idle now shall sleep, 0 for a stop; why it is stopped although it was to
    sleep)."""
    level = worker.intent.sleep_level
    if not level:
        return 0, ""
    node = draft.nodes.get(worker.intent.node_id)
    lacking = worker.observed.missing_verbs.get("release") if worker.observed.verbs_known else None
    if lacking is not None:
        return 0, f"its engine cannot release memory without {lacking}"
    if node is None or node.state is not NodeState.UP:
        return 0, "its node leaves"
    if sharers(worker, draft.workers.values()):
        return 0, "its GPUs are borrowed"
    return level, ""


def wakeable(draft: Draft, pool: Pool) -> list[Worker]:
    """Sleepers in the order in which they are woken: on GPUs that nobody borrows, with the pool's weights, the last
    one that fell asleep."""

    def rank(worker: Worker) -> tuple[bool, bool, float, tuple[str, int, str]]:
        behind = worker.observed.weight_version != pool.intent.weight_version
        borrowed = bool(sharers(worker, draft.workers.values()))
        return borrowed, behind, -worker.intent.state_since, id_order(worker.worker_id)

    found = [worker for worker in draft.workers_of(pool.name) if is_spare(worker) and _is_reachable(draft, worker)]
    return sorted(found, key=rank)


def _is_reachable(draft: Draft, worker: Worker) -> bool:
    node, live = draft.nodes.get(worker.intent.node_id), draft.live(worker.intent.node_id)
    stays = not is_leaving(worker, draft.nodes)
    up = stays and node is not None and node.state is NodeState.UP and not node.spec.cordoned
    return up and live is not None and live.connected and live.reported


def sharers(worker: Worker, workers: Iterable[Worker]) -> list[Worker]:
    """Other workers whose records hold one of its GPUs."""
    mine = set(worker.intent.gpu_ids)
    return [
        other
        for other in workers
        if other.worker_id != worker.worker_id
        and other.intent.node_id == worker.intent.node_id
        and not mine.isdisjoint(other.intent.gpu_ids)
    ]


def is_claimed(draft: Draft, worker: Worker) -> bool:
    """It runs on borrowed GPUs whose owner wakes: its drain is not cancelled."""
    return any(other.intent.waking for other in sharers(worker, draft.workers.values()))


def lendable(
    workers: Mapping[str, Worker], pools: Mapping[str, Pool], live: Mapping[str, NodeLive]
) -> dict[str, frozenset[str]]:
    """By node: GPUs that sleepers of lending pools hold alone, and that their node says are released."""
    holders: dict[tuple[str, str], list[Worker]] = {}
    for worker in workers.values():
        for gpu_id in worker.intent.gpu_ids:
            holders.setdefault((worker.intent.node_id, gpu_id), []).append(worker)
    found: dict[str, set[str]] = {}
    for (node_id, gpu_id), held in holders.items():
        if len(held) == 1 and _lends(held[0], pools, live):
            found.setdefault(node_id, set()).add(gpu_id)
    return {node_id: frozenset(gpu_ids) for node_id, gpu_ids in found.items()}


def _lends(worker: Worker, pools: Mapping[str, Pool], live: Mapping[str, NodeLive]) -> bool:
    pool, node = pools.get(worker.pool), live.get(worker.intent.node_id)
    if pool is None or not pool.spec.lend_gpus or not worker.asleep or worker.intent.lent_to or node is None:
        return False
    report = node.reports.get(worker.worker_id)
    return (
        report is not None
        and report.phase is ReportedPhase.SLEEPING
        and report.generation >= worker.intent.generation
        and worker.intent.phase is Phase.SLEEPING
    )
