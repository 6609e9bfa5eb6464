"""Asking a pool's policy, and writing down what was decided and why, holds included."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from controlplane.core.draft import Draft
from controlplane.core.policies import make_policy, tells_needs_apart
from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs
from controlplane.core.signals import sample
from controlplane.core.snapshot import LoadSample, Snapshot
from controlplane.core.supply import active_workers_of, demands_of, partner_of, supplies_of
from controlplane.core.tracing import trace_id_of
from springtide.errors import SpringtideError
from springtide.model.enums import DecisionResult, State
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.record import Decision
from springtide.model.worker import Worker

_EPSILON_S = 1e-6  # wake-ups computed from floats may come a hair early


@dataclass(frozen=True, slots=True)
class Asked:
    """A policy's answer with what it saw."""

    policy: str
    answer: PolicyAnswer
    inputs: dict[str, float | int | str | bool | None]


def take_samples(draft: Draft) -> None:
    """One look at every pool's load per sample interval."""
    taken, due = samples_due(draft.snapshot, draft.pools, draft.workers_of, draft.nodes, draft.now)
    draft.samples.update(taken)
    if due is not None and due > draft.now:
        draft.sample_at = due


def samples_due(
    snapshot: Snapshot,
    pools: Iterable[str],
    workers_of: Callable[[str], list[Worker]],
    nodes: Mapping[str, Node],
    now: float,
) -> tuple[dict[str, LoadSample], float | None]:
    """(a sample of each pool whose next one is due, when the next is; None without pools)."""
    interval_s = snapshot.timing.sample_interval_s
    taken: dict[str, LoadSample] = {}
    soonest: float | None = None
    for pool in pools:
        samples = snapshot.live.samples.get(pool, ())
        due = samples[-1].at + interval_s if samples else now
        if now + _EPSILON_S >= due:
            taken[pool] = sample(snapshot, pool, workers_of(pool), nodes, now)
            due = now + interval_s
        soonest = due if soonest is None else min(soonest, due)
    return taken, soonest


def ask_policy(draft: Draft, pool: Pool) -> Asked | None:
    """The policy's answer when it is due, else None. A policy that cannot be made, or raises, holds."""
    try:
        policy = make_policy(pool.spec.policy, pool.spec.min_workers, pool.spec.max_workers)
    except SpringtideError as error:
        last = draft.snapshot.live.evaluated_at.get(pool.name)
        if last is not None and draft.now < last + draft.timing.monitoring_interval_s:
            return None
        draft.evaluated.append(pool.name)
        return _broken(draft, pool, "POLICY_INVALID", str(error))
    last = draft.snapshot.live.evaluated_at.get(pool.name)
    due = draft.now if last is None else last + policy.monitoring_interval_s
    early = draft.now + _EPSILON_S < due
    if early and last is not None and tells_needs_apart(pool.spec.policy) and _a_set_is_at_zero(draft, pool):
        due = min(due, last + draft.timing.sample_interval_s)
    if draft.now + _EPSILON_S < due and not _from_zero(draft, pool):
        draft.wake(due)
        return None
    seen = sample(draft.snapshot, pool.name, draft.workers_of(pool.name), draft.nodes, draft.now)
    draft.evaluated.append(pool.name)
    draft.wake(draft.now + policy.monitoring_interval_s)
    inputs = _inputs(draft, pool, seen)
    try:
        answer = policy.decide(inputs)
    except Exception as error:  # noqa: BLE001  a plug-in's fault holds its pool and nobody else's
        return _broken(draft, pool, "POLICY_FAILED", f"{type(error).__name__}: {error}")
    wanted = answer.wanted
    if wanted != seen.active + seen.starting:  # a hold stays a hold; the bounds are not the policy's doing
        wanted = min(max(wanted, pool.spec.min_workers), pool.spec.max_workers)
    if answer.look_again_at is not None and answer.look_again_at > draft.now:
        draft.wake(answer.look_again_at)
    described = _describe(policy, inputs) | _course(answer)
    bounded = answer if wanted == answer.wanted else dataclasses.replace(answer, wanted=wanted)
    return Asked(policy.name, bounded, described)


def _from_zero(draft: Draft, pool: Pool) -> bool:
    """Requests wait for a pool that has no worker and wants none."""
    if pool.intent.desired_workers:
        return False
    seen = sample(draft.snapshot, pool.name, draft.workers_of(pool.name), draft.nodes, draft.now)
    return seen.active + seen.starting == 0 and seen.at_least > 0


def _a_set_is_at_zero(draft: Draft, pool: Pool) -> bool:
    """Requests ask for labels that no worker of the pool has: for them it is at zero, and they do not wait for long."""
    demands = demands_of(draft.snapshot, pool.name, draft.now)
    asked = [demand.needs for demand in demands if demand.needs and demand.tasks]
    if not asked:
        return False
    present = [supply.offers for supply in supplies_of(draft, pool, frozenset().union(*asked)) if supply.present]
    return any(not any(needs <= offers for offers in present) for needs in asked)


def _broken(draft: Draft, pool: Pool, reason: str, message: str) -> Asked:
    present = draft.count(pool.name, State.STARTING, State.ACTIVE)
    return Asked(pool.spec.policy.name, PolicyAnswer(present, reason, f"the policy holds: {message}"), {})


def _inputs(draft: Draft, pool: Pool, seen: LoadSample) -> PolicyInputs:
    history = draft.snapshot.live.samples.get(pool.name, ())
    if not history or history[-1].at < draft.now:
        history = (*history, seen)
    demands = demands_of(draft.snapshot, pool.name, draft.now)
    return PolicyInputs(
        now=draft.now,
        min_workers=pool.spec.min_workers,
        max_workers=pool.spec.max_workers,
        active=seen.active,
        starting=seen.starting,
        draining=draft.count(pool.name, State.DRAINING),
        desired=pool.intent.desired_workers,
        in_flight=seen.in_flight,
        waiting=seen.waiting,
        samples=history,
        last_scale_up_at=pool.intent.last_scale_up_at,
        last_scale_down_at=pool.intent.last_scale_down_at,
        sample_interval_s=draft.timing.sample_interval_s,
        at_least=seen.at_least,
        start_ups_s=draft.snapshot.live.start_ups_s.get(pool.name, ()),
        supplies=supplies_of(draft, pool, frozenset().union(*(demand.needs for demand in demands))),
        demands=demands,
        partner=partner_of(draft, pool),
        workers=active_workers_of(draft.snapshot, draft.workers_of(pool.name), draft.now),
        role=pool.spec.role,
    )


def _describe(policy: Policy, inputs: PolicyInputs) -> dict[str, float | int | str | bool | None]:
    """What a decision record keeps: loads, counts, bounds, ages, and the policy's settings. None is unknown."""
    load = inputs.load

    def age(at: float | None) -> float | None:
        return None if at is None else round(inputs.now - at, 3)

    def ratio(workers: int) -> float | None:
        return None if load is None or workers == 0 else round(load / (workers * policy.capacity), 4)

    described: dict[str, float | int | str | bool | None] = {
        "active": inputs.active,
        "starting": inputs.starting,
        "draining": inputs.draining,
        "desired": inputs.desired,
        "min_workers": inputs.min_workers,
        "max_workers": inputs.max_workers,
        "in_flight": inputs.in_flight,
        "waiting": inputs.waiting,
        "load": load,
        "load_at_least": inputs.at_least,
        "load_ratio": ratio(inputs.active),
        "load_ratio_with_starting": ratio(inputs.active + inputs.starting),
        "samples": len(inputs.samples),
        "oldest_sample_age_s": age(inputs.samples[0].at) if inputs.samples else None,
        "since_scale_up_s": age(inputs.last_scale_up_at),
        "since_scale_down_s": age(inputs.last_scale_down_at),
    }
    for key, value in policy.settings.items():
        if isinstance(value, bool | int | float | str) or value is None:
            described.setdefault(key, value)
    return described


def _course(answer: PolicyAnswer) -> dict[str, float | int | str | bool | None]:
    """The stages that the count went through, in order, and how it is shared out."""
    course: dict[str, float | int | str | bool | None] = {
        f"step_{number}_{step.stage}": str(step) for number, step in enumerate(answer.trail, start=1)
    }
    return course | {f"part_{name or 'any'}": count for name, count in answer.parts.items()}


def record(
    draft: Draft,
    pool: Pool,
    *,
    policy: str,
    result: DecisionResult,
    reason: str,
    message: str,
    from_workers: int,
    to_workers: int,
    inputs: dict[str, float | int | str | bool | None] | None = None,
    workers: tuple[str, ...] = (),
) -> Decision:
    """Writes a decision down. One that stands (same result, reason and counts, nobody moved) only grows its count."""
    first = draft.workers.get(workers[0]) if workers else None
    decision = Decision(
        pool=pool.name,
        at=draft.now,
        policy=policy,
        result=result,
        from_workers=from_workers,
        to_workers=to_workers,
        reason=reason,
        message=message,
        inputs=inputs or {},
        workers=workers,
        trace_id=trace_id_of(first.intent.traceparent) if first is not None else "",
        last_at=draft.now,
    )
    standing = draft.snapshot.live.last_decision.get(pool.name)
    if standing is not None and standing.decision_id and not workers and _same(standing, decision):
        decision = dataclasses.replace(
            decision,
            at=standing.at,
            decision_id=standing.decision_id,
            count=standing.count + 1,
            revision=standing.revision,
        )
    draft.decisions.append(decision)
    return decision


def _same(standing: Decision, decision: Decision) -> bool:
    return (
        standing.policy == decision.policy
        and standing.result is decision.result
        and standing.reason == decision.reason
        and standing.from_workers == decision.from_workers
        and standing.to_workers == decision.to_workers
        and not standing.workers
    )
