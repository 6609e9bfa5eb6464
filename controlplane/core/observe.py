"""What nodes report becomes what the records say: facts are folded in, starts progress, ends are learned.

The fence: a report of an older incarnation or generation moves nothing, except that an end is an end
(worker.tells_end).
"""

import dataclasses
from typing import Any

from controlplane.core.draft import Draft
from controlplane.core.fences import has_ended, is_current, tells_end
from controlplane.core.lease import lose
from controlplane.core.starts import crash_backoff, start_failed
from controlplane.core.worker import Cause, can, holds_slice
from springtide.model.enums import NodeState, Phase, ReportedPhase, State
from springtide.model.worker import Worker, WorkerReport

_PROGRESS = {
    ReportedPhase.BOOTING: Cause.BOOTED,
    ReportedPhase.LOADING: Cause.LOADING,
    ReportedPhase.SYNCING_WEIGHTS: Cause.SYNCING,
    ReportedPhase.WARMING: Cause.WARMING,
}


def observe_workers(draft: Draft) -> None:
    """One worker after the other; each change is small, so a full batch stops between two of them."""
    for worker in [w for w in draft.workers.values() if w.state is not State.INACTIVE or holds_slice(w)]:
        if draft.full:
            return
        report = draft.report_of(worker)
        if report is not None:
            _observe(draft, _caught_up(draft, worker, report), report)
        elif _is_absent(draft, worker):
            _observe_absence(draft, worker)
        _leave_gone_node(draft, draft.workers[worker.worker_id])


def _caught_up(draft: Draft, worker: Worker, report: WorkerReport) -> Worker:
    """A node that has acted on a later generation than the records know (a store restored from a backup) would refuse
    every order: the record goes past it. The one case in which a generation grows without a new wish."""
    if report.generation <= worker.intent.generation:
        return worker
    draft.note(f"{worker.worker_id}: its node is at generation {report.generation}, not {worker.intent.generation}")
    return draft.set_intent(worker, generation=report.generation + 1)


def _observe(draft: Draft, worker: Worker, report: WorkerReport) -> None:
    if tells_end(worker, report):
        _observe_end(draft, fold(worker, report), report)
    elif report.incarnation < worker.observed.incarnation or has_ended(report):
        return
    elif worker.state is State.STARTING:
        _observe_start(draft, worker, report)
    elif report.phase is ReportedPhase.SLEEPING and is_current(worker, report) and can(worker, Cause.SLEPT):
        _observe_sleep(draft, fold(worker, report))
    elif worker.state is State.ACTIVE and report.incarnation > worker.observed.incarnation:
        lose(
            draft,
            worker,
            "INCARNATION_CHANGED",
            f"incarnation {report.incarnation} runs, not {worker.observed.incarnation}",
        )
    elif worker.state is not State.INACTIVE or (worker.asleep and report.phase is ReportedPhase.SLEEPING):
        folded = fold(worker, report)
        if folded is not worker:
            draft.put(folded)


def _observe_sleep(draft: Draft, worker: Worker) -> None:
    freed = worker.observed.freed_bytes
    told = "asleep" if freed is None else f"asleep; {freed / 2**20:.0f} MiB are free"
    slept = draft.step(worker, Cause.SLEPT, reason=worker.intent.reason, message=told)
    draft.worker_event(slept, "scale_down_complete" if worker.state is State.DRAINING else "spare_ready", "sleeping")


def fold(worker: Worker, report: WorkerReport) -> Worker:
    """Keeps the facts that are worth a commit."""
    seen = worker.observed
    facts: dict[str, Any] = {
        "incarnation": max(report.incarnation, seen.incarnation),
        "generation": max(report.generation, seen.generation),
        "phase": report.phase,
        "endpoint": report.endpoint or seen.endpoint,
        "max_in_flight": report.max_in_flight or seen.max_in_flight,
        "exit": report.exit or seen.exit,
        "log_path": report.log_path or seen.log_path,
        "weight_version": report.weight_version or seen.weight_version,
        "launch_fingerprint": report.launch_fingerprint or seen.launch_fingerprint,
        "freed_bytes": seen.freed_bytes if report.freed_bytes is None else report.freed_bytes,
        "reoccupied_bytes": seen.reoccupied_bytes if report.reoccupied_bytes is None else report.reoccupied_bytes,
        "missing_verbs": report.missing_verbs if report.verbs_known else seen.missing_verbs,
        "verbs_known": report.verbs_known or seen.verbs_known,
        "start_phases_s": report.start_phases_s or seen.start_phases_s,
        "confinement": report.confinement or seen.confinement,
    }
    for name, value in facts.items():
        if getattr(seen, name) != value:
            return dataclasses.replace(worker, observed=dataclasses.replace(seen, **facts))
    return worker


def _observe_start(draft: Draft, worker: Worker, report: WorkerReport) -> None:
    adopting = worker.intent.phase is Phase.ADOPTING
    if not is_current(worker, report) and not adopting and report.incarnation == worker.observed.incarnation:
        return  # still the engine of before this start
    worker = fold(worker, report)
    draft.put(worker)
    if not is_current(worker, report):
        return
    if report.phase is ReportedPhase.SLEEPING and can(worker, Cause.SLEPT):
        _observe_sleep(draft, worker)
        return
    if report.phase is ReportedPhase.READY and _weights_current(draft, worker, report):
        active = draft.step(worker, Cause.READY, reason="READY", message=f"ready at {worker.observed.endpoint}")
        draft.worker_event(active, "worker_adopted" if adopting else "scale_up_complete", "active")
        return
    cause = _PROGRESS.get(report.phase)
    if cause is not None and can(worker, cause):
        draft.step(worker, cause, reason=worker.intent.reason, message=worker.intent.message)


def _weights_current(draft: Draft, worker: Worker, report: WorkerReport) -> bool:
    pool = draft.pools.get(worker.pool)
    wanted = pool.intent.weight_version if pool is not None else ""
    return not wanted or report.weight_version == wanted


def _observe_end(draft: Draft, worker: Worker, report: WorkerReport) -> None:
    exit_info = report.exit
    reason = (exit_info.reason if exit_info is not None else "") or "ENGINE_EXITED"
    message = exit_info.message if exit_info is not None else ""
    if worker.state is State.STARTING:
        draft.put(worker)
        failed = start_failed(draft, worker, reason, message or "the engine ended before it was ready")
        draft.step(failed, Cause.FREE)
    elif worker.state is State.ACTIVE:
        asked = worker_node_leaves(draft, worker)
        failed = draft.step(
            worker,
            Cause.FAIL,
            reason="NODE_STOPPING" if asked and report.phase is ReportedPhase.STOPPED else reason,
            message=message or "the engine ended while it was active",
            **crash_backoff(draft, worker, limited=not asked),
        )
        draft.worker_event(failed, "worker_failed", "inactive")
        draft.step(failed, Cause.FREE)
    elif worker.state is State.DRAINING:
        _observe_end_of_drain(draft, worker, report, reason, message)
    else:
        _observe_end_of_inactive(draft, worker, reason, message)


def _observe_end_of_drain(draft: Draft, worker: Worker, report: WorkerReport, reason: str, message: str) -> None:
    if worker.intent.phase is Phase.RELEASING or report.phase is ReportedPhase.STOPPED:
        awake = worker.intent.sleep_level > 0 and report.phase is ReportedPhase.FAILED  # it was to sleep, and could not
        told = f"stopped instead of put to sleep: {message}" if awake else "stopped; memory free"
        stopped = draft.step(worker, Cause.STOP, reason=reason if awake else worker.intent.reason, message=told)
        draft.worker_event(stopped, "scale_down_complete", "scaling_down")
        return
    failed = draft.step(  # it was to go: an attempt that it was, after an earlier crash, is over and holds no place
        worker,
        Cause.FAIL,
        reason=reason,
        message=message or "the engine ended while it drained",
        attempts=0,
        next_attempt_at=None,
    )
    draft.worker_event(failed, "worker_failed", "inactive")
    draft.worker_event(failed, "scale_down_complete", "scaling_down")
    draft.step(failed, Cause.FREE)


def _observe_end_of_inactive(draft: Draft, worker: Worker, reason: str, message: str = "") -> None:
    if worker.intent.phase is Phase.LOST:
        worker = draft.step(worker, Cause.DISMISS, reason=reason, message="it was lost, and has ended")
    elif worker.asleep:
        worker = draft.step(worker, Cause.FAIL, reason=reason, message=message or "it ended in its sleep")
        draft.worker_event(worker, "worker_failed", "inactive")
    if worker.intent.lent_to:
        return  # its slice is another job's until it is claimed back
    freed = draft.step(worker, Cause.FREE)
    draft.worker_event(freed, "worker_freed", "inactive", message="its node says that its slice is free")


# ------------------------------------------------------------------ absence


def _is_absent(draft: Draft, worker: Worker) -> bool:
    """The node has reported in this session, after the worker's last change by long enough that an order sent then has
    arrived, and does not know the worker. A start that was only just requested may not have reached it."""
    live = draft.live(worker.intent.node_id)
    if live is None or not live.connected or not live.reported or worker.worker_id in live.reports:
        return False
    if worker.intent.phase is Phase.REQUESTED:
        return False
    sure_at = worker.intent.phase_since + draft.timing.suspect_after_s
    if live.last_heard_at >= sure_at:
        return True
    draft.wake(max(sure_at, draft.now + draft.timing.heartbeat_interval_s))  # a heartbeat like the last one is no news
    return False


def _observe_absence(draft: Draft, worker: Worker) -> None:
    message = f"{worker.intent.node_id} does not know it"
    if worker.state is State.STARTING:
        draft.step(start_failed(draft, worker, "NOT_ON_NODE", message), Cause.FREE)
    elif worker.state is State.ACTIVE:
        failed = draft.step(worker, Cause.FAIL, reason="NOT_ON_NODE", message=message, **crash_backoff(draft, worker))
        draft.worker_event(failed, "worker_failed", "inactive")
        draft.step(failed, Cause.FREE)
    elif worker.state is State.DRAINING:
        stopped = draft.step(worker, Cause.STOP, reason="NOT_ON_NODE", message=message)
        draft.worker_event(stopped, "scale_down_complete", "scaling_down")
    else:
        _observe_end_of_inactive(draft, worker, "NOT_ON_NODE")


def worker_node_leaves(draft: Draft, worker: Worker) -> bool:
    """Its node is stopping or gone."""
    node = draft.nodes.get(worker.intent.node_id)
    return node is None or node.state in (NodeState.RELEASING, NodeState.GONE)


def _leave_gone_node(draft: Draft, worker: Worker) -> None:
    """After the last words of an agent that said goodbye have been heard, nothing more will be."""
    node = draft.nodes.get(worker.intent.node_id)
    if (worker.state is not State.INACTIVE or worker.asleep) and (node is None or node.state is NodeState.GONE):
        lose(draft, worker, "NODE_GONE")
