"""Growing and shrinking one pool to its target.

Growing cancels drains, then wakes sleepers, lets a coming spare serve, retries failed records, and starts stopped or
new ones. Shrinking takes victims, which sleep where the pool says so.
"""

from controlplane.core.aims import Aim, Moves, staying, why
from controlplane.core.draft import Draft
from controlplane.core.drains import drain, undrain
from controlplane.core.nodes.acquire import with_nodes
from controlplane.core.placement import CannotPlace
from controlplane.core.shares import fits, missing
from controlplane.core.signals import in_flight_of
from controlplane.core.sleepers import coming_spares, promote, wake
from controlplane.core.sleeping import is_claimed, wakeable, wanted_level
from controlplane.core.starts import cancel, is_due, is_exhausted, is_failing, start
from controlplane.core.victims import choose_victim
from controlplane.core.worker import Cause, can, holds_slice
from springtide.model.enums import NodeState, Phase, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker

STUCK_SLACK_S = 30.0  # on top of the grace: how long the node may take to stop a failed engine


def grow(draft: Draft, pool: Pool, aim: Aim, moves: Moves, *, policy_grows: bool) -> None:
    missing = aim.target - len(staying(draft, pool))
    if missing <= 0:
        return
    reason, message = why(aim)
    for worker in _drains_to_cancel(draft, pool, aim)[:missing]:
        if draft.full:
            return
        moves.grown.append(undrain(draft, worker, reason, message).worker_id)
        missing -= 1
    for worker in wakeable(draft, pool)[:missing]:
        if draft.full:
            return
        moves.grown.append(wake(draft, pool, worker, reason, message).worker_id)
        missing -= 1
    for worker in coming_spares(draft, pool)[:missing]:
        moves.grown.append(promote(draft, worker, pool).worker_id)
        missing -= 1
    candidates = _start_candidates(draft, pool, missing, policy_grows)
    for index, candidate in enumerate(candidates):
        if draft.full:
            return
        result = start(draft, draft.pools[pool.name], candidate, reason, message)
        if isinstance(result, CannotPlace):
            moves.blocked = with_nodes(draft, draft.pools[pool.name], result, len(candidates) - index)
            return
        moves.grown.append(result.worker_id)


def _is_stuck(draft: Draft, pool: Pool, worker: Worker) -> bool:
    """Its node does not get it stopped: it keeps its slice, but another worker takes its place in the count."""
    if not holds_slice(worker):
        return False
    at = worker.intent.state_since + pool.spec.stop_grace_s + STUCK_SLACK_S
    draft.wake(at)
    return draft.now >= at


def _drains_to_cancel(draft: Draft, pool: Pool, aim: Aim) -> list[Worker]:
    """Drains of the loop's own making that can still be cancelled, those that have lost least first; where the policy
    shares out, of workers that are where it lacks some."""
    shares = aim.asked.answer.shares if aim.asked is not None else ()
    short = missing(draft, pool, shares, staying(draft, pool))[0]
    found = [
        worker
        for worker in draft.workers_of(pool.name)
        if can(worker, Cause.UNDRAIN)
        and not worker.intent.held
        and not worker.intent.abort_in_flight
        and (node := draft.nodes.get(worker.intent.node_id)) is not None
        and node.state is NodeState.UP
        and not is_claimed(draft, worker)
        and (not shares or any(n > 0 and fits(s, node, pool) for n, s in zip(short, shares, strict=True)))
    ]
    return sorted(found, key=lambda worker: worker.intent.phase is Phase.FINISHING)


def _start_candidates(draft: Draft, pool: Pool, missing: int, policy_grows: bool) -> list[Worker | None]:
    """Records to start, None for a new one. A failed record that waits for its next attempt keeps its place, so that
    back-off is not dodged by starting another. One whose attempts ran out keeps it too, except that a policy may grow
    past it while some worker of the pool is ACTIVE (one that cannot start does not hold down the others), at most once
    per worker of the upper bound."""
    workers = draft.workers_of(pool.name)
    failing = [worker for worker in workers if is_failing(worker) and not _is_stuck(draft, pool, worker)]
    due = [worker for worker in failing if is_due(worker, draft.now)]
    for worker in failing:
        draft.wake(worker.intent.next_attempt_at)
    blocked = [worker for worker in failing if not is_due(worker, draft.now)]
    exhausted = [worker for worker in blocked if is_exhausted(worker, pool)]
    works = any(worker.state is State.ACTIVE for worker in workers)
    if policy_grows and works and len(exhausted) < pool.spec.max_workers:
        blocked = [worker for worker in blocked if not is_exhausted(worker, pool)]
    chosen: list[Worker | None] = [*due[:missing]]
    rest = missing - len(chosen) - len(blocked)
    if rest > 0:
        ready = [w for w in workers if can(w, Cause.START) and not w.intent.held and not is_failing(w)]
        chosen += ready[:rest]
        chosen += [None] * (rest - len(ready[:rest]))
    return chosen


def shrink(draft: Draft, pool: Pool, aim: Aim, moves: Moves) -> None:
    reason, message = why(aim)
    if aim.reason.startswith("BELOW") and aim.asked is None:
        reason = "SURPLUS"
    candidates = staying(draft, pool)
    while len(candidates) > aim.target and not draft.full:
        spare = _surplus(draft, pool, aim, candidates)
        victim = choose_victim(draft, pool, spare, spare_waiting=not pool.intent.deleting)
        if victim is None:
            return
        candidates.remove(victim)
        if victim.state is State.STARTING:
            cancel(draft, victim, reason, message)
        else:
            drain(draft, victim, reason, message, sleep_level=wanted_level(draft, pool))
        moves.shrunk.append(victim.worker_id)


def _surplus(draft: Draft, pool: Pool, aim: Aim, candidates: list[Worker]) -> list[Worker]:
    """Those that are where the policy wants fewer; all of them where it does not share out."""
    shares = aim.asked.answer.shares if aim.asked is not None else ()
    by_load = sorted(candidates, key=lambda worker: -(in_flight_of(draft.snapshot, worker, draft.now) or 0))
    return (missing(draft, pool, shares, by_load)[1] or candidates) if shares else candidates
