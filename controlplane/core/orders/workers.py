"""Orders that move one worker."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.drains import drain, undrain
from controlplane.core.orders.lookup import check_not_deleting, worker_named
from controlplane.core.placement import CannotPlace
from controlplane.core.sleepers import wake
from controlplane.core.sleeping import sharers
from controlplane.core.snapshot import Delete, Plan, Put, Snapshot
from controlplane.core.starts import cancel, forget_attempts, start
from controlplane.core.worker import Cause, can, describe, holds_slice
from springtide.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from springtide.model.enums import Admission, Phase, State
from springtide.model.worker import Worker

LONGEST_DRAIN_S = 86_400.0
PAUSED_BY_OPERATOR = "OPERATOR_PAUSE"


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


def sleep_worker(
    snapshot: Snapshot, worker_id: str, now: float, *, timeout_s: float | None = None, reason: str = ""
) -> Plan:
    """ACTIVE -> DRAINING -> INACTIVE/SLEEPING, kept by the loop as a drain is. One that sleeps, or is about to, is left
    so. Raises Unimplemented for an engine that is known to be unable to release its memory."""
    worker = worker_named(snapshot, worker_id)
    draft = Draft(snapshot, now)
    if worker.asleep or (worker.state is State.DRAINING and worker.intent.sleep_level):
        if not worker.intent.held:
            draft.set_intent(worker, held=True)
        return draft.plan()
    pool = snapshot.pools.get(worker.pool)
    check_can(worker, "release")
    plan = drain_worker(snapshot, worker_id, now, timeout_s=timeout_s, reason=reason)
    level = pool.spec.sleep_level if pool is not None else 1
    return _with_sleep(plan, worker_id, level)


def _with_sleep(plan: Plan, worker_id: str, level: int) -> Plan:
    """The same drain, whose end is a sleep: what the node is told by then does not depend on it."""

    def slept(write: Put | Delete) -> Put | Delete:
        if isinstance(write, Put) and isinstance(write.record, Worker) and write.record.worker_id == worker_id:
            intent = dataclasses.replace(write.record.intent, sleep_level=level)
            return Put(dataclasses.replace(write.record, intent=intent))
        return write

    return dataclasses.replace(plan, writes=tuple(slept(write) for write in plan.writes))


def check_can(worker: Worker, verb: str) -> None:
    """Raises Unimplemented when the worker's engine has said that it cannot do this, naming what it lacks."""
    lacking = worker.observed.missing_verbs.get(verb)
    if worker.observed.verbs_known and lacking is not None:
        raise Unimplemented(
            f"the engine of worker {worker.worker_id!r} cannot {verb}: it lacks {lacking}.",
            field="worker_id",
            value=worker.worker_id,
            remedy=f"Start the pool's engines with {lacking}.",
            metadata={"missing": lacking},
        )


def lend_worker(snapshot: Snapshot, worker_id: str, now: float, *, to: str) -> Plan:
    """Gives a sleeping worker's GPUs to a job outside: until they are claimed back it does not wake, and nobody else
    is placed on them. Raises InvalidArgument, FailedPrecondition."""
    worker = worker_named(snapshot, worker_id)
    name = to.strip()
    if not 1 <= len(name) <= 200:
        raise InvalidArgument(
            field="to", value=to, problem="names nobody", remedy="Say who gets them, in 1 to 200 characters."
        )
    draft = Draft(snapshot, now)
    if worker.intent.lent_to == name:
        return draft.plan()
    borrowers = sharers(worker, snapshot.workers.values())
    problem = (
        f"is {describe(worker)}, and only a sleeping worker's GPUs can be lent"
        if not worker.asleep
        else f"is lent to {worker.intent.lent_to} already"
        if worker.intent.lent_to
        else f"has its GPUs lent to {borrowers[0].worker_id}"
        if borrowers
        else ""
    )
    if problem:
        raise FailedPrecondition(
            f"worker {worker_id!r} {problem}.",
            reason="CANNOT_LEND",
            field="worker_id",
            value=worker_id,
            remedy="Put it to sleep first." if not worker.asleep else "Claim them back first.",
            metadata={"state": describe(worker)},
        )
    lent = draft.set_intent(worker, lent_to=name)
    draft.worker_event(lent, "gpus_lent", "sleeping", "OPERATOR_LEND", f"{','.join(worker.intent.gpu_ids)} to {name}")
    return draft.plan()


def reclaim_worker(snapshot: Snapshot, worker_id: str, now: float) -> Plan:
    """Ends a loan to a job outside; one that is not lent is left as it is."""
    worker = worker_named(snapshot, worker_id)
    draft = Draft(snapshot, now)
    if worker.intent.lent_to:
        back = draft.set_intent(worker, lent_to="")
        told = f"from {worker.intent.lent_to}"
        draft.worker_event(back, "gpus_reclaimed", back.state.value.lower(), "OPERATOR_RECLAIM", told)
    return draft.plan()


def pause_worker(snapshot: Snapshot, worker_id: str, now: float, *, reason: str = "") -> Plan:
    """Admission PAUSED until it is resumed; the worker still counts as capacity."""
    worker = worker_named(snapshot, worker_id)
    _require(worker, Cause.PAUSE, "Only an ACTIVE worker can be paused.")
    draft = Draft(snapshot, now)
    if worker.intent.admission is Admission.OPEN or worker.intent.paused_reason != PAUSED_BY_OPERATOR:
        paused = draft.step(worker, Cause.PAUSE, paused_reason=PAUSED_BY_OPERATOR, paused_until=None)
        draft.worker_event(paused, "admission_paused", "active", PAUSED_BY_OPERATOR, reason[:200])
    return draft.plan()


def resume_worker(snapshot: Snapshot, worker_id: str, now: float) -> Plan:
    """Ends an operator's pause; any other is left to end by itself."""
    worker = worker_named(snapshot, worker_id)
    _require(worker, Cause.OPEN, "Only an ACTIVE worker can be resumed.")
    draft = Draft(snapshot, now)
    if worker.intent.admission is Admission.PAUSED and worker.intent.paused_reason == PAUSED_BY_OPERATOR:
        opened = draft.step(worker, Cause.OPEN)
        draft.worker_event(opened, "admission_opened", "active", PAUSED_BY_OPERATOR)
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
    """INACTIVE -> STARTING, also after its attempts ran out; a sleeper is woken. Raises FailedPrecondition: no slice,
    at the upper bound, lent."""
    worker = worker_named(snapshot, worker_id)
    if worker.asleep:
        return _wake_worker(snapshot, worker, now)
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


def _wake_worker(snapshot: Snapshot, worker: Worker, now: float) -> Plan:
    if worker.intent.lent_to:
        raise FailedPrecondition(
            f"the GPUs of worker {worker.worker_id!r} are lent to {worker.intent.lent_to}.",
            reason="GPUS_LENT",
            field="worker_id",
            value=worker.worker_id,
            remedy="Claim them back first: `springtide reclaim`.",
        )
    draft = Draft(snapshot, now)
    pool = draft.pools.get(worker.pool)
    if pool is None:
        raise NotFound(kind="pool", name=worker.pool, known=draft.pools)
    check_not_deleting(pool)
    _check_room(draft, worker)
    wake(draft, pool, worker, "OPERATOR_ACTIVATE", "by an operator")
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
