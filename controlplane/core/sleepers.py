"""Sleeping workers: woken before anything is started, kept as spares, stopped when their time is over."""

from controlplane.core.draft import Draft
from controlplane.core.drains import RELEASE_SLACK_S, drain, drain_timeout_s
from controlplane.core.lease import lose
from controlplane.core.placement import CannotPlace
from controlplane.core.signals import is_leaving
from controlplane.core.sleeping import is_spare, sharers, spares_of
from controlplane.core.starts import cancel, is_due, is_failing, start, trace_for_next
from controlplane.core.worker import Cause, can
from springtide.model.enums import NodeState, ScaleDown, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker


def wake(draft: Draft, pool: Pool, worker: Worker, reason: str, message: str) -> Worker:
    """INACTIVE/SLEEPING -> STARTING, on the slice that it kept. Who borrows it leaves first: the claim goes first."""
    borrowed_s = 0.0
    for other in sharers(worker, draft.workers.values()):
        owner = draft.pools.get(other.pool)
        grace_s = owner.spec.stop_grace_s if owner is not None else 0.0
        borrowed_s = max(borrowed_s, drain_timeout_s(owner) + grace_s + RELEASE_SLACK_S)
        told = f"{worker.worker_id} claims its GPUs back"
        if other.state is State.ACTIVE:
            drain(draft, other, "GPU_RECLAIMED", told)
        elif other.state is State.STARTING:
            cancel(draft, other, "GPU_RECLAIMED", told)
    woken = draft.step(
        worker,
        Cause.WAKE,
        reason=reason,
        message=message,
        deadline=draft.now + pool.spec.start_timeout_s + borrowed_s,
        weight_version=pool.intent.weight_version,
        weight_source=pool.intent.weight_source,
        traceparent=trace_for_next(draft, worker),
    )
    draft.worker_event(woken, "scale_up_start", "scaling_up", message=message or "it is woken")
    draft.wake(woken.intent.deadline)
    return woken


def promote(draft: Draft, worker: Worker, pool: Pool) -> Worker:
    """A start that was to end asleep serves instead."""
    promoted = draft.step(
        worker,
        Cause.PROMOTE,
        weight_version=pool.intent.weight_version,
        weight_source=pool.intent.weight_source,
    )
    draft.worker_event(promoted, "spare_promoted", "scaling_up")
    return promoted


def coming_spares(draft: Draft, pool: Pool) -> list[Worker]:
    """Starts that are to end asleep."""
    return [w for w in draft.workers_of(pool.name) if w.state is State.STARTING and w.intent.spare]


def tend_sleepers(draft: Draft) -> None:
    """Each sleeper stays, or is stopped: its pool or node goes, its time is over, or its pool wants none any more."""
    for worker in [worker for worker in draft.workers.values() if worker.asleep]:
        if draft.full:
            return
        _tend(draft, worker)


def _tend(draft: Draft, worker: Worker) -> None:
    pool, node = draft.pools.get(worker.pool), draft.nodes.get(worker.intent.node_id)
    goes = pool is None or pool.intent.deleting
    if node is None or node.state is NodeState.LOST:
        forgotten_at = (node.state_since if node is not None else 0.0) + draft.timing.inactive_retention_s
        if goes or draft.now >= forgotten_at:
            lose(draft, worker, "LEASE_EXPIRED", f"it slept on {worker.intent.node_id}")  # nobody there to stop it
        else:
            draft.wake(forgotten_at)
    elif pool is None or goes:
        retire(draft, worker, "DELETING", "its pool goes")
    elif is_leaving(worker, draft.nodes):
        retire(draft, worker, "NODE_STOPPING", f"{worker.intent.node_id} stops")
    elif is_spare(worker):
        extra = sum(1 for other in draft.workers_of(pool.name) if is_spare(other)) > pool.spec.spares
        if pool.spec.scale_down is ScaleDown.STOP and extra:
            retire(draft, worker, "SLEEP_NOT_WANTED", "the pool stops what it takes out")
        elif pool.spec.scale_down is ScaleDown.SLEEP_THEN_STOP and extra:
            at = worker.intent.phase_since + pool.spec.sleep_stop_after_s
            if draft.now < at:
                draft.wake(at)
            else:
                retire(draft, worker, "SLEPT_LONG", f"asleep for {pool.spec.sleep_stop_after_s:g} s")


def retire(draft: Draft, worker: Worker, reason: str, message: str) -> Worker:
    """INACTIVE/SLEEPING -> INACTIVE/STOPPED; its slice is free when the node says that it is gone."""
    retired = draft.step(worker, Cause.RETIRE, reason=reason, message=message)
    draft.worker_event(retired, "sleeper_stopped", "inactive")
    return retired


def keep_spares(draft: Draft, pool: Pool) -> CannotPlace | None:
    """Starts workers that go to sleep until the pool has its spares; why not, if one cannot be placed. A start that
    failed is tried again after its back-off, and no other in its place."""
    pool = draft.pools[pool.name]
    wanted = 0 if pool.intent.deleting else pool.spec.spares
    spares = spares_of(draft, pool)
    for worker in coming_spares(draft, pool):
        if len(spares) > wanted and not draft.full:
            spares.remove(worker)
            cancel(draft, worker, "SPARE_NOT_WANTED", "the pool keeps fewer spares")
    while len(spares) < wanted and not draft.full:
        workers = draft.workers_of(pool.name)
        failing = [worker for worker in workers if is_failing(worker)]
        due = [worker for worker in failing if is_due(worker, draft.now)]
        if failing and not due:
            return None
        ready = [w for w in workers if can(w, Cause.START) and not w.intent.held and not is_failing(w)]
        candidate = next(iter([*due, *ready]), None)
        started = start(draft, pool, candidate, "SPARE", "kept asleep", spare=True)
        if isinstance(started, CannotPlace):
            return started
        pool = draft.pools[pool.name]
        spares.append(started)
    return None
