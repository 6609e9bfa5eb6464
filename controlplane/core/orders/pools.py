"""Orders that concern a pool: its spec, its pin, its hold, its end."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.orders.lookup import check_not_deleting, pool_event, pool_named
from controlplane.core.orders.workers import check_can
from controlplane.core.sleepers import retire
from controlplane.core.snapshot import Plan, Snapshot
from controlplane.core.starts import forget_attempts, is_failing
from controlplane.core.validation import checked
from springtide.errors import Conflict, FailedPrecondition, InvalidArgument
from springtide.model.enums import State
from springtide.model.pool import Pool, PoolIntent, PoolSpec

DEFAULT_HOLD_S = 600.0
LONGEST_HOLD_S = 86_400.0
_LAUNCH = ("engine", "model", "model_name", "tensor_parallel_size", "engine_args", "engine_env", "interpreter")
_IDENTITY = ("engine", "model", "model_name", "tensor_parallel_size")  # of what runs: not changed under live workers


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
        pool_event(draft, spec.name, "pool_created", "created", f"{desired} workers")
        return draft.plan()
    check_not_deleting(old)
    _check_identity(snapshot, old, spec)
    if spec != old.spec:
        draft.put(dataclasses.replace(old, spec=spec))
        pool_event(draft, spec.name, "pool_changed", "changed", _changes(old.spec, spec))
        other_engine = any(getattr(old.spec, name) != getattr(spec, name) for name in _LAUNCH)
        for worker in draft.workers_of(spec.name):
            if is_failing(worker) and not draft.full:
                draft.put(forget_attempts(worker))
            elif worker.asleep and other_engine and not worker.intent.lent_to and not draft.full:
                retire(draft, worker, "POOL_CHANGED", "it was launched in another way")
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
        pool_event(draft, name, "pool_deleting", "deleting", f"{len(alive)} live workers drain")
    return draft.plan()


def scale_pool(
    snapshot: Snapshot, name: str, now: float, *, workers: int | None = None, automatic: bool = False
) -> Plan:
    """Pins the desired count within the bounds, or gives it back to the policy. Raises InvalidArgument."""
    pool = pool_named(snapshot, name)
    check_not_deleting(pool)
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
        pool_event(draft, name, "pool_scaled", "automatic" if workers is None else "manual", told)
    return draft.plan()


def set_weights(snapshot: Snapshot, name: str, now: float, *, version: str, source: str, barrier: bool = False) -> Plan:
    """The version that the pool's workers shall serve, and the folder that it is loaded from. Raises InvalidArgument,
    and Unimplemented when an engine of the pool has said that it cannot change weights."""
    pool = pool_named(snapshot, name)
    check_not_deleting(pool)
    for field, value, most in (("version", version, 200), ("source", source, 4096)):
        if not 1 <= len(value) <= most or value != value.strip() or "\n" in value:
            remedy = f"Give 1 to {most} characters on one line."
            raise InvalidArgument(field=field, value=value[:200], problem="is no name", remedy=remedy)
    draft = Draft(snapshot, now)
    for worker in draft.workers_of(name):
        if worker.state is State.ACTIVE:
            check_can(worker, "update_weights")
    intent = pool.intent
    if (intent.weight_version, intent.weight_source, intent.weight_barrier) != (version, source, barrier):
        draft.pool_intent(pool, weight_version=version, weight_source=source, weight_barrier=barrier)
        pool_event(draft, name, "weights_set", "changed", f"version {version} from {source}")
    return draft.plan()


def pause_pool(snapshot: Snapshot, name: str, now: float, *, hold_s: float | None = None, reason: str = "") -> Plan:
    """Holds scaling until the hold expires. Failed workers are still replaced and the bounds still hold."""
    pool = pool_named(snapshot, name)
    check_not_deleting(pool)
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
    pool_event(draft, name, "pool_paused", "paused", f"for {seconds:g} s{reason and ': ' + reason[:200]}")
    return draft.plan()


def resume_pool(snapshot: Snapshot, name: str, now: float) -> Plan:
    """Ends a hold at once; without one nothing changes."""
    pool = pool_named(snapshot, name)
    draft = Draft(snapshot, now)
    if pool.intent.hold_until is not None:
        draft.pool_intent(pool, hold_until=None, hold_reason="")
        pool_event(draft, name, "pool_resumed", "resumed", "by an operator")
    return draft.plan()


def _check_identity(snapshot: Snapshot, old: Pool, spec: PoolSpec) -> None:
    alive = [w for w in snapshot.workers.values() if w.pool == spec.name and w.state is not State.INACTIVE]
    changed = [name for name in _IDENTITY if getattr(old.spec, name) != getattr(spec, name)]
    if alive and changed:
        before = getattr(old.spec, changed[0])
        raise FailedPrecondition(
            f"pool {spec.name!r} has {len(alive)} live workers of another {changed[0]} ({before}).",
            reason="POOL_HAS_WORKERS",
            field=f"spec.{'served_model_name' if changed[0] == 'model_name' else changed[0]}",
            value=getattr(spec, changed[0]),
            remedy="Scale it to 0 first, or create a second pool and delete this one.",
        )


def _changes(old: PoolSpec, new: PoolSpec) -> str:
    names = [f.name for f in dataclasses.fields(PoolSpec) if getattr(old, f.name) != getattr(new, f.name)]
    return "changed: " + ", ".join(names)
