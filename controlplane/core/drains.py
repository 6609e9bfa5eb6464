"""Drains: out of the table -> routers acknowledge -> in-flight zero or deadline -> engine idle -> stopped, or put to
sleep -> memory free.

UNROUTING ends when every live router has acknowledged the revision that took the worker out (or a bound has passed)
and the node says that the shim refuses. FINISHING ends when nothing runs any more, or by the pool's drain action at
the deadline. RELEASING ends when the node says that the process is gone and its memory free, or, of a worker that is
to sleep, that its memory is released (observe.py).
"""

from typing import Any

from controlplane.core.draft import Draft
from controlplane.core.policies import make_policy
from controlplane.core.signals import live_routers
from controlplane.core.sleeping import level_of
from controlplane.core.starts import trace_for_next
from controlplane.core.worker import Cause
from springtide.errors import SpringtideError
from springtide.model.enums import DrainAction, Phase, ReportedPhase, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker, WorkerReport

ABORT_S = 5.0  # after an abort, how long the shim may take to answer what it cuts
SLEEP_S = 180.0  # how long an engine may take to give its memory back: weights are copied to the host
RELEASE_SLACK_S = 30.0  # on top of the grace: how long stopping may take before it is ordered without grace
DEFAULT_DRAIN_TIMEOUT_S = 30.0


def drain_timeout_s(pool: Pool | None) -> float:
    """The pool's, else its policy's, else 30 s."""
    if pool is None:
        return DEFAULT_DRAIN_TIMEOUT_S
    if pool.spec.drain_timeout_s > 0:
        return pool.spec.drain_timeout_s
    try:
        return make_policy(pool.spec.policy, pool.spec.min_workers, pool.spec.max_workers).drain_timeout_s
    except SpringtideError:
        return DEFAULT_DRAIN_TIMEOUT_S


def drain(draft: Draft, worker: Worker, reason: str, message: str, **intent: Any) -> Worker:
    """ACTIVE -> DRAINING/UNROUTING. `unrouted_revision` follows once the commit has a number: plan again at once."""
    fields: dict[str, Any] = {
        "deadline": draft.now + drain_timeout_s(draft.pools.get(worker.pool)),
        "traceparent": trace_for_next(draft, worker),
        **intent,
    }
    drained = draft.step(worker, Cause.DRAIN, reason=reason, message=message, **fields)
    draft.worker_event(drained, "scale_down_start", "draining")
    draft.again()
    return drained


def undrain(draft: Draft, worker: Worker, reason: str, message: str) -> Worker:
    """DRAINING -> ACTIVE, before RELEASING."""
    kept = draft.step(worker, Cause.UNDRAIN, reason=reason, message=message, traceparent=trace_for_next(draft, worker))
    draft.worker_event(kept, "drain_cancelled", "active")
    return kept


def progress_drains(draft: Draft) -> None:
    for worker in [worker for worker in draft.workers.values() if worker.state is State.DRAINING]:
        if draft.full:
            return
        _progress(draft, worker)


def _progress(draft: Draft, worker: Worker) -> None:
    if worker.intent.phase is Phase.UNROUTING:
        worker = _unroute(draft, worker)
    if worker.intent.phase is Phase.FINISHING:
        worker = _finish(draft, worker)
    if worker.intent.phase is Phase.RELEASING:
        _watch_release(draft, worker)


def _unroute(draft: Draft, worker: Worker) -> Worker:
    intent = worker.intent
    if intent.unrouted_revision is None:
        committed = draft.snapshot.workers.get(worker.worker_id)
        if committed is None or committed.state is not State.DRAINING or not committed.revision:
            draft.again()  # ordered in this very plan: its revision is not known yet
            return worker
        worker = draft.set_intent(worker, unrouted_revision=committed.revision)
        intent = worker.intent
    give_up_at = intent.phase_since + draft.timing.ack_timeout_s
    acknowledged = all(
        router.acked_revision >= (intent.unrouted_revision or 0) for router in live_routers(draft.snapshot, draft.now)
    )
    overdue = intent.deadline is not None and draft.now >= intent.deadline
    if not acknowledged and draft.now < give_up_at:
        draft.wake(give_up_at)
        return worker
    if not overdue and not refuses(draft, worker):
        draft.wake(intent.deadline)
        return worker
    return draft.step(worker, Cause.UNROUTED, reason=intent.reason, message=intent.message)


def refuses(draft: Draft, worker: Worker) -> bool:
    """The node says that the shim refuses new requests, on the order that the record carries now."""
    report = _current_report(draft, worker)
    return report is not None and report.phase in (ReportedPhase.DRAINING, ReportedPhase.STOPPING)


def is_idle(draft: Draft, worker: Worker) -> bool:
    """Nothing runs in the shim nor in the engine. Unknown is not idle."""
    report = _current_report(draft, worker)
    return report is not None and report.in_flight == 0 and report.engine_idle


def _current_report(draft: Draft, worker: Worker) -> WorkerReport | None:
    report = draft.report_of(worker)
    if (
        report is None
        or report.incarnation < worker.observed.incarnation
        or report.generation < worker.intent.generation
    ):
        return None
    return report


def _finish(draft: Draft, worker: Worker) -> Worker:
    intent = worker.intent
    if refuses(draft, worker) and is_idle(draft, worker):
        return _release(draft, worker, "idle" if not intent.abort_in_flight else "what was left has been cut")
    if intent.deadline is None:
        return worker
    if draft.now < intent.deadline:
        draft.wake(intent.deadline)
        return worker
    if intent.abort_in_flight:
        return _release(draft, worker, "cut, but not yet answered")
    return _apply_action(draft, worker)


def _apply_action(draft: Draft, worker: Worker) -> Worker:
    pool = draft.pools.get(worker.pool)
    action = pool.spec.drain_action if pool is not None else DrainAction.ABORT
    left = _left(draft, worker)
    if action is DrainAction.KILL:
        return _release(draft, worker, f"its drain deadline passed with {left}; killed", kill=True)
    if action is DrainAction.WAIT:
        waiting = draft.step(worker, Cause.OVERDUE, reason=worker.intent.reason, message=f"waits on for {left}")
        draft.worker_event(waiting, "drain_overdue", "draining", "DRAIN_OVERDUE")
        return waiting
    aborting = draft.step(
        worker,
        Cause.ABORT,
        reason=worker.intent.reason,
        message=f"its drain deadline passed with {left}; cut with an explicit error",
        deadline=draft.now + ABORT_S,
    )
    draft.worker_event(aborting, "drain_aborted", "draining", "DRAIN_DEADLINE")
    draft.wake(aborting.intent.deadline)
    return aborting


def _left(draft: Draft, worker: Worker) -> str:
    report = draft.report_of(worker)
    if report is None or report.in_flight is None:
        return "an unknown number of requests running"
    return f"{report.in_flight} requests running"


def _release(draft: Draft, worker: Worker, message: str, *, kill: bool = False) -> Worker:
    pool = draft.pools.get(worker.pool)
    grace_s = pool.spec.stop_grace_s if pool is not None else 0.0
    level, why_not = (0, "") if kill else level_of(draft, worker)
    deadline = None if kill else draft.now + grace_s + RELEASE_SLACK_S + (SLEEP_S if level else 0.0)
    released = draft.step(
        worker,
        Cause.RELEASE,
        reason=worker.intent.reason,
        message=f"{message}; stopped, not put to sleep: {why_not}" if why_not else message,
        kill=kill,
        deadline=deadline,
        sleep_level=level,
    )
    draft.wake(deadline)
    return released


def _watch_release(draft: Draft, worker: Worker) -> None:
    deadline = worker.intent.deadline
    if deadline is None:
        return
    if draft.now < deadline:
        draft.wake(deadline)
        return
    forced = draft.step(worker, Cause.ESCALATE, reason=worker.intent.reason, message="stopping took too long; killed")
    draft.worker_event(forced, "release_overdue", "draining", "RELEASE_OVERDUE")
