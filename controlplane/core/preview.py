"""A dry run of one pool's scaling on the live snapshot: the real plan, with nothing committed. Pure."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.core.plan import plan
from controlplane.core.policies import make_policy
from controlplane.core.snapshot import PoolDemand, Put, RouterLive, Snapshot
from springtide.errors import InvalidArgument, NotFound
from springtide.model.enums import DecisionResult, State
from springtide.model.pool import PolicySpec, Pool
from springtide.model.record import Decision, Event


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be decided now, what would happen at once, and the pool's conditions afterwards."""

    decision: Decision
    events: tuple[Event, ...]
    conditions: tuple[str, ...]


def preview(
    snapshot: Snapshot,
    name: str,
    now: float,
    *,
    policy: PolicySpec | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    waiting: int | None = None,
) -> Preview:
    """Raises NotFound, and InvalidArgument for what no pool could have."""
    pool = snapshot.pools.get(name)
    if pool is None:
        raise NotFound(kind="pool", name=name, known=snapshot.pools)
    pool = _changed(pool, policy, min_workers, max_workers)
    make_policy(pool.spec.policy, pool.spec.min_workers, pool.spec.max_workers)
    made = plan(_asking(snapshot, pool, now, waiting), now)
    found = [decision for decision in made.decisions if decision.pool == name]
    after = [
        w.record for w in made.writes if isinstance(w, Put) and isinstance(w.record, Pool) and w.record.name == name
    ]
    decision = found[-1] if found else _nobody_asks(snapshot, pool, now)
    return Preview(
        decision=dataclasses.replace(decision, decision_id=0, count=1),
        events=tuple(event for event in made.events if event.pool == name),
        conditions=(after[-1] if after else pool).intent.conditions,
    )


def _changed(pool: Pool, policy: PolicySpec | None, least: int | None, most: int | None) -> Pool:
    spec, changes = pool.spec, dict[str, Any]()
    if policy is not None:
        changes["policy"] = policy
    changes["min_workers"] = spec.min_workers if least is None else least
    changes["max_workers"] = spec.max_workers if most is None else most
    if not 0 <= changes["min_workers"] <= changes["max_workers"]:
        raise InvalidArgument(
            field="min_workers",
            value=changes["min_workers"],
            problem=f"it does not lie between 0 and max_workers ({changes['max_workers']})",
            remedy="Give bounds that leave room.",
        )
    return dataclasses.replace(pool, spec=dataclasses.replace(spec, **changes))


def _asking(snapshot: Snapshot, pool: Pool, now: float, waiting: int | None) -> Snapshot:
    """The snapshot in which the pool's policy is due now and no decision stands."""
    name, live = pool.name, snapshot.live
    changes: dict[str, Any] = {
        "evaluated_at": _without(live.evaluated_at, name),
        "last_decision": _without(live.last_decision, name),
    }
    if waiting is not None:
        if waiting < 0:
            raise InvalidArgument(field="waiting", value=waiting, problem="it is negative", remedy="Give 0 or more.")
        past = live.samples.get(name, ())
        changes["samples"] = {
            **live.samples,
            name: tuple(dataclasses.replace(s, waiting=waiting, at_least=(s.in_flight or 0) + waiting) for s in past),
        }
        changes["routers"] = {"preview": RouterLive(True, now, snapshot.revision, {name: PoolDemand(waiting)})}
    pools = {**snapshot.pools, name: pool}
    return dataclasses.replace(snapshot, pools=pools, live=dataclasses.replace(live, **changes))


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _nobody_asks(snapshot: Snapshot, pool: Pool, now: float) -> Decision:
    """No policy is asked while an operator pins the pool, holds it, or deletes it."""
    intent = pool.intent
    present = sum(
        1 for w in snapshot.workers.values() if w.pool == pool.name and w.state in (State.STARTING, State.ACTIVE)
    )
    reason, message = "HELD", f"scaling is paused: {intent.hold_reason or 'no reason given'}"
    if intent.manual_workers is not None:
        reason, message = "MANUAL", f"pinned to {intent.manual_workers} workers"
    if intent.deleting:
        reason, message = "DELETING", "the pool is being deleted"
    return Decision(
        pool=pool.name,
        at=now,
        policy="operator",
        result=DecisionResult.HOLD,
        from_workers=present,
        to_workers=intent.desired_workers,
        reason=reason,
        message=message,
        last_at=now,
    )
