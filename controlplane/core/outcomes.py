"""What came of one pool's convergence: decision records and conditions."""

from controlplane.core.aims import Aim, Moves
from controlplane.core.decisions import record
from controlplane.core.draft import Draft
from controlplane.core.placement import CannotPlace
from controlplane.core.signals import is_leaving
from controlplane.core.starts import in_crash_loop, is_exhausted, is_failing
from springtide.model.enums import DecisionResult, Phase, ScaleDown, State
from springtide.model.pool import Pool
from springtide.model.worker import Worker

_UNSURE = frozenset({"UNKNOWN_LOAD", "POLICY_INVALID", "POLICY_FAILED"})


def write_down(draft: Draft, pool: Pool, aim: Aim, moves: Moves, before: int, was_desired: int) -> None:
    if aim.asked is None:
        _write_convergence(draft, pool, aim, moves, before, was_desired)
        _write_blocked(draft, pool, aim, moves, before)
        return
    answer, name = aim.asked.answer, aim.asked.policy
    moved = tuple(moves.grown if answer.wanted > before else moves.shrunk)
    if answer.wanted == before:
        _write_convergence(draft, pool, aim, moves, before, was_desired)
        reason, message, result = answer.reason, answer.message, DecisionResult.HOLD
        moved = ()
        if moves.blocked is not None and moves.blocked.awaited and not moves.grown:
            reason, message = blocked_reason(moves.blocked), f"{message}; {moves.blocked}"
        blocked = moves.blocked is not None and not moves.blocked.awaited  # what has a node coming is still on its way
        unplaceable = blocked and not moves.grown and answer.reason not in _UNSURE
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
        return blocked_reason(moves.blocked), str(moves.blocked)
    if any(is_exhausted(worker, pool) for worker in draft.workers_of(pool.name)):
        return "START_ATTEMPTS_EXHAUSTED", "its start attempts ran out"
    return "START_BACKOFF", "a failed start waits for its next attempt"


def _write_blocked(draft: Draft, pool: Pool, aim: Aim, moves: Moves, before: int) -> None:
    """Which nodes an operator's pin waits for, or why none is asked for: once for each outlook. What a policy asks for
    has a decision of its own."""
    blocked, pinned = moves.blocked, pool.intent.manual_workers is not None
    if blocked is None or not blocked.outlook or not pinned or moves.grown or moves.shrunk:
        return
    standing, reason = draft.snapshot.live.last_decision.get(pool.name), blocked_reason(blocked)
    if standing is None or standing.reason != reason or blocked.outlook not in standing.message:
        inputs: dict[str, float | int | str | bool | None] = {"desired": aim.target, "awaited": blocked.awaited}
        record(
            draft,
            pool,
            policy=aim.by,
            result=DecisionResult.HOLD,
            reason=reason,
            message=str(blocked),
            from_workers=before,
            to_workers=aim.target,
            inputs=inputs,
        )


def blocked_reason(blocked: CannotPlace) -> str:
    """Nodes are coming for it, or nobody can take it."""
    return "AWAITS_NODE" if blocked.awaited else "CANNOT_PLACE"


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


def departed(draft: Draft, pool: Pool) -> tuple[str, str] | None:
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


def _cannot_sleep(draft: Draft, pool: Pool) -> list[str]:
    """What the pool's engines lack to release their memory."""
    active = [worker for worker in draft.workers_of(pool.name) if worker.state is State.ACTIVE]
    lacking = {worker.observed.missing_verbs.get("release", "") for worker in active if worker.observed.verbs_known}
    return [f"CANNOT_SLEEP: its engines cannot release memory without {name}" for name in sorted(lacking - {""})]


def _last_exit(worker: Worker) -> str:
    return worker.observed.exit.reason if worker.observed.exit is not None else worker.intent.reason


def set_conditions(draft: Draft, pool: Pool, moves: Moves, no_spare: CannotPlace | None = None) -> None:
    found: list[str] = []
    if moves.blocked is not None:
        found.append(f"{blocked_reason(moves.blocked)}: {moves.blocked}")
        draft.note(f"{pool.name}: cannot place: {moves.blocked}")
    exhausted = [worker for worker in draft.workers_of(pool.name) if is_exhausted(worker, pool)]
    if exhausted:
        listed = ", ".join(f"{worker.worker_id} ({worker.intent.reason})" for worker in exhausted[:8])
        found.append(f"START_ATTEMPTS_EXHAUSTED: {listed}; activate it when the cause is gone")
    looping = [worker for worker in draft.workers_of(pool.name) if in_crash_loop(worker)]
    if looping:
        listed = ", ".join(f"{w.worker_id} ({w.intent.crashes} times, {_last_exit(w)})" for w in looping[:8])
        found.append(f"CRASH_LOOP: ends soon after it has become ACTIVE: {listed}; see `springtide workers WORKER`")
    if no_spare is not None:
        found.append(f"CANNOT_KEEP_SPARES: {no_spare}")
    if pool.spec.scale_down is not ScaleDown.STOP or pool.spec.spares:
        found += _cannot_sleep(draft, pool)
    if tuple(found) != pool.intent.conditions:
        draft.pool_intent(pool, conditions=tuple(found))
