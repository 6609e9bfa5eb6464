"""One pool at a time: where it should be, and the steps that bring it there.

`desired_workers` is what STARTING + ACTIVE workers converge to. It comes from, in this order: deletion, an operator's
pin, the policy (unless scaling is on hold); the bounds always apply. Growing cancels drains, then retries failed
records, then starts stopped or new ones. Shrinking takes victims. A worker whose node announced its end does not
count any more: its replacement starts elsewhere first where there is room and time, so for that overlap STARTING +
ACTIVE may exceed the bounds by the workers that leave.
"""

from dataclasses import dataclass, field

from controlplane.core.decisions import Asked, ask_policy, record
from controlplane.core.draft import Draft
from controlplane.core.drains import drain, drain_timeout_s, undrain
from controlplane.core.placement import CannotPlace
from controlplane.core.signals import is_leaving
from controlplane.core.starts import cancel, is_due, is_exhausted, is_failing, start, trace_for_next
from controlplane.core.victims import choose_victim
from controlplane.core.worker import Cause, can, has_ended, holds_slice
from springtide.model.enums import DecisionResult, NodeState, Phase, ReportedPhase, State
from springtide.model.pool import Pool
from springtide.model.record import Event
from springtide.model.worker import Worker

_LEAVE_SLACK_S = 5.0  # before a node's announced end, on top of the drain timeout
_UNSURE = frozenset({"UNKNOWN_LOAD", "POLICY_INVALID", "POLICY_FAILED"})


@dataclass(frozen=True, slots=True)
class Aim:
    """Where the pool should be. `reason` and `by` explain a change that no policy asked for."""

    target: int
    by: str
    reason: str
    asked: Asked | None = None


@dataclass(slots=True)
class Moves:
    """What one convergence did."""

    grown: list[str] = field(default_factory=list)
    shrunk: list[str] = field(default_factory=list)
    blocked: CannotPlace | None = None
    departed: tuple[str, str] | None = None  # (reason, message) of the latest that is to be replaced


def converge_pools(draft: Draft) -> None:
    for name in sorted(draft.pools):
        if draft.full:
            return
        _converge(draft, name)


def _converge(draft: Draft, name: str) -> None:
    pool = _expire_hold(draft, draft.pools[name])
    before = len(_staying(draft, pool))
    aim = _aim(draft, pool, before)
    was_desired = pool.intent.desired_workers
    if aim.target != was_desired:
        pool = draft.pool_intent(pool, desired_workers=aim.target)
    _settle_lost(draft, pool, aim.target)
    moves = Moves(departed=_departed(draft, pool))
    policy_grows = aim.asked is not None and aim.asked.answer.wanted > before
    _grow(draft, pool, aim, moves, policy_grows)
    _shrink(draft, pool, aim, moves)
    _leave_nodes(draft, pool, aim.target)
    _write_down(draft, draft.pools[name], aim, moves, before, was_desired)
    _set_conditions(draft, draft.pools[name], moves)
    if pool.intent.deleting:
        _delete_when_empty(draft, draft.pools[name])
    else:
        _forget(draft, draft.pools[name])


def _expire_hold(draft: Draft, pool: Pool) -> Pool:
    until = pool.intent.hold_until
    if until is None:
        return pool
    if draft.now < until:
        draft.wake(until)
        return pool
    draft.events.append(Event(draft.now, "pool_resumed", pool.name, "resumed", pool.name, reason="HOLD_EXPIRED"))
    return draft.pool_intent(pool, hold_until=None, hold_reason="")


def _staying(draft: Draft, pool: Pool) -> list[Worker]:
    """STARTING and ACTIVE workers that do not have to leave with their node."""
    return [
        worker
        for worker in draft.workers_of(pool.name)
        if worker.state in (State.STARTING, State.ACTIVE) and not is_leaving(worker, draft.nodes)
    ]


def _aim(draft: Draft, pool: Pool, present: int) -> Aim:
    spec, intent = pool.spec, pool.intent

    def within(count: int) -> int:
        return min(max(count, spec.min_workers), spec.max_workers)

    if intent.deleting:
        return Aim(0, "operator", "DELETING")
    if intent.manual_workers is not None:
        return Aim(within(intent.manual_workers), "operator", "MANUAL")
    desired = within(intent.desired_workers)
    reason = "BELOW_MIN" if desired > intent.desired_workers or desired <= spec.min_workers else "BELOW_DESIRED"
    reason = "ABOVE_MAX" if desired < intent.desired_workers else reason
    if intent.hold_until is not None:
        return Aim(desired, "bounds", reason)
    asked = ask_policy(draft, pool)
    if asked is None:
        return Aim(desired, "bounds", reason)
    wanted = asked.answer.wanted
    return Aim(desired if wanted == present else wanted, "bounds", reason, asked)


# ------------------------------------------------------------------ lost ones that come back


def _settle_lost(draft: Draft, pool: Pool, target: int) -> None:
    """A lost worker whose node reports it alive again is adopted while it is wanted, else stopped. It is wanted
    before any start that is not ready yet: it is loaded already."""
    for worker in draft.workers_of(pool.name):
        if worker.intent.phase is not Phase.LOST or draft.full:
            continue
        node, live, report = (
            draft.nodes.get(worker.intent.node_id),
            draft.live(worker.intent.node_id),
            draft.report_of(worker),
        )
        if node is None or node.state not in (NodeState.UP, NodeState.RELEASING) or live is None or report is None:
            continue
        if not live.connected or not live.reported:
            continue
        loaded = sum(1 for w in _staying(draft, pool) if w.state is State.ACTIVE or w.intent.phase is Phase.ADOPTING)
        wanted = loaded < target and not worker.intent.held and node.state is NodeState.UP and not has_ended(report)
        if wanted and report.phase is not ReportedPhase.STOPPING and report.incarnation >= worker.observed.incarnation:
            adopted = draft.step(
                worker,
                Cause.ADOPT,
                reason="BACK",
                message=f"{node.node_id} is back and it still runs",
                deadline=draft.now + pool.spec.start_timeout_s,
                traceparent=trace_for_next(draft, worker),
            )
            draft.worker_event(adopted, "adopt_start", "scaling_up")
        else:
            dismissed = draft.step(worker, Cause.DISMISS, reason="NOT_WANTED", message="it is back, but replaced")
            draft.worker_event(dismissed, "worker_dismissed", "inactive")


# ------------------------------------------------------------------ growing and shrinking


def _grow(draft: Draft, pool: Pool, aim: Aim, moves: Moves, policy_grows: bool) -> None:
    missing = aim.target - len(_staying(draft, pool))
    if missing <= 0:
        return
    reason, message = _why(aim)
    for worker in _drains_to_cancel(draft, pool)[:missing]:
        if draft.full:
            return
        moves.grown.append(undrain(draft, worker, reason, message).worker_id)
        missing -= 1
    for candidate in _start_candidates(draft, pool, missing, policy_grows):
        if draft.full:
            return
        result = start(draft, draft.pools[pool.name], candidate, reason, message)
        if isinstance(result, CannotPlace):
            moves.blocked = result
            return
        moves.grown.append(result.worker_id)


def _drains_to_cancel(draft: Draft, pool: Pool) -> list[Worker]:
    """Drains of the loop's own making that can still be cancelled, those that have lost least first."""
    found = [
        worker
        for worker in draft.workers_of(pool.name)
        if can(worker, Cause.UNDRAIN)
        and not worker.intent.held
        and not worker.intent.abort_in_flight
        and _node_is_up(draft, worker)
    ]
    return sorted(found, key=lambda worker: worker.intent.phase is Phase.FINISHING)


def _node_is_up(draft: Draft, worker: Worker) -> bool:
    node = draft.nodes.get(worker.intent.node_id)
    return node is not None and node.state is NodeState.UP


def _start_candidates(draft: Draft, pool: Pool, missing: int, policy_grows: bool) -> list[Worker | None]:
    """Records to start, None for a new one. A failed record that waits for its next attempt keeps its place, so that
    back-off is not dodged by starting another. One whose attempts ran out keeps it too, except that a policy may grow
    past it while some worker of the pool is ACTIVE (one that cannot start does not hold down the others), at most once
    per worker of the upper bound."""
    workers = draft.workers_of(pool.name)
    failing = [worker for worker in workers if is_failing(worker)]
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


def _shrink(draft: Draft, pool: Pool, aim: Aim, moves: Moves) -> None:
    reason, message = _why(aim)
    if aim.reason.startswith("BELOW") and aim.asked is None:
        reason = "SURPLUS"
    candidates = _staying(draft, pool)
    while len(candidates) > aim.target and not draft.full:
        victim = choose_victim(draft, pool, candidates, spare_waiting=not pool.intent.deleting)
        if victim is None:
            return
        candidates.remove(victim)
        if victim.state is State.STARTING:
            cancel(draft, victim, reason, message)
        else:
            drain(draft, victim, reason, message)
        moves.shrunk.append(victim.worker_id)


def _leave_nodes(draft: Draft, pool: Pool, target: int) -> None:
    """Workers of nodes that stop: starts are cancelled, ACTIVE ones drain once they are replaced, or when no
    replacement comes, or when the node's deadline leaves no more time. Drains end before the node does."""
    staying = _staying(draft, pool)
    ready = sum(1 for worker in staying if worker.state is State.ACTIVE)
    coming = len(staying) - ready
    for worker in draft.workers_of(pool.name):
        if draft.full or not is_leaving(worker, draft.nodes):
            continue
        node_id = worker.intent.node_id
        if worker.state is State.STARTING:
            cancel(draft, worker, "NODE_STOPPING", f"{node_id} stops")
        elif worker.state is State.ACTIVE:
            latest, end = _leave_times(draft, pool, node_id)
            if ready >= target or coming == 0 or draft.now >= latest:
                drain(draft, worker, "NODE_STOPPING", f"{node_id} stops", deadline=end)
            else:
                draft.wake(latest)
        elif worker.intent.phase in (Phase.UNROUTING, Phase.FINISHING) and not worker.intent.abort_in_flight:
            _, end = _leave_times(draft, pool, node_id)
            if worker.intent.deadline is not None and end < worker.intent.deadline:
                draft.set_intent(worker, deadline=end)
                draft.wake(end)


def _leave_times(draft: Draft, pool: Pool, node_id: str) -> tuple[float, float]:
    """(when a worker of the stopping node has to begin its drain, when that drain has to end)."""
    live, timeout_s = draft.live(node_id), drain_timeout_s(pool)
    if live is None or live.stop_deadline_at is None:
        return draft.nodes[node_id].state_since + timeout_s, draft.now + timeout_s
    latest = live.stop_deadline_at - timeout_s - _LEAVE_SLACK_S
    return latest, min(draft.now + timeout_s, max(live.stop_deadline_at - _LEAVE_SLACK_S, draft.now))


# ------------------------------------------------------------------ writing down


def _why(aim: Aim) -> tuple[str, str]:
    if aim.asked is not None and aim.asked.answer.wanted == aim.target:
        return aim.asked.answer.reason, aim.asked.answer.message
    return aim.reason, ""


def _write_down(draft: Draft, pool: Pool, aim: Aim, moves: Moves, before: int, was_desired: int) -> None:
    if aim.asked is None:
        _write_convergence(draft, pool, aim, moves, before, was_desired)
        return
    answer, name = aim.asked.answer, aim.asked.policy
    moved = tuple(moves.grown if answer.wanted > before else moves.shrunk)
    if answer.wanted == before:
        _write_convergence(draft, pool, aim, moves, before, was_desired)
        reason, message, result = answer.reason, answer.message, DecisionResult.HOLD
        moved = ()
        unplaceable = moves.blocked is not None and not moves.grown and answer.reason not in _UNSURE
        if unplaceable:  # nobody asks for it any more: it is not started when room appears later
            draft.pool_intent(pool, desired_workers=max(pool.spec.min_workers, before))
    elif moved:
        growing = answer.wanted > before
        result = DecisionResult.SCALE_UP if growing else DecisionResult.SCALE_DOWN
        reason, message = answer.reason, answer.message
        stamp = {"last_scale_up_at": draft.now} if growing else {"last_scale_down_at": draft.now}
        pool = draft.pool_intent(pool, **stamp)
    else:
        result = DecisionResult.HOLD
        reason, message = _why_not(draft, pool, moves, answer.wanted > before)
        message = f"{answer.message}; {message}"
        if answer.wanted < before:
            pool = draft.pool_intent(pool, desired_workers=was_desired)
    record(
        draft,
        pool,
        policy=name,
        result=result,
        reason=reason,
        message=message,
        from_workers=before,
        to_workers=draft.pools[pool.name].intent.desired_workers,
        inputs=aim.asked.inputs,
        workers=moved,
    )


def _why_not(draft: Draft, pool: Pool, moves: Moves, growing: bool) -> tuple[str, str]:
    if not growing:
        return "NO_VICTIM", "nobody may be taken while requests wait"
    if moves.blocked is not None:
        return "CANNOT_PLACE", str(moves.blocked)
    if any(is_exhausted(worker, pool) for worker in draft.workers_of(pool.name)):
        return "START_ATTEMPTS_EXHAUSTED", "its start attempts ran out"
    return "START_BACKOFF", "a failed start waits for its next attempt"


def _write_convergence(draft: Draft, pool: Pool, aim: Aim, moves: Moves, before: int, was_desired: int) -> None:
    """A record for moves that no policy asked for."""
    if moves.grown:
        replaced = moves.departed if aim.target <= was_desired else None
        reason, message = replaced or (aim.reason, f"{before} -> {aim.target}")
        result = DecisionResult.REPLACE if replaced else DecisionResult.SCALE_UP
        _record_moves(draft, pool, aim, result, reason, message, before, moves.grown)
    if moves.shrunk:
        reason = "SURPLUS" if aim.reason.startswith("BELOW") else aim.reason
        message = f"{before} -> {aim.target}"
        _record_moves(draft, pool, aim, DecisionResult.SCALE_DOWN, reason, message, before, moves.shrunk)


def _record_moves(
    draft: Draft, pool: Pool, aim: Aim, result: DecisionResult, reason: str, message: str, before: int, moved: list[str]
) -> None:
    record(
        draft,
        pool,
        policy=aim.by,
        result=result,
        reason=reason,
        message=message,
        from_workers=before,
        to_workers=aim.target,
        inputs={"desired": aim.target, "min_workers": pool.spec.min_workers, "max_workers": pool.spec.max_workers},
        workers=tuple(moved),
    )


def _departed(draft: Draft, pool: Pool) -> tuple[str, str] | None:
    """Why a worker may be missing although the desired count has not grown: the latest that failed, was lost, was taken
    out by an operator, or has to leave with its node."""
    gone = [worker for worker in draft.workers_of(pool.name) if _has_left(draft, worker)]
    if not gone:
        return None
    latest = max(gone, key=lambda worker: worker.intent.state_since)
    if latest.state in (State.STARTING, State.ACTIVE):
        return "NODE_STOPPING", f"replaces {latest.worker_id}, whose node {latest.intent.node_id} stops"
    intent = latest.intent
    return intent.reason, f"replaces {latest.worker_id}: {intent.message or intent.reason}"


def _has_left(draft: Draft, worker: Worker) -> bool:
    if worker.state in (State.STARTING, State.ACTIVE):
        return is_leaving(worker, draft.nodes)
    return is_failing(worker) or worker.intent.phase is Phase.LOST or worker.intent.held


def _set_conditions(draft: Draft, pool: Pool, moves: Moves) -> None:
    found: list[str] = []
    if moves.blocked is not None:
        found.append(f"CANNOT_PLACE: {moves.blocked}")
        draft.note(f"{pool.name}: cannot place: {moves.blocked}")
    exhausted = [worker for worker in draft.workers_of(pool.name) if is_exhausted(worker, pool)]
    if exhausted:
        listed = ", ".join(f"{worker.worker_id} ({worker.intent.reason})" for worker in exhausted[:8])
        found.append(f"START_ATTEMPTS_EXHAUSTED: {listed}; activate it when the cause is gone")
    if tuple(found) != pool.intent.conditions:
        draft.pool_intent(pool, conditions=tuple(found))


# ------------------------------------------------------------------ forgetting


def _delete_when_empty(draft: Draft, pool: Pool) -> None:
    """The last step of a deletion. A LOST worker is not waited for: when its node comes back, an engine without a
    record is stopped, and until then its GPUs count as taken there."""
    workers = draft.workers_of(pool.name)
    if any(w.state is not State.INACTIVE or (holds_slice(w) and w.intent.phase is not Phase.LOST) for w in workers):
        return
    for worker in workers:
        if draft.full:
            return
        draft.delete(worker)
    draft.events.append(Event(draft.now, "pool_deleted", pool.name, "deleted", pool.name, reason="DELETING"))
    draft.delete(pool)


def _forget(draft: Draft, pool: Pool) -> None:
    """Drops INACTIVE records that nothing needs any more."""
    missing = pool.intent.desired_workers > len(_staying(draft, pool))
    for worker in draft.workers_of(pool.name):
        if worker.state is not State.INACTIVE or (holds_slice(worker) and worker.intent.phase is not Phase.LOST):
            continue
        if is_failing(worker) and missing:
            continue
        at = worker.intent.state_since + draft.timing.inactive_retention_s
        if draft.now < at:
            draft.wake(at)
        elif draft.full:
            return
        else:
            draft.delete(worker)
