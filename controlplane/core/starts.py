"""Starts: a slice and a record for a new engine, deadlines, failed starts and their back-off."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.nodes.facts import trace_on_node
from controlplane.core.placement import CannotPlace, Slice, place
from controlplane.core.sleeping import lendable
from controlplane.core.tracing import traceparent_for
from controlplane.core.worker import Cause, can
from springtide.model.enums import Phase, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker, WorkerIntent


def check_deadlines(draft: Draft) -> None:
    """A start that missed its deadline is given up: STOP is sent, and its slice is free when the node says so."""
    for worker in [worker for worker in draft.workers.values() if worker.state is State.STARTING]:
        if draft.full:
            return
        deadline = worker.intent.deadline
        if deadline is None:
            continue
        deadline += _slot_wait_s(draft, worker)
        if draft.now < deadline:
            draft.wake(deadline)
            continue
        asked = (worker.intent.deadline or deadline) - worker.intent.state_since
        start_failed(draft, worker, "START_TIMEOUT", f"not ready within {asked:g} s; it was {worker.intent.phase}")


def _slot_wait_s(draft: Draft, worker: Worker) -> float:
    """Its node starts others first: this wait is no part of the start that the deadline bounds."""
    live = draft.live(worker.intent.node_id)
    report = live.reports.get(worker.worker_id) if live is not None else None
    return report.slot_wait_s if report is not None and report.generation == worker.intent.generation else 0.0


def start_failed(draft: Draft, worker: Worker, reason: str, message: str) -> Worker:
    """STARTING -> INACTIVE/FAILED, with the next attempt's time while there are attempts left. A cooldown that this
    start consumed is given back."""
    pool = draft.pools.get(worker.pool)
    attempts = worker.intent.attempts + 1
    next_attempt_at = None
    if pool is not None and attempts < pool.spec.max_start_attempts:
        next_attempt_at = draft.now + backoff_s(draft, attempts)
    if pool is not None and pool.intent.last_scale_up_at == worker.intent.state_since:
        draft.pool_intent(pool, last_scale_up_at=None)
    failed = draft.step(
        worker,
        Cause.FAIL,
        reason=reason,
        message=message,
        attempts=attempts,
        next_attempt_at=next_attempt_at,
        crashes=0,
    )
    draft.worker_event(failed, "worker_failed", "inactive")
    return failed


def crash_backoff(draft: Draft, worker: Worker, *, limited: bool = False) -> dict[str, float | int | None]:
    """The first crash is answered at once; one that follows soon after the last start waits longer each time.
    `limited`: its engine is to blame, and a loop of crashes runs out of attempts as failed starts do."""
    pool = draft.pools.get(worker.pool)
    most = pool.spec.max_start_attempts if pool is not None else 2
    attempts = min(worker.intent.attempts + 1, most if limited else max(most - 1, 1))
    wait_s = 0.0
    if attempts > 1:
        wait_s = min(draft.timing.start_backoff_s * 2 ** (attempts - 2), draft.timing.start_backoff_max_s)
    spent = limited and attempts >= max(most, 2)
    return {
        "attempts": attempts,
        "crashes": min(worker.intent.crashes, worker.intent.attempts) + 1,
        "next_attempt_at": None if spent else draft.now + wait_s,
    }


def in_crash_loop(worker: Worker) -> bool:
    """It has become ACTIVE and ended soon after, more than once in a row."""
    return min(worker.intent.crashes, worker.intent.attempts) >= 2


def backoff_s(draft: Draft, attempts: int) -> float:
    """Seconds to wait after so many failed starts in a row."""
    return min(draft.timing.start_backoff_s * 2.0 ** (attempts - 1), draft.timing.start_backoff_max_s)


def is_failing(worker: Worker) -> bool:
    """It failed, and keeps the place of a worker of the desired count: it waits for its next attempt, or has none
    left."""
    return worker.intent.phase is Phase.FAILED and worker.intent.attempts > 0 and not worker.intent.held


def is_exhausted(worker: Worker, pool: Pool) -> bool:
    """No attempt is left; only an operator starts it again."""
    return (
        is_failing(worker)
        and worker.intent.next_attempt_at is None
        and worker.intent.attempts >= pool.spec.max_start_attempts
    )


def is_due(worker: Worker, now: float) -> bool:
    """A failed one whose next attempt may begin."""
    at = worker.intent.next_attempt_at
    return is_failing(worker) and at is not None and at <= now and can(worker, Cause.START)


def find_slice(draft: Draft, pool: Pool, avoid: str = "") -> Slice | CannotPlace:
    """Free GPUs first; where there are none, those of sleepers that may be borrowed."""
    prefer, live = draft.preferences.get(pool.name), draft.snapshot.live.nodes
    found = place(pool.spec, draft.nodes, draft.workers, draft.pools, live, avoid, prefer)
    if isinstance(found, CannotPlace) and (lent := lendable(draft.workers, draft.pools, live)):
        borrowed = place(pool.spec, draft.nodes, draft.workers, draft.pools, live, avoid, prefer, lent)
        return borrowed if isinstance(borrowed, Slice) else found
    return found


def start(
    draft: Draft, pool: Pool, worker: Worker | None, reason: str, message: str, *, spare: bool = False
) -> Worker | CannotPlace:
    """Starts `worker`, or a new record when None; a `spare` ends asleep. The pool is re-read and written when a number
    is taken."""
    avoid = worker.intent.node_id if worker is not None and worker.intent.attempts > 0 else ""
    found = find_slice(draft, pool, avoid)
    if isinstance(found, CannotPlace):
        return found
    if worker is None:
        worker = _new_record(draft, pool)
    intent = pool.intent
    started = draft.step(
        worker,
        Cause.START,
        reason=reason,
        message=message,
        node_id=found.node_id,
        gpu_ids=found.gpu_ids,
        deadline=draft.now + pool.spec.start_timeout_s,
        weight_version=intent.weight_version,
        weight_source=intent.weight_source,
        traceparent=trace_on_node(draft, draft.nodes[found.node_id], trace_for_next(draft, worker), pool.name),
        spare=spare,
        sleep_level=pool.spec.sleep_level if spare else 0,
    )
    draft.worker_event(started, "spare_start" if spare else "scale_up_start", "scaling_up")
    draft.wake(started.intent.deadline)
    return started


def _new_record(draft: Draft, pool: Pool) -> Worker:
    """An id that a node still reports is left alone: it is a worker of a pool that was deleted and made again."""
    number = draft.pools[pool.name].intent.next_worker_number
    lives = draft.snapshot.live.nodes.values()
    while (name := f"{pool.name}-{number}") in draft.workers or any(name in live.reports for live in lives):
        number += 1
    draft.pool_intent(draft.pools[pool.name], next_worker_number=number + 1)
    return Worker(f"{pool.name}-{number}", pool.name, WorkerIntent(phase=Phase.STOPPED, state_since=draft.now))


def trace_for_next(draft: Draft, worker: Worker) -> str:
    """The trace of the scaling event that begins with the worker's next generation."""
    snapshot = draft.snapshot
    return traceparent_for(snapshot.store_id, snapshot.revision, worker.worker_id, worker.intent.generation + 1)


def cancel(draft: Draft, worker: Worker, reason: str, message: str, *, held: bool = False) -> Worker:
    """STARTING -> INACTIVE/STOPPED; the node is told to stop what it has begun. One that was asleep sleeps again."""
    pool = draft.pools.get(worker.pool)
    if worker.intent.waking and pool is not None and not pool.intent.deleting:
        dozing = draft.step(worker, Cause.DOZE, reason=reason, message=message, held=held)
        draft.worker_event(dozing, "wake_cancelled", "inactive")
        return dozing
    cancelled = draft.step(
        worker, Cause.CANCEL, reason=reason, message=message, held=held, attempts=0, next_attempt_at=None
    )
    draft.worker_event(cancelled, "start_cancelled", "inactive")
    return cancelled


def settle(draft: Draft) -> None:
    """A worker that has been active for long has made good for its failed starts."""
    for worker in [w for w in draft.workers.values() if w.intent.attempts > 0 and w.state is State.ACTIVE]:
        if draft.full:
            return
        at = worker.intent.state_since + draft.timing.start_backoff_max_s
        if draft.now >= at:
            draft.step(worker, Cause.SETTLE)
        else:
            draft.wake(at)


def forget_attempts(worker: Worker) -> Worker:
    """The worker with a clean record, e.g. after its pool's spec has changed."""
    return dataclasses.replace(worker, intent=dataclasses.replace(worker.intent, attempts=0, next_attempt_at=None))
