"""Whom a scale-down takes: overdue or failed starts, starts, SUSPECT, stale weights, then least in-flight; ties by id.

Two things are never taken: a start while requests wait and nothing is ACTIVE (unless it is one too many for the pool's
upper bound, and another start remains), and the last worker that is able to serve what waits.
"""

from controlplane.core.draft import Draft
from controlplane.core.signals import in_flight_of, waiting_of
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
        elif len(serving) == 1:
            allowed = [worker for worker in allowed if worker is not serving[0]]
    return min(allowed, key=lambda worker: _rank(draft, pool, worker), default=None)


def _rank(draft: Draft, pool: Pool, worker: Worker) -> tuple[int, int, tuple[str, int, str]]:
    order = id_order(worker.worker_id)
    intent = worker.intent
    if worker.state is State.STARTING:
        overdue = intent.attempts > 0 or (intent.deadline is not None and draft.now >= intent.deadline)
        if intent.phase is Phase.ADOPTING:
            return 2, 0, order  # an engine that is already loaded is worth more than any other start
        return (0 if overdue else 1), 0, order
    in_flight = in_flight_of(draft.snapshot, worker, draft.now)
    load = _UNKNOWN_IN_FLIGHT if in_flight is None else in_flight
    if intent.condition is Condition.SUSPECT:
        return 3, load, order
    wanted = pool.intent.weight_version
    if wanted and worker.observed.weight_version != wanted:
        return 4, load, order
    return 5, load, order
