"""Whom a scale-down takes: overdue or failed starts, starts, SUSPECT, stale weights, then least in-flight; among equals
whoever empties a node that can be given back; ties by id.

Two things are never taken: a start while requests wait and nothing is ACTIVE (unless it is one too many for the pool's
upper bound, and another start remains), and the last worker that is able to serve what waits.
"""

from collections.abc import Mapping

from controlplane.core.draft import Draft
from controlplane.core.signals import in_flight_of, waiting_of
from controlplane.core.supply import demands_of, offers_of
from controlplane.core.worker import id_order
from springtide.model.enums import Condition, Phase, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker

_UNKNOWN_IN_FLIGHT = 1 << 62  # a worker whose load is unknown is not taken for idle


def choose_victim(draft: Draft, pool: Pool, candidates: list[Worker], *, spare_waiting: bool = True) -> Worker | None:
    """The next worker to take out of `candidates` (STARTING and ACTIVE ones of the pool), None when none may be taken.
    `spare_waiting` False drops the two exceptions: for a pool that is deleted."""
    allowed = candidates
    if spare_waiting and waiting_of(draft.snapshot, pool.name, draft.now)[1] > 0:
        serving = [worker for worker in draft.workers_of(pool.name) if worker.routable]
        if not serving:
            starts = [worker for worker in allowed if worker.state is State.STARTING]
            over = len(candidates) > pool.spec.max_workers and len(starts) > 1
            allowed = allowed if over else [worker for worker in allowed if worker.state is not State.STARTING]
        else:
            last = _last_able(draft, pool, serving)
            allowed = [worker for worker in allowed if worker.worker_id not in last]
    crowds = _crowds(draft, allowed)
    return min(allowed, key=lambda worker: _rank(draft, pool, worker, crowds), default=None)


def _crowds(draft: Draft, workers: list[Worker]) -> dict[str, int]:
    """By node: workers that keep it from being given back. Nodes that nobody takes back come last."""
    held: dict[str, int] = {}
    for worker in draft.workers.values():
        if worker.intent.gpu_ids and worker.state is not State.DRAINING:
            held[worker.intent.node_id] = held.get(worker.intent.node_id, 0) + 1
    found: dict[str, int] = {}
    for node_id in {worker.intent.node_id for worker in workers}:
        node = draft.nodes.get(node_id)
        returnable = node is not None and node.provided is not None and not node.provided.fixed
        found[node_id] = held.get(node_id, 0) if returnable else 1 << 30
    return found


def _last_able(draft: Draft, pool: Pool, serving: list[Worker]) -> set[str]:
    """Workers that are the only ones to serve some requests: by what these need, where routers tell."""
    asked = [demand.needs for demand in demands_of(draft.snapshot, pool.name, draft.now) if demand.tasks]
    found: set[str] = set()
    for needs in asked or [frozenset[str]()]:
        able = [worker for worker in serving if not needs or needs <= _offers(draft, pool, worker)]
        if len(able) == 1:
            found.add(able[0].worker_id)
    return found


def _offers(draft: Draft, pool: Pool, worker: Worker) -> frozenset[str]:
    node = draft.nodes.get(worker.intent.node_id)
    return offers_of(node, pool) if node is not None else frozenset()


def _rank(
    draft: Draft, pool: Pool, worker: Worker, crowds: Mapping[str, int]
) -> tuple[int, int, int, tuple[str, int, str]]:
    """The state first, then least in-flight; among equals whoever empties a node that can be given back, then the
    id."""
    order = crowds[worker.intent.node_id], id_order(worker.worker_id)
    intent = worker.intent
    if worker.state is State.STARTING:
        overdue = intent.attempts > 0 or (intent.deadline is not None and draft.now >= intent.deadline)
        if intent.phase is Phase.ADOPTING:
            return 2, 0, *order  # an engine that is already loaded is worth more than any other start
        return (0 if overdue else 1), 0, *order
    in_flight = in_flight_of(draft.snapshot, worker, draft.now)
    load = _UNKNOWN_IN_FLIGHT if in_flight is None else in_flight
    if intent.condition is Condition.SUSPECT:
        return 3, load, *order
    wanted = pool.intent.weight_version
    if wanted and worker.observed.weight_version != wanted:
        return 4, load, *order
    return 5, load, *order
