"""Operators' orders as plans: (snapshot, arguments, now) -> Plan, or an error that names field, value and remedy.

An order changes what operators own (spec, pins, holds, cordons), or moves one worker by an edge of the machine. The
loop does the rest. Services commit the plan with compare and try again on Conflict.
"""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.drains import drain, undrain
from controlplane.core.placement import CannotPlace
from controlplane.core.snapshot import Plan, Snapshot
from controlplane.core.starts import cancel, forget_attempts, is_failing, start
from controlplane.core.validation import checked
from controlplane.core.worker import Cause, can, describe, holds_slice
from springtide.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound
from springtide.model.enums import Phase, State
from springtide.model.node import Node, NodeSpec
from springtide.model.pool import Pool, PoolIntent, PoolSpec
from springtide.model.record import Event
from springtide.model.worker import Worker

DEFAULT_HOLD_S = 600.0
LONGEST_HOLD_S = 86_400.0
LONGEST_DRAIN_S = 86_400.0
_IDENTITY = ("engine", "model", "tensor_parallel_size")  # of what runs: not changed under live workers

# ------------------------------------------------------------------ pools


def apply_pool(snapshot: Snapshot, spec: PoolSpec, now: float, *, expected_revision: int | None = None) -> Plan:
    """Creates a pool or replaces its spec. Raises InvalidArgument, Conflict, FailedPrecondition."""
    old = snapshot.pools.get(spec.name)
    if expected_revision is not None and expected_revision != (old.revision if old is not None else 0):
        raise Conflict(
            f"pool {spec.name!r} is at revision {old.revision if old is not None else 0}, not {expected_revision}.",
            reason="REVISION_MOVED",
            field="expected_revision",
            value=expected_revision,
            remedy="Read it again and repeat the change.",
        )
    spec = checked(spec, snapshot.pools, snapshot.nodes)
    draft = Draft(snapshot, now)
    if old is None:
        asked = spec.min_workers if spec.initial_workers is None else spec.initial_workers
        desired = min(max(asked, spec.min_workers), spec.max_workers)
        draft.put(Pool(spec, PoolIntent(desired_workers=desired)))
        _pool_event(draft, spec.name, "pool_created", "created", f"{desired} workers")
        return draft.plan()
    _check_not_deleting(old)
    _check_identity(snapshot, old, spec)
    if spec != old.spec:
        draft.put(dataclasses.replace(old, spec=spec))
        _pool_event(draft, spec.name, "pool_changed", "changed", _changes(old.spec, spec))
        for worker in draft.workers_of(spec.name):
            if is_failing(worker) and not draft.full:
                draft.put(forget_attempts(worker))
    return draft.plan()


def delete_pool(snapshot: Snapshot, name: str, now: float, *, drain_workers: bool = False) -> Plan:
    """Begins a deletion: the loop drains, stops and forgets. Raises FailedPrecondition while workers live, unless
    told to drain them."""
    pool = pool_named(snapshot, name)
    draft = Draft(snapshot, now)
    alive = [worker for worker in draft.workers_of(name) if worker.state is not State.INACTIVE]
    if alive and not drain_workers:
        raise FailedPrecondition(
            f"pool {name!r} has {len(alive)} live workers.",
            reason="POOL_HAS_WORKERS",
            field="drain",
            value=False,
            remedy="Set drain to drain and stop them first.",
        )
    if not pool.intent.deleting:
        draft.pool_intent(pool, deleting=True, hold_until=None, hold_reason="")
        _pool_event(draft, name, "pool_deleting", "deleting", f"{len(alive)} live workers drain")
    return draft.plan()


def scale_pool(
    snapshot: Snapshot, name: str, now: float, *, workers: int | None = None, automatic: bool = False
) -> Plan:
    """Pins the desired count within the bounds, or gives it back to the policy. Raises InvalidArgument."""
    pool = pool_named(snapshot, name)
    _check_not_deleting(pool)
    if automatic == (workers is not None):
        raise InvalidArgument(
            field="workers",
            value=workers,
            problem="give either a count or automatic, not both and not neither",
            remedy="E.g. workers = 2, or automatic = true to give the pool back to its policy.",
        )
    spec = pool.spec
    if workers is not None and not spec.min_workers <= workers <= spec.max_workers:
        raise InvalidArgument(
            field="workers",
            value=workers,
            problem=f"the pool {name} is bounded to {spec.min_workers} to {spec.max_workers} workers",
            remedy="Give a count within the bounds, or change min_workers or max_workers first.",
            reason="OUT_OF_BOUNDS",
        )
    draft = Draft(snapshot, now)
    if pool.intent.manual_workers != workers:
        draft.pool_intent(pool, manual_workers=workers)
        told = "the policy decides again" if workers is None else f"pinned to {workers} workers"
        _pool_event(draft, name, "pool_scaled", "automatic" if workers is None else "manual", told)
    return draft.plan()


def pause_pool(snapshot: Snapshot, name: str, now: float, *, hold_s: float | None = None, reason: str = "") -> Plan:
    """Holds scaling until the hold expires. Failed workers are still replaced and the bounds still hold."""
    pool = pool_named(snapshot, name)
    _check_not_deleting(pool)
    seconds = DEFAULT_HOLD_S if hold_s is None else hold_s
    if not 0 < seconds <= LONGEST_HOLD_S:
        raise InvalidArgument(
            field="hold",
            value=seconds,
            problem="a hold lasts more than 0 s and at most 24 h",
            remedy=f"Give up to {LONGEST_HOLD_S:g} s and renew it, or pin the pool with a count.",
        )
    draft = Draft(snapshot, now)
    draft.pool_intent(pool, hold_until=now + seconds, hold_reason=reason[:200])
    _pool_event(draft, name, "pool_paused", "paused", f"for {seconds:g} s{reason and ': ' + reason[:200]}")
    return draft.plan()


def resume_pool(snapshot: Snapshot, name: str, now: float) -> Plan:
    """Ends a hold at once; without one nothing changes."""
    pool = pool_named(snapshot, name)
    draft = Draft(snapshot, now)
    if pool.intent.hold_until is not None:
        draft.pool_intent(pool, hold_until=None, hold_reason="")
        _pool_event(draft, name, "pool_resumed", "resumed", "by an operator")
    return draft.plan()


# ------------------------------------------------------------------ workers


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
    _check_not_deleting(pool)
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


# ------------------------------------------------------------------ nodes


def cordon_node(snapshot: Snapshot, node_id: str, now: float, *, reason: str = "") -> Plan:
    """No new worker is placed on it; what runs there stays."""
    return _set_cordon(snapshot, node_id, now, NodeSpec(True, reason[:200]))


def uncordon_node(snapshot: Snapshot, node_id: str, now: float) -> Plan:
    return _set_cordon(snapshot, node_id, now, NodeSpec())


def _set_cordon(snapshot: Snapshot, node_id: str, now: float, spec: NodeSpec) -> Plan:
    node = node_named(snapshot, node_id)
    draft = Draft(snapshot, now)
    if node.spec != spec:
        draft.put(dataclasses.replace(node, spec=spec))
        action = "node_cordoned" if spec.cordoned else "node_uncordoned"
        status = node.state.value.lower()
        draft.events.append(
            Event(now, action, node_id, status, node_id=node_id, reason="OPERATOR", message=spec.cordon_reason)
        )
    return draft.plan()


# ------------------------------------------------------------------ what they share


def pool_named(snapshot: Snapshot, name: str) -> Pool:
    """Raises NotFound, which names those that exist."""
    pool = snapshot.pools.get(name)
    if pool is None:
        raise NotFound(kind="pool", name=name, known=snapshot.pools)
    return pool


def worker_named(snapshot: Snapshot, worker_id: str) -> Worker:
    worker = snapshot.workers.get(worker_id)
    if worker is None:
        raise NotFound(kind="worker", name=worker_id, known=snapshot.workers)
    return worker


def node_named(snapshot: Snapshot, node_id: str) -> Node:
    node = snapshot.nodes.get(node_id)
    if node is None:
        raise NotFound(kind="node", name=node_id, known=snapshot.nodes)
    return node


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


def _check_not_deleting(pool: Pool) -> None:
    if pool.intent.deleting:
        raise FailedPrecondition(
            f"pool {pool.name!r} is being deleted.",
            reason="POOL_DELETING",
            field="pool",
            value=pool.name,
            remedy="Wait until it is gone, then create it again.",
        )


def _check_identity(snapshot: Snapshot, old: Pool, spec: PoolSpec) -> None:
    alive = [w for w in snapshot.workers.values() if w.pool == spec.name and w.state is not State.INACTIVE]
    changed = [name for name in _IDENTITY if getattr(old.spec, name) != getattr(spec, name)]
    if alive and changed:
        before = getattr(old.spec, changed[0])
        raise FailedPrecondition(
            f"pool {spec.name!r} has {len(alive)} live workers of another {changed[0]} ({before}).",
            reason="POOL_HAS_WORKERS",
            field=f"spec.{changed[0]}",
            value=getattr(spec, changed[0]),
            remedy="Scale it to 0 first, or create a second pool and delete this one.",
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


def _changes(old: PoolSpec, new: PoolSpec) -> str:
    names = [f.name for f in dataclasses.fields(PoolSpec) if getattr(old, f.name) != getattr(new, f.name)]
    return "changed: " + ", ".join(names)


def _pool_event(draft: Draft, name: str, action: str, status: str, message: str) -> None:
    draft.events.append(Event(draft.now, action, name, status, name, reason="OPERATOR", message=message))
