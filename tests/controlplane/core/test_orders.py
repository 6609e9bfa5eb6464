"""Operators' orders: what they do, what the loop leaves alone, and a table of bad input (CP4, CP5, CP6, CP8)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controlplane.core import orders
from controlplane.core.snapshot import Delete, Plan, PoolDemand, Put, Snapshot
from springtide.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound, SpringtideError
from springtide.model.enums import DecisionResult, NodeState, Phase, State
from springtide.model.node import Node
from springtide.model.pool import PolicySpec, Pool, PoolSpec
from tests.controlplane.core.world import World


def running(desired: int = 2, gpus: int = 4, **spec: Any) -> World:
    world = World(gpus=gpus)
    world.add_pool(desired=desired, **spec)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == desired
    return world


def give(world: World, order: Callable[..., Plan], *args: object, **named: Any) -> Plan:
    made = order(world.snapshot(), *args, world.now, **named)
    world.apply(made)
    return made


def spec(**fields: Any) -> PoolSpec:
    return replace(PoolSpec("demo", "sim"), **fields)


# ------------------------------------------------------------------ what they do


def test_apply_creates_and_changes() -> None:
    """CP4, CP23: the initial count is clamped to the bounds; a changed bound converges."""
    world = World(gpus=8)
    give(world, orders.apply_pool, spec(min_workers=1, max_workers=3, initial_workers=9))
    assert world.pools["demo"].intent.desired_workers == 3
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 3
    give(world, orders.apply_pool, spec(min_workers=1, max_workers=2))
    world.turn(times=4)
    assert world.count(State.ACTIVE) == 2
    assert any(d.result is DecisionResult.SCALE_DOWN and d.reason == "ABOVE_MAX" for d in world.decisions)
    give(world, orders.apply_pool, spec(min_workers=4, max_workers=4))
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 4
    assert any(d.result is DecisionResult.SCALE_UP and d.reason == "BELOW_MIN" for d in world.decisions)
    assert not give(world, orders.apply_pool, spec(min_workers=4, max_workers=4)).writes, "the same again is no change"


def test_policy_settings_may_carry_the_bounds() -> None:
    """PL1: min_workers and max_workers among the settings mean the pool's bounds."""
    world = World()
    policy = PolicySpec("load_ratio", {"min_workers": 2.0, "max_workers": 4.0})
    give(world, orders.apply_pool, spec(policy=policy))
    made = world.pools["demo"].spec
    assert (made.min_workers, made.max_workers) == (2, 4)
    assert world.pools["demo"].intent.desired_workers == 2


def test_scale_pins_within_the_bounds_and_automatic_gives_back() -> None:
    """CP6: the pin is not undone by the loop."""
    world = running(1, max_workers=3)
    give(world, orders.scale_pool, "demo", workers=3)
    world.turn(times=60)
    assert world.count(State.ACTIVE) == 3
    assert world.decisions[-1].reason == "MANUAL"
    give(world, orders.scale_pool, "demo", automatic=True)
    world.turn(times=150)
    assert world.count(State.ACTIVE) == 1


def test_hold_stops_the_policy_and_not_replacement() -> None:
    """CP5: a hold expires by itself; failed workers are replaced meanwhile; the bounds hold."""
    world = running(1, max_workers=3)
    give(world, orders.pause_pool, "demo", hold_s=60.0, reason="validation")
    world.engine("demo-1").in_flight = 8
    world.turn(times=40)
    assert world.count(State.ACTIVE, State.STARTING) == 1
    world.nodes["n1"].crash("demo-1")
    world.turn(times=8)
    assert world.states() == {"demo-1": "ACTIVE"}
    world.engine("demo-1").in_flight = 8
    world.turn(times=30)
    assert world.pools["demo"].intent.hold_until is None
    assert world.count(State.ACTIVE, State.STARTING) == 2
    actions = world.actions("demo")
    assert actions == ["pool_paused", "pool_resumed"]


def test_resume_ends_a_hold() -> None:
    """CP5."""
    world = running(1)
    give(world, orders.pause_pool, "demo")
    assert world.pools["demo"].intent.hold_until == world.now + 600.0
    give(world, orders.resume_pool, "demo")
    assert "pool_resumed" in world.actions("demo")
    assert not give(world, orders.resume_pool, "demo").writes


def test_drained_worker_stays_down() -> None:
    """CP6: the desired count goes with it, down to the lower bound; the record is not started again by the loop."""
    world = running(2, max_workers=3)
    give(world, orders.drain_worker, "demo-2", reason="repair")
    world.turn(times=20)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "INACTIVE"}
    assert world.workers["demo-2"].intent.held
    give(world, orders.drain_worker, "demo-1")
    world.turn(times=8)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "INACTIVE", "demo-3": "ACTIVE"}, "min_workers is 1"


def test_drain_of_a_draining_one_keeps_it_draining() -> None:
    """CP6: the loop may cancel its own drains, not an operator's."""
    world = running(2, min_workers=0)
    world.engine("demo-1").in_flight = 1
    world.engine("demo-2").in_flight = 2
    give(world, orders.scale_pool, "demo", workers=1)
    world.turn(times=2)
    assert world.states()["demo-1"] == "DRAINING"
    give(world, orders.drain_worker, "demo-1")
    give(world, orders.scale_pool, "demo", workers=2)
    world.turn(times=6)
    assert world.states() == {"demo-1": "DRAINING", "demo-2": "ACTIVE", "demo-3": "ACTIVE"}


def test_cancel_and_activate() -> None:
    """CP8, CP6: a cancelled start stays cancelled until it is activated."""
    world = running(1, max_workers=2, min_workers=0)
    world.nodes["n1"].never_ready = True
    give(world, orders.scale_pool, "demo", workers=2)
    world.turn(times=2)
    give(world, orders.scale_pool, "demo", automatic=True)
    give(world, orders.cancel_worker, "demo-2")
    with pytest.raises(FailedPrecondition, match="not yet said that its GPUs are free"):
        give(world, orders.activate_worker, "demo-2")
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "INACTIVE"}
    world.nodes["n1"].never_ready = False
    give(world, orders.activate_worker, "demo-2")
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "ACTIVE"}
    assert not world.workers["demo-2"].intent.held
    world.turn(times=40)
    assert world.count(State.ACTIVE) == 2, "the policy leaves it alone for one cooldown"


def test_activate_after_the_attempts_ran_out() -> None:
    """CP14: an operator starts it again with a clean record."""
    world = World()
    world.add_pool(max_start_attempts=1)
    world.nodes["n1"].fail_starts = True
    world.turn(times=5)
    assert world.pools["demo"].intent.conditions
    world.nodes["n1"].fail_starts = False
    give(world, orders.activate_worker, "demo-1")
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE"}
    assert not world.pools["demo"].intent.conditions


def test_a_changed_spec_gives_failed_ones_new_attempts() -> None:
    """CP14: repairing the spec is a reason to try again."""
    world = World()
    give(world, orders.apply_pool, spec(max_start_attempts=1))
    world.nodes["n1"].fail_starts = True
    world.turn(times=5)
    world.nodes["n1"].fail_starts = False
    give(world, orders.apply_pool, spec(max_start_attempts=1, engine_args=("--better",)))
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 1


def test_cordon() -> None:
    """CP6: nothing new is placed; what runs stays."""
    world = running(1, max_workers=3)
    give(world, orders.cordon_node, "n1", reason="repair")
    give(world, orders.scale_pool, "demo", workers=2)
    world.turn(times=6)
    assert world.states() == {"demo-1": "ACTIVE"}
    assert "n1: it is cordoned (repair)" in world.pools["demo"].intent.conditions[0]
    give(world, orders.uncordon_node, "n1")
    world.turn(times=6)
    assert world.count(State.ACTIVE) == 2


def test_delete_drains_stops_and_forgets() -> None:
    """CP9: in-flight finishes first; the records go when the node has freed the slices, one pool without the other."""
    world = running(2)
    world.add_pool("other")
    world.turn(times=6)
    world.engine("demo-1").in_flight = 1
    world.demand["demo"] = PoolDemand(0)
    with pytest.raises(FailedPrecondition, match="2 live workers"):
        give(world, orders.delete_pool, "demo")
    give(world, orders.delete_pool, "demo", drain_workers=True)
    world.turn(times=4)
    assert world.states() == {"demo-1": "DRAINING", "demo-2": "INACTIVE"}
    world.engine("demo-1").in_flight = 0
    world.turn(times=4)
    assert set(world.pools) == {"other"}
    assert {worker.pool for worker in world.workers.values()} == {"other"}
    assert world.actions("demo")[-1] == "pool_deleted"
    deletes = [w for made in world.plans for w in made.writes if isinstance(w, Delete)]
    assert [d.kind for d in deletes] == ["worker", "worker", "pool"]


def test_orders_touch_only_what_they_name() -> None:
    """CP15: a repeated order changes nothing more."""
    world = running(2)
    made = give(world, orders.cordon_node, "n1")
    assert [type(write.record) for write in made.writes if isinstance(write, Put)] == [Node]
    assert not give(world, orders.cordon_node, "n1").writes
    made = give(world, orders.scale_pool, "demo", workers=2)
    assert [type(write.record) for write in made.writes if isinstance(write, Put)] == [Pool]
    assert not give(world, orders.scale_pool, "demo", workers=2).writes


# ------------------------------------------------------------------ bad input

Order = Callable[[Snapshot, float], Plan]


def apply(**fields: Any) -> Order:
    return lambda snapshot, now: orders.apply_pool(snapshot, spec(**fields), now)


def call(order: Callable[..., Plan], *args: object, **named: Any) -> Order:
    return lambda snapshot, now: order(snapshot, *args, now, **named)


NEW = {"name": "new", "served_model_name": "new"}
BAD: tuple[tuple[str, Order, type[SpringtideError], str | None, str], ...] = (
    ("min above max", apply(**NEW, min_workers=9), InvalidArgument, "spec.min_workers", "raise max_workers to 9"),
    ("negative min", apply(**NEW, min_workers=-1), InvalidArgument, "spec.min_workers", "0 or more"),
    ("too many", apply(**NEW, max_workers=10_000), InvalidArgument, "spec.max_workers", "4096"),
    ("negative initial", apply(**NEW, initial_workers=-2), InvalidArgument, "spec.initial_workers", "0 or more"),
    ("no name", apply(name=""), InvalidArgument, "spec.name", "1 to 48"),
    ("capitals", apply(name="Demo"), InvalidArgument, "spec.name", "small letters"),
    ("dash at the end", apply(name="demo-"), InvalidArgument, "spec.name", "dash"),
    ("long name", apply(name="a" * 49), InvalidArgument, "spec.name", "1 to 48"),
    ("no engine", apply(**NEW, engine=""), InvalidArgument, "spec.engine", "vllm, sglang"),
    ("model name taken", apply(name="b", served_model_name="demo"), InvalidArgument, "spec.served_model_name", "demo"),
    (
        "tp does not divide",
        apply(**NEW, tensor_parallel_size=3),
        InvalidArgument,
        "spec.tensor_parallel_size",
        "1, 2, 4",
    ),
    ("tp too large", apply(**NEW, tensor_parallel_size=8), InvalidArgument, "spec.tensor_parallel_size", "n1 has 4"),
    ("tp zero", apply(**NEW, tensor_parallel_size=0), InvalidArgument, "spec.tensor_parallel_size", "below 1"),
    ("no start time", apply(**NEW, start_timeout_s=0.0), InvalidArgument, "spec.start_timeout_s", "900"),
    ("not a number", apply(**NEW, drain_timeout_s=float("nan")), InvalidArgument, "spec.drain_timeout_s", "0 (the"),
    ("secret", apply(**NEW, engine_env={"HF_TOKEN": "x"}), InvalidArgument, "spec.engine_env.HF_TOKEN", "agent"),
    ("bad variable", apply(**NEW, engine_env={"A-B": "x"}), InvalidArgument, "spec.engine_env.A-B", "underscores"),
    ("line break", apply(**NEW, engine_args=("a\nb",)), InvalidArgument, "spec.engine_args[0]", "One argument"),
    ("negative resource", apply(**NEW, resources={"licence": -1}), InvalidArgument, "spec.resources.licence", "takes"),
    ("unknown policy", apply(**NEW, policy=PolicySpec("ratio")), InvalidArgument, "policy.name", "load_ratio"),
    (
        "unknown key",
        apply(**NEW, policy=PolicySpec("load_ratio", {"cooldown": 1})),
        InvalidArgument,
        "policy.settings.cooldown",
        "scale_up_cooldown",
    ),
    (
        "two bounds",
        apply(**NEW, max_workers=4, policy=PolicySpec("load_ratio", {"max_workers": 5})),
        InvalidArgument,
        "policy.settings.max_workers",
        "Give it once",
    ),
    ("live workers of another model", apply(model="other"), FailedPrecondition, "spec.model", "Scale it to 0"),
    (
        "live workers under another name",
        apply(served_model_name="other"),
        FailedPrecondition,
        "spec.served_model_name",
        "Scale it to 0",
    ),
    (
        "moved",
        lambda snapshot, now: orders.apply_pool(snapshot, spec(), now, expected_revision=1),
        Conflict,
        "expected_revision",
        "Read it again",
    ),
    ("unknown pool", call(orders.scale_pool, "nope", workers=1), NotFound, "pool", "Known: demo"),
    ("above the bounds", call(orders.scale_pool, "demo", workers=99), InvalidArgument, "workers", "1 to 8"),
    ("negative count", call(orders.scale_pool, "demo", workers=-1), InvalidArgument, "workers", "1 to 8"),
    ("neither", call(orders.scale_pool, "demo"), InvalidArgument, "workers", "automatic"),
    ("both", call(orders.scale_pool, "demo", workers=1, automatic=True), InvalidArgument, "workers", "automatic"),
    ("endless hold", call(orders.pause_pool, "demo", hold_s=1e9), InvalidArgument, "hold", "24 h"),
    ("no hold", call(orders.pause_pool, "demo", hold_s=0.0), InvalidArgument, "hold", "more than 0"),
    ("resume unknown", call(orders.resume_pool, "nope"), NotFound, "pool", "demo"),
    ("delete unknown", call(orders.delete_pool, "nope"), NotFound, "pool", "demo"),
    ("delete while it lives", call(orders.delete_pool, "demo"), FailedPrecondition, "drain", "Set drain"),
    ("drain unknown", call(orders.drain_worker, "demo-99"), NotFound, "worker", "demo-1"),
    ("drain of a stopped one", call(orders.drain_worker, "demo-3"), FailedPrecondition, "worker_id", "serves nothing"),
    ("long drain", call(orders.drain_worker, "demo-1", timeout_s=1e9), InvalidArgument, "timeout", "24 h"),
    ("undrain of an active", call(orders.undrain_worker, "demo-1"), FailedPrecondition, "worker_id", "draining"),
    ("activate an active", call(orders.activate_worker, "demo-1"), FailedPrecondition, "worker_id", "INACTIVE"),
    ("cancel an active", call(orders.cancel_worker, "demo-1"), FailedPrecondition, "worker_id", "Drain it"),
    ("cordon unknown", call(orders.cordon_node, "n9"), NotFound, "node", "n1"),
)


@pytest.fixture(scope="module")
def settled() -> World:
    world = running(3, gpus=4)
    give(world, orders.drain_worker, "demo-3")
    world.turn(times=4)
    assert world.states()["demo-3"] == "INACTIVE"
    return world


@pytest.mark.parametrize(("name", "order", "kind", "field", "told"), BAD, ids=[row[0] for row in BAD])
def test_bad_input(
    settled: World, name: str, order: Order, kind: type[SpringtideError], field: str | None, told: str
) -> None:
    """Issue, bad input: a clear error that names field, value and remedy, and nothing changed."""
    before = settled.snapshot()
    with pytest.raises(kind) as caught:
        order(settled.snapshot(), settled.now)
    assert caught.value.field == field
    assert told in str(caught.value)
    assert caught.value.remedy
    assert caught.value.reason.isupper()
    assert settled.snapshot() == before


def test_no_room() -> None:
    """CP6, NA14: at the upper bound, and without a free GPU."""
    world = running(1, gpus=1, max_workers=2)
    give(world, orders.drain_worker, "demo-1")
    world.turn(times=8)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "ACTIVE"}
    with pytest.raises(FailedPrecondition, match="0 of its 1 GPUs are free") as caught:
        give(world, orders.activate_worker, "demo-1")
    assert caught.value.reason == "CANNOT_PLACE"
    full = running(2, gpus=4, max_workers=2)
    full.engine("demo-2").in_flight = 1
    give(full, orders.drain_worker, "demo-2")
    full.turn()
    give(full, orders.scale_pool, "demo", workers=2)
    full.turn(times=6)
    with pytest.raises(FailedPrecondition, match="max_workers is 2"):
        give(full, orders.undrain_worker, "demo-2")


def test_orders_on_a_pool_that_is_deleted() -> None:
    """CP9."""
    world = running(1)
    world.engine("demo-1").in_flight = 1
    world.turn()
    give(world, orders.delete_pool, "demo", drain_workers=True)
    for order in (call(orders.scale_pool, "demo", workers=1), call(orders.pause_pool, "demo"), apply()):
        with pytest.raises(FailedPrecondition, match="is being deleted"):
            order(world.snapshot(), world.now)
    assert not give(world, orders.delete_pool, "demo", drain_workers=True).writes


def test_first_pool_before_any_node() -> None:
    """SM10: a pool may come first; it says what is missing and starts when a node comes."""
    world = World(nodes=0)
    give(world, orders.apply_pool, spec(tensor_parallel_size=3))
    world.turn()
    assert world.pools["demo"].intent.conditions == ("CANNOT_PLACE: no node is known; start an agent",)
    assert world.workers == {}
    world.node_records["n1"] = Node("n1", state=NodeState.GONE)
    give(world, orders.apply_pool, spec(tensor_parallel_size=5))
    assert world.workers.get("demo-1") is None or world.workers["demo-1"].intent.phase is Phase.STOPPED
