"""Orders that move one worker."""

from controlplane.core.draft import Draft
from controlplane.core.drains import drain, undrain
from controlplane.core.orders.lookup import check_not_deleting, worker_named
from controlplane.core.placement import CannotPlace
from controlplane.core.snapshot import Plan, Snapshot
from controlplane.core.starts import cancel, forget_attempts, start
from controlplane.core.worker import Cause, can, describe, holds_slice
from springtide.errors import FailedPrecondition, InvalidArgument, NotFound
from springtide.model.enums import Phase, State
from springtide.model.worker import Worker

LONGEST_DRAIN_S = 86_400.0


def drain_worker(
    snapshot: Snapshot, worker_id: str, now: float, *, timeout_s: float | None = None, reason: str = ""
) -> Plan:
    """ACTIVE -> DRAINING, kept by the loop. The desired count shrinks with it, down to the lower bound; a pinned pool
    keeps its pin, so another worker takes the place. One that drains already is kept draining."""
    worker = worker_named(snapshot, worker_id)
    if timeout_s is not None and not 0 <= timeout_s <= LONGEST_DRAIN_S:
        raise InvalidArgument(
            field="timeout",
            value=timeout_s,
            problem="a drain lasts 0 s to 24 h",
            remedy="Leave it out for the pool's own drain_timeout_s.",
        )
    draft = Draft(snapshot, now)
    if worker.state is State.DRAINING:
        if not worker.intent.held:
            draft.set_intent(worker, held=True)
        return draft.plan()
    remedies = {State.STARTING: "Cancel its start instead.", State.INACTIVE: "It serves nothing."}
    _require(worker, Cause.DRAIN, remedies.get(worker.state, ""))
    extra = {} if timeout_s is None else {"deadline": now + timeout_s}
    drain(draft, worker, "OPERATOR_DRAIN", reason[:200] or "by an operator", held=True, **extra)
    _want_one_less(draft, worker.pool)
    return draft.plan()


def undrain_worker(snapshot: Snapshot, worker_id: str, now: float) -> Plan:
    """DRAINING -> ACTIVE, before RELEASING."""
    worker = worker_named(snapshot, worker_id)
    remedy = "It is being stopped: activate it afterwards." if worker.intent.phase is Phase.RELEASING else ""
    _require(worker, Cause.UNDRAIN, remedy or "Only a draining worker can be kept.")
    draft = Draft(snapshot, now)
    _check_room(draft, worker)
    undrain(draft, worker, "OPERATOR_UNDRAIN", "by an operator")
    _want_one_more(draft, worker.pool)
    return draft.plan()


def activate_worker(snapshot: Snapshot, worker_id: str, now: float) -> Plan:
    """INACTIVE -> STARTING, also after its attempts ran out. Raises FailedPrecondition: no slice, at the upper
    bound."""
    worker = worker_named(snapshot, worker_id)
    if worker.state is State.INACTIVE and holds_slice(worker):
        raise FailedPrecondition(
            f"worker {worker_id!r} is {describe(worker)}; its node has not yet said that its GPUs are free.",
            reason="SLICE_NOT_FREE",
            field="worker_id",
            value=worker_id,
            remedy=f"Wait for {worker.intent.node_id}, or scale the pool instead.",
        )
    _require(worker, Cause.START, "Only an INACTIVE worker can be activated.")
    draft = Draft(snapshot, now)
    pool = draft.pools.get(worker.pool)
    if pool is None:
        raise NotFound(kind="pool", name=worker.pool, known=draft.pools)
    check_not_deleting(pool)
    _check_room(draft, worker)
    started = start(draft, pool, forget_attempts(worker), "OPERATOR_ACTIVATE", "by an operator")
    if isinstance(started, CannotPlace):
        raise FailedPrecondition(
            f"worker {worker_id!r} cannot be placed: {started}.",
            reason="CANNOT_PLACE",
            field="worker_id",
            value=worker_id,
            remedy="Free GPUs, uncordon a node or add one.",
        )
    _want_one_more(draft, worker.pool)
    return draft.plan()


def cancel_worker(snapshot: Snapshot, worker_id: str, now: float) -> Plan:
    """STARTING -> INACTIVE; the loop does not start it again."""
    worker = worker_named(snapshot, worker_id)
    _require(worker, Cause.CANCEL, "Drain it instead." if worker.state is State.ACTIVE else "It is not starting.")
    draft = Draft(snapshot, now)
    cancel(draft, worker, "OPERATOR_CANCEL", "by an operator", held=True)
    _want_one_less(draft, worker.pool)
    return draft.plan()


def _require(worker: Worker, cause: Cause, remedy: str) -> None:
    if not can(worker, cause):
        raise FailedPrecondition(
            f"worker {worker.worker_id!r} is {describe(worker)}.",
            reason="WRONG_STATE",
            field="worker_id",
            value=worker.worker_id,
            remedy=remedy,
            metadata={"state": describe(worker)},
        )


def _check_room(draft: Draft, worker: Worker) -> None:
    pool = draft.pools.get(worker.pool)
    present = draft.count(worker.pool, State.STARTING, State.ACTIVE)
    if pool is not None and present >= pool.spec.max_workers:
        raise FailedPrecondition(
            f"pool {pool.name!r} has {present} workers starting or active, and max_workers is {pool.spec.max_workers}.",
            reason="AT_MAX",
            field="worker_id",
            value=worker.worker_id,
            remedy="Drain another one first, or raise max_workers.",
        )


def _want_one_less(draft: Draft, name: str) -> None:
    pool = draft.pools.get(name)
    if pool is not None:
        present = draft.count(name, State.STARTING, State.ACTIVE)
        desired = min(pool.intent.desired_workers, max(present, pool.spec.min_workers))
        draft.pool_intent(pool, desired_workers=desired)


def _want_one_more(draft: Draft, name: str) -> None:
    """The desired count takes the worker in, and so does a pin that would take it out again. It counts as the last
    scale-down, so that a policy leaves it alone for one cooldown."""
    pool = draft.pools.get(name)
    if pool is None:
        return
    present = draft.count(name, State.STARTING, State.ACTIVE)
    manual = pool.intent.manual_workers
    draft.pool_intent(
        pool,
        desired_workers=max(pool.intent.desired_workers, present),
        manual_workers=None if manual is None else max(manual, present),
        last_scale_down_at=draft.now,
    )
