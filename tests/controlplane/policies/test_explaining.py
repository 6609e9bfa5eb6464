"""PreviewScaling and ExplainDecision: pure parts, and through the service."""

import dataclasses

import pytest

from controlplane.core.explain import explain
from controlplane.core.preview import preview
from controlplane.core.snapshot import PoolDemand
from springtide.client.asynchronous import AsyncSpringtide
from springtide.errors import InvalidArgument, NotFound
from springtide.model.enums import DecisionResult, State
from springtide.model.pool import PolicySpec, PoolSpec
from tests.controlplane.core.world import World
from tests.controlplane.harness import FakeAgent, FakeRouter, start_control, until


def busy(policy: PolicySpec, desired: int = 1, waiting: int = 30, **spec: object) -> World:
    world = World(nodes=1, gpus=4)
    world.add_pool("demo", desired, policy=policy, **spec)
    world.turn(times=8)
    world.demand["demo"] = PoolDemand(waiting)
    world.heartbeats()
    return world


def test_preview_is_what_the_plan_then_does() -> None:
    """PL14: the same decision as the next look's, with nothing changed by asking."""
    world = busy(PolicySpec("vanilla"))
    before = world.snapshot()
    seen = preview(before, "demo", world.now)
    assert world.snapshot() == before
    assert (seen.decision.result, seen.decision.to_workers) == (DecisionResult.SCALE_UP, 2)
    assert [event.action for event in seen.events] == ["scale_up_start"]
    world.turn(times=6)
    done = [d for d in world.decisions if d.policy == "vanilla" and d.workers]
    assert (done[-1].reason, done[-1].to_workers) == (seen.decision.reason, 2)


def test_preview_of_another_policy_bounds_and_load() -> None:
    """PL14: what if."""
    world = busy(PolicySpec("static"), waiting=0)
    snapshot, now = world.snapshot(), world.now
    assert preview(snapshot, "demo", now).decision.reason == "STATIC"
    greedy = preview(snapshot, "demo", now, policy=PolicySpec("greedy"), max_workers=3)
    assert (greedy.decision.to_workers, len(greedy.events)) == (3, 2)
    loaded = preview(snapshot, "demo", now, policy=PolicySpec("vanilla"), waiting=50)
    assert loaded.decision.result is DecisionResult.SCALE_UP
    none = preview(snapshot, "demo", now, policy=PolicySpec("greedy"), max_workers=9)
    assert none.conditions[0].startswith("CANNOT_PLACE")


def test_preview_of_a_pool_that_nobody_asks_for() -> None:
    """CP6: pinned and held pools say so."""
    world = busy(PolicySpec("vanilla"))
    world.set_intent("demo", manual_workers=1)
    assert preview(world.snapshot(), "demo", world.now).decision.reason == "MANUAL"
    world.set_intent("demo", manual_workers=None, hold_until=world.now + 60, hold_reason="validation")
    held = preview(world.snapshot(), "demo", world.now).decision
    assert (held.reason, "validation" in held.message) == ("HELD", True)


def test_preview_refuses_what_no_pool_could_have() -> None:
    """Issue, bad input."""
    world = busy(PolicySpec("vanilla"))
    snapshot, now = world.snapshot(), world.now
    with pytest.raises(NotFound, match="demo"):
        preview(snapshot, "other", now)
    with pytest.raises(InvalidArgument, match="Did you mean vanilla"):
        preview(snapshot, "demo", now, policy=PolicySpec("vanila"))
    with pytest.raises(InvalidArgument, match="min_workers"):
        preview(snapshot, "demo", now, min_workers=5, max_workers=2)
    with pytest.raises(InvalidArgument, match="waiting"):
        preview(snapshot, "demo", now, waiting=-1)


def test_explanation_has_steps_in_order_and_a_hint() -> None:
    """PL14: inputs, rule, result, why not."""
    world = busy(PolicySpec("slo", {"stage_max_up": 1}), max_workers=1)
    world.turn(times=8)
    decision = world.decisions[-1]
    told = explain(decision)
    assert decision.reason == "AT_MAX"
    assert told.steps[0].startswith("need: 1 ->")
    assert any(step.startswith("bounds:") and "max_workers is 1" in step for step in told.steps)
    assert told.hints == ("Raise max_workers to let it grow.",)
    assert "max_workers: 1" in told.seen
    assert "attainment = 0.9" in told.settings
    unknown = dataclasses.replace(decision, inputs={**decision.inputs, "in_flight": None})
    assert "requests in flight: unknown" in explain(unknown).seen


async def test_through_the_service() -> None:
    """PL14, CP21: preview and explanation of a live pool; nothing is changed by a preview."""
    spec = PoolSpec("demo", "sim", min_workers=1, max_workers=3, policy=PolicySpec("vanilla"))
    control, address = await start_control()
    try:
        async with FakeAgent(address) as agent, FakeRouter(address), AsyncSpringtide(address) as client:
            await client.apply(
                {"name": "demo", "engine": "sim", "max_workers": 3, "policy": {"name": spec.policy.name}}
            )
            await until(lambda: [r for r in agent.reports.values() if r.phase == "READY"], "a worker is ready")
            await until(lambda: _active(control), "a worker is ACTIVE")
            seen = await client.preview("demo", waiting=40)
            assert seen.decision.to_workers == 2, seen
            assert seen.explanation.steps
            other = await client.preview("demo", policy="greedy")
            assert other.decision.to_workers == 3
            assert (await client.pool("demo")).status.desired_workers == 1
            latest = await client.explain(pool="demo")
            assert latest.decision.pool == "demo"
            same = await client.explain(latest.decision.decision_id)
            assert same.decision.decision_id == latest.decision.decision_id
            with pytest.raises(NotFound):
                await client.explain(999_999)
            with pytest.raises(InvalidArgument, match="no such setting"):
                await client.preview("demo", settings={"upper": 3})
    finally:
        await control.stop()


async def _active(control: object) -> bool:
    snapshot = await control.leader.snapshot()  # type: ignore[attr-defined]
    return any(worker.state is State.ACTIVE for worker in snapshot.workers.values())
