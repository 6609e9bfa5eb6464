"""Lost workers whose node is back: adopted while they are wanted, else stopped. What sleeps there sleeps on: its GPUs
may be lent, so it serves again by a wake alone, which claims them first."""

from controlplane.core.aims import Aim, Moves, staying
from controlplane.core.draft import Draft
from controlplane.core.fences import has_ended
from controlplane.core.sleeping import is_claimed
from controlplane.core.starts import trace_for_next
from controlplane.core.worker import Cause
from springtide.model.enums import NodeState, Phase, ReportedPhase, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker, WorkerReport


def settle_lost(draft: Draft, pool: Pool, aim: Aim, moves: Moves) -> None:
    """A lost worker that runs is wanted before any start that is not ready yet: it is loaded already."""
    for worker in draft.workers_of(pool.name):
        if worker.intent.phase is not Phase.LOST or draft.full:
            continue
        report = _word_of(draft, worker)
        if report is None:
            continue
        kept = not pool.intent.deleting and draft.nodes[worker.intent.node_id].state is NodeState.UP
        if kept and worker.intent.sleep_level and report.phase is ReportedPhase.ADOPTING:
            continue  # its agent has yet to see whether it sleeps
        if kept and report.phase is ReportedPhase.SLEEPING and report.incarnation >= worker.observed.incarnation:
            rested = draft.step(worker, Cause.REST, reason="BACK", message="it is back, and sleeps")
            draft.worker_event(rested, "sleeper_back", "sleeping")
        elif _loaded(draft, pool) < aim.target and _adoptable(draft, worker, report):
            adopted = draft.step(
                worker,
                Cause.ADOPT,
                reason="BACK",
                message=f"{worker.intent.node_id} is back and it still runs",
                deadline=draft.now + pool.spec.start_timeout_s,
                traceparent=trace_for_next(draft, worker),
            )
            draft.worker_event(adopted, "adopt_start", "scaling_up")
            moves.grown.append(worker.worker_id)
        else:
            dismissed = draft.step(worker, Cause.DISMISS, reason="NOT_WANTED", message="it is back, but not wanted")
            draft.worker_event(dismissed, "worker_dismissed", "inactive")


def _word_of(draft: Draft, worker: Worker) -> WorkerReport | None:
    """What its node says of it now that it is back; None while it is not."""
    node, live = draft.nodes.get(worker.intent.node_id), draft.live(worker.intent.node_id)
    if node is None or node.state not in (NodeState.UP, NodeState.RELEASING):
        return None
    if live is None or not live.connected or not live.reported:
        return None
    return draft.report_of(worker)


def _loaded(draft: Draft, pool: Pool) -> int:
    return sum(1 for w in staying(draft, pool) if w.state is State.ACTIVE or w.intent.phase is Phase.ADOPTING)


def _adoptable(draft: Draft, worker: Worker, report: WorkerReport) -> bool:
    """Alive on a node that stays, not taken out by an operator, and not on GPUs that their owner claims back. An end
    that is told here is that of an earlier engine (observe.py has taken any other): what was lost never ran."""
    return (
        draft.nodes[worker.intent.node_id].state is NodeState.UP
        and not worker.intent.held
        and not is_claimed(draft, worker)
        and not has_ended(report)
        and report.phase is not ReportedPhase.STOPPING
        and report.incarnation >= worker.observed.incarnation
    )
