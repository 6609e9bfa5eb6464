"""The waist: what the leader commits next, as a pure function of what is recorded and heard.

    plan(snapshot, now) -> Plan

Level-triggered: called again with the same snapshot it answers the same; called late it answers what is due by now. The
steps run in the order in which facts become consequences: nodes, reports, deadlines, drains, then each pool.
"""

from controlplane.core.convergence import converge_pools
from controlplane.core.decisions import samples_due, take_samples
from controlplane.core.draft import Draft, silence_at
from controlplane.core.drains import progress_drains
from controlplane.core.lease import tend_nodes
from controlplane.core.nodes.acquire import keep_sets
from controlplane.core.nodes.ends import end_lost_workers
from controlplane.core.nodes.mix import restore_mix
from controlplane.core.nodes.release import release_idle
from controlplane.core.nodes.saga import follow_provisioners
from controlplane.core.observe import observe_workers
from controlplane.core.sleepers import tend_sleepers
from controlplane.core.snapshot import Plan, Snapshot
from controlplane.core.starts import check_deadlines, settle
from controlplane.core.weights import tend_weights
from controlplane.core.worker import Cause, can
from springtide.model.enums import Admission
from springtide.model.worker import Worker


def plan(snapshot: Snapshot, now: float) -> Plan:
    """At most MAX_OPERATIONS writes, decisions and events together; when more is to be done, `wake_at` is now."""
    draft = Draft(snapshot, now)
    follow_provisioners(draft)
    tend_nodes(draft)
    end_lost_workers(draft)
    observe_workers(draft)
    open_admissions(draft)
    check_deadlines(draft)
    settle(draft)
    progress_drains(draft)
    tend_sleepers(draft)
    tend_weights(draft)
    take_samples(draft)
    converge_pools(draft)
    restore_mix(draft)
    keep_sets(draft)
    release_idle(draft)
    return draft.plan()


def only_samples(snapshot: Snapshot, now: float, last: Plan) -> Plan | None:
    """What a look is for while nothing is news and no record has moved since the last plan, which wrote nothing: the
    loads are sampled, for a small part of a plan's price. None when a plan is due by time, or because of who is silent.
    """
    quiet_until = min(last.quiet_until, silence_at(last.silences_s, last.silent_since, snapshot.live))
    if now >= quiet_until:
        return None
    workers: dict[str, list[Worker]] = {}
    for worker in snapshot.workers.values():
        workers.setdefault(worker.pool, []).append(worker)
    taken, due = samples_due(snapshot, snapshot.pools, lambda pool: workers.get(pool, []), snapshot.nodes, now)
    return Plan(samples=taken, wake_at=min(quiet_until, due or quiet_until), quiet_until=last.quiet_until)


def open_admissions(draft: Draft) -> None:
    """A pause of one worker's admission ends by itself."""
    for worker in list(draft.workers.values()):
        until = worker.intent.paused_until
        if worker.intent.admission is not Admission.PAUSED or until is None or draft.full:
            continue
        if draft.now < until:
            draft.wake(until)
        elif can(worker, Cause.OPEN):
            opened = draft.step(worker, Cause.OPEN)
            draft.worker_event(opened, "admission_opened", "active", "PAUSE_EXPIRED")
