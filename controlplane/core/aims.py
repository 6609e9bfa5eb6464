"""Where a pool should be: how many STARTING + ACTIVE workers it converges to, and who says so."""

from dataclasses import dataclass, field

from controlplane.core.decisions import Asked, ask_policy
from controlplane.core.draft import Draft
from controlplane.core.placement import CannotPlace
from controlplane.core.signals import leaving_nodes
from springtide.model.enums import State
from springtide.model.pool import Pool
from springtide.model.record import Event
from springtide.model.worker import Worker


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


def expire_hold(draft: Draft, pool: Pool) -> Pool:
    until = pool.intent.hold_until
    if until is None:
        return pool
    if draft.now < until:
        draft.wake(until)
        return pool
    draft.events.append(Event(draft.now, "pool_resumed", pool.name, "resumed", pool.name, reason="HOLD_EXPIRED"))
    return draft.pool_intent(pool, hold_until=None, hold_reason="")


def staying(draft: Draft, pool: Pool) -> list[Worker]:
    """STARTING and ACTIVE workers that do not have to leave with their node; a start that ends asleep is none."""
    workers = draft.workers_of(pool.name)
    leaving = leaving_nodes(workers, draft.nodes)
    return [
        worker
        for worker in workers
        if (intent := worker.intent).state in (State.STARTING, State.ACTIVE)
        and not intent.spare
        and intent.node_id not in leaving
    ]


def aim_of(draft: Draft, pool: Pool, present: int) -> Aim:
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


def why(aim: Aim) -> tuple[str, str]:
    if aim.asked is not None and aim.asked.answer.wanted == aim.target:
        return aim.asked.answer.reason, aim.asked.answer.message
    return aim.reason, ""
