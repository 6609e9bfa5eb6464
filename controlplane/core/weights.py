"""Weight versions: which workers change when, so that the pool keeps serving.

A pool's wanted version is recorded first. Workers that start or wake join with it only. An ACTIVE one that is behind
serves on until its turn (with a barrier it serves nothing from the order on): its admission is PAUSED, what runs ends
or is cut at the drain time-out, its node changes the weights, and it is opened when it reports the version. One that
does not get there in time is killed and replaced.
"""

from controlplane.core.draft import Draft
from controlplane.core.drains import drain_timeout_s
from controlplane.core.signals import in_flight_of
from controlplane.core.starts import crash_backoff, trace_for_next
from controlplane.core.worker import Cause, id_order
from springtide.model.enums import Admission, Condition, ReportedPhase, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker

UPDATING = "WEIGHT_UPDATE"
_UNKNOWN_IN_FLIGHT = 1 << 62


def is_behind(worker: Worker, pool: Pool) -> bool:
    """It serves another version than the pool wants."""
    wanted = pool.intent.weight_version
    return bool(wanted) and worker.observed.weight_version != wanted


def is_updating(worker: Worker) -> bool:
    """Its admission is paused for new weights."""
    return worker.intent.admission is Admission.PAUSED and worker.intent.paused_reason == UPDATING


def tend_weights(draft: Draft) -> None:
    """One pool after the other."""
    for name in sorted(draft.pools):
        pool = draft.pools[name]
        if draft.full:
            return
        if pool.intent.weight_source and not pool.intent.deleting:
            _tend_pool(draft, pool)


def _tend_pool(draft: Draft, pool: Pool) -> None:
    for found in draft.workers_of(pool.name):
        if draft.full:
            return
        worker = found
        held = worker.state is State.ACTIVE and worker.intent.admission is Admission.PAUSED
        stale = worker.intent.weight_version != pool.intent.weight_version
        if stale and (held or (worker.state is State.STARTING and not worker.intent.spare)):
            worker = draft.step(worker, Cause.REWEIGH, **_wanted(pool))
        if worker.state is State.ACTIVE and is_updating(worker):
            _progress(draft, pool, worker)
    for worker in _next(draft, pool):
        if draft.full:
            return
        _begin(draft, pool, worker)


def _wanted(pool: Pool) -> dict[str, str]:
    return {"weight_version": pool.intent.weight_version, "weight_source": pool.intent.weight_source}


def _next(draft: Draft, pool: Pool) -> list[Worker]:
    """Those whose turn it is, the least loaded first."""
    active = [worker for worker in draft.workers_of(pool.name) if worker.state is State.ACTIVE]
    behind = [worker for worker in active if worker.routable and is_behind(worker, pool)]
    if pool.intent.weight_barrier:
        return behind
    behind = [worker for worker in behind if worker.intent.condition is Condition.HEALTHY]
    updating = sum(1 for worker in active if is_updating(worker))
    routable = sum(1 for worker in active if worker.routable)
    alone = routable == 1 and not updating  # nobody else will serve soon: requests wait for it
    spare = routable if alone else routable - 1
    turns = max(0, min(pool.spec.max_weight_updates - updating, spare))

    def rank(worker: Worker) -> tuple[int, tuple[str, int, str]]:
        load = in_flight_of(draft.snapshot, worker, draft.now)
        return _UNKNOWN_IN_FLIGHT if load is None else load, id_order(worker.worker_id)

    return sorted(behind, key=rank)[:turns]


def _begin(draft: Draft, pool: Pool, worker: Worker) -> None:
    deadline = draft.now + drain_timeout_s(pool)
    paused = draft.step(
        worker,
        Cause.PAUSE,
        paused_reason=UPDATING,
        paused_until=None,
        deadline=deadline,
        traceparent=trace_for_next(draft, worker),
        **_wanted(pool),
    )
    told = f"{worker.observed.weight_version or 'its first weights'} -> {pool.intent.weight_version}"
    draft.worker_event(paused, "weights_start", "active", UPDATING, told)
    draft.wake(deadline)


def _progress(draft: Draft, pool: Pool, worker: Worker) -> None:
    if not is_behind(worker, pool):
        report = draft.report_of(worker)
        if report is not None and report.phase is ReportedPhase.PAUSED:
            opened = draft.step(worker, Cause.OPEN)
            told = f"serves {pool.intent.weight_version}"
            draft.worker_event(opened, "weights_complete", "active", UPDATING, told)
        return
    deadline = worker.intent.deadline
    if deadline is None:
        return
    if draft.now < deadline:
        draft.wake(deadline)
    elif not worker.intent.abort_in_flight:
        end = draft.now + pool.spec.start_timeout_s
        draft.step(worker, Cause.PAUSE, paused_reason=UPDATING, abort_in_flight=True, deadline=end)
        draft.wake(end)
    else:
        told = f"it did not serve {pool.intent.weight_version} within {pool.spec.start_timeout_s:g} s"
        dead = draft.step(
            worker, Cause.FAIL, reason="WEIGHTS_TIMEOUT", message=told, kill=True, **crash_backoff(draft, worker)
        )
        draft.worker_event(dead, "worker_failed", "inactive")
