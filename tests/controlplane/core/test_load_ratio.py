"""The load-ratio policy: every decision vector, with the guard on and off, through the policy and through the plan."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from controlplane.core.policies import make_policy
from controlplane.core.policies.load_ratio import LoadRatio
from controlplane.core.policy import PolicyInputs
from controlplane.core.snapshot import LoadSample, PoolDemand, Timing
from springtide.errors import InvalidArgument
from springtide.model.enums import DecisionResult, State
from springtide.model.pool import PolicySpec, Setting
from springtide.model.record import Decision
from tests.controlplane.core.world import World

NOW = 1_000.0


@dataclass(frozen=True)
class Vector:
    """One row of the decision vectors. `history` are earlier loads, oldest first, 5 s apart."""

    name: str
    active: int
    in_flight: int
    change_guarded: int
    change_plain: int
    reason: str
    waiting: int = 0
    history: tuple[int, ...] = ()
    min_workers: int = 1


VECTORS = (
    Vector("4/15 = 0.469: one less", 4, 15, -1, -1, "LOAD_BELOW_THRESHOLD"),
    Vector("4/16 = 0.500: strict", 4, 16, 0, 0, "WITHIN_THRESHOLDS"),
    Vector("4/25 = 0.781: none", 4, 25, 0, 0, "WITHIN_THRESHOLDS"),
    Vector("4/26 = 0.8125: one more", 4, 26, +1, +1, "LOAD_ABOVE_THRESHOLD"),
    Vector("1/0: at min", 1, 0, 0, 0, "AT_MIN"),
    Vector("8/64: at max", 8, 64, 0, 0, "AT_MAX"),
    Vector("2/7 = 0.4375: documented rule shrinks, the guard holds", 2, 7, 0, -1, "WOULD_CROSS_THRESHOLD"),
    Vector("0/0 with 3 waiting: from zero", 0, 0, +1, +1, "FROM_ZERO", waiting=3, min_workers=0),
    Vector(
        "2/40 after 1.0, 1.8: a steep overload is answered", 2, 40, +1, +1, "LOAD_ABOVE_THRESHOLD", history=(16, 29)
    ),
)
GUARDS = pytest.mark.parametrize("guard", [True, False], ids=["guard", "no guard"])
ROWS = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)


def inputs(vector: Vector, **changes: object) -> PolicyInputs:
    loads = vector.history or (vector.in_flight,) * 3
    loads = (*loads[-2:], vector.in_flight) if vector.history else loads
    samples = tuple(
        LoadSample(NOW - 5.0 * age, load, vector.waiting, vector.active, 0, load + vector.waiting)
        for age, load in zip(range(len(loads) - 1, -1, -1), loads, strict=True)
    )
    given = PolicyInputs(
        now=NOW,
        min_workers=vector.min_workers,
        max_workers=8,
        active=vector.active,
        starting=0,
        draining=0,
        desired=vector.active,
        in_flight=vector.in_flight,
        waiting=vector.waiting,
        samples=samples,
        last_scale_up_at=None,
        last_scale_down_at=None,
        at_least=vector.in_flight + vector.waiting,
    )
    return dataclasses.replace(given, **changes)  # type: ignore[arg-type]


@ROWS
@GUARDS
def test_vectors_through_the_policy(vector: Vector, guard: bool) -> None:
    """PL1, PL2, PL3: the decision vectors of the document, ours where the source had a bug."""
    answer = LoadRatio(cross_threshold_guard=guard).decide(inputs(vector))
    change = vector.change_guarded if guard else vector.change_plain
    assert answer.wanted - vector.active == change, answer
    if guard:
        assert answer.reason == vector.reason
    assert answer.message


@ROWS
@GUARDS
def test_vectors_through_the_plan(vector: Vector, guard: bool) -> None:
    """PL1, PL10: the same rows with workers, reports and a leader around them."""
    world = World(nodes=2, gpus=8)
    world.add_pool(
        desired=vector.active,
        min_workers=vector.min_workers,
        max_workers=8,
        policy=PolicySpec("load_ratio", {"cross_threshold_guard": guard, "enable_elastic": False}),
    )
    world.turn(times=6)
    assert world.count(State.ACTIVE) == vector.active
    world.pools["demo"] = dataclasses.replace(
        world.pools["demo"],
        spec=dataclasses.replace(
            world.pools["demo"].spec, policy=PolicySpec("load_ratio", {"cross_threshold_guard": guard})
        ),
    )
    world.samples.clear()
    world.demand["demo"] = PoolDemand(0)
    for load in vector.history:
        _put_load(world, load)
        world.turn(times=5)
    _put_load(world, vector.in_flight)
    world.demand["demo"] = PoolDemand(vector.waiting)
    moved: list[Decision] = []
    for _ in range(17):
        world.turn()
        moved = [decision for decision in world.decisions if decision.policy == "load_ratio" and decision.workers]
        if moved:
            break
    change = vector.change_guarded if guard else vector.change_plain
    assert len(moved) == abs(change), world.decisions
    if change:
        assert moved[0].result is (DecisionResult.SCALE_UP if change > 0 else DecisionResult.SCALE_DOWN)
        assert moved[0].to_workers - moved[0].from_workers == change
        assert moved[0].inputs["load"] == moved[0].inputs["load_at_least"]
    if change < 0:
        assert moved[0].workers == (min(world.workers, key=lambda w: (_first_load(vector, w), w)),)
    assert len(world.decisions) < 12, "a standing decision is one record"


def _put_load(world: World, total: int) -> None:
    active = sorted(w.worker_id for w in world.workers.values() if w.state is State.ACTIVE)
    share, rest = divmod(total, max(len(active), 1))
    for index, worker_id in enumerate(active):
        world.engine(worker_id).in_flight = share + (1 if index < rest else 0)


def _first_load(vector: Vector, worker_id: str) -> int:
    share, rest = divmod(vector.in_flight, vector.active)
    return share + (1 if int(worker_id.rpartition("-")[2]) <= rest else 0)


DOWN, UP = VECTORS[0], VECTORS[3]


def test_windows_hold_until_every_sample_agrees() -> None:
    """PL2: all samples of min_stable_period on one side, and the window covered by samples."""
    policy = LoadRatio()
    one_outside = inputs(UP)
    samples = list(one_outside.samples)
    samples[1] = dataclasses.replace(samples[1], in_flight=10, at_least=10)
    answer = policy.decide(dataclasses.replace(one_outside, samples=tuple(samples)))
    assert (answer.wanted, answer.reason, answer.look_again_at) == (4, "NOT_STABLE", NOW - 5 + 10)
    short = policy.decide(dataclasses.replace(one_outside, samples=one_outside.samples[1:]))
    assert (short.wanted, short.reason, short.look_again_at) == (4, "NOT_STABLE", NOW - 5 + 10)
    gap = dataclasses.replace(one_outside, samples=(one_outside.samples[0], one_outside.samples[2]))
    assert policy.decide(gap).reason == "NOT_STABLE"


def test_intervals_shorter_than_the_sampling_still_scale() -> None:
    """PL2: a pool that is looked at more often than it is sampled is not one without samples."""
    world = World(gpus=8)
    quick = {"monitoring_interval": 0.2, "min_stable_period": 3, "scale_up_cooldown": 0}
    world.add_pool(policy=PolicySpec("load_ratio", quick))
    world.turn(0.2, times=30)
    world.engine("demo-1").in_flight = 8
    world.turn(0.2, times=40)
    assert world.count(State.ACTIVE, State.STARTING) == 2


def test_unknown_is_not_zero() -> None:
    """PL3, fault F26: unknown holds; a known part that is enough by itself still grows the pool, and none shrinks
    it."""
    policy = LoadRatio()
    unknown_down = inputs(DOWN, in_flight=None, at_least=3)
    assert policy.decide(unknown_down).reason == "UNKNOWN_LOAD"
    samples = tuple(dataclasses.replace(s, in_flight=None, at_least=26) for s in inputs(UP).samples)
    partial_up = inputs(UP, in_flight=None, at_least=26, samples=samples)
    assert policy.decide(partial_up).wanted == 5
    hole = (samples[0], dataclasses.replace(samples[1], at_least=2), samples[2])
    assert policy.decide(dataclasses.replace(partial_up, samples=hole)).reason == "UNKNOWN_LOAD"
    before = tuple(dataclasses.replace(s, waiting=None) for s in inputs(DOWN).samples)
    assert policy.decide(inputs(DOWN, samples=before)).reason == "UNKNOWN_LOAD"
    at_zero = inputs(VECTORS[7], waiting=None, at_least=0)
    assert policy.decide(at_zero).reason == "UNKNOWN_LOAD"


def test_cooldowns_are_independent() -> None:
    """PL2: an up may follow a down at once, and the other way round."""
    policy = LoadRatio()
    cooling = inputs(UP, last_scale_up_at=NOW - 29.0)
    assert (policy.decide(cooling).reason, policy.decide(cooling).look_again_at) == ("SCALE_UP_COOLDOWN", NOW + 1.0)
    assert policy.decide(inputs(UP, last_scale_up_at=NOW - 30.0)).wanted == 5
    assert policy.decide(inputs(UP, last_scale_down_at=NOW)).wanted == 5
    assert policy.decide(inputs(DOWN, last_scale_down_at=NOW - 59.0)).reason == "SCALE_DOWN_COOLDOWN"
    assert policy.decide(inputs(DOWN, last_scale_down_at=NOW - 60.0, last_scale_up_at=NOW)).wanted == 3


def test_starting_counts_when_growing_and_not_when_shrinking() -> None:
    """PL4, fault F19: what is coming is asked for already; it does not make the pool look idle."""
    policy = LoadRatio()
    samples = tuple(dataclasses.replace(s, starting=1) for s in inputs(UP).samples)
    assert policy.decide(inputs(UP, starting=1, samples=samples)).reason == "WITHIN_THRESHOLDS"
    within = dataclasses.replace(VECTORS[1], in_flight=17)  # 17/32 is within, 17/40 would be below
    assert policy.decide(inputs(within, starting=1)).wanted == 5
    assert policy.decide(inputs(within, starting=1)).reason == "WITHIN_THRESHOLDS"
    only_starting = inputs(UP, active=0, starting=1, in_flight=0, waiting=3, at_least=3)
    assert policy.decide(only_starting).reason == "STARTING"


def test_last_worker_in_use_stays() -> None:
    """CP4, fault F37: with min_workers 0, one worker in use is kept, an idle one is not."""
    policy = LoadRatio(min_workers=0, cross_threshold_guard=False)
    used = Vector("", 1, 2, 0, 0, "", min_workers=0)
    assert policy.decide(inputs(used)).reason == "LAST_IN_USE"
    assert policy.decide(inputs(dataclasses.replace(used, in_flight=0))).wanted == 0


def test_switched_off() -> None:
    """CP5: enable_elastic false never asks for anything."""
    for vector in VECTORS:
        answer = LoadRatio(enable_elastic=False).decide(inputs(vector))
        assert (answer.wanted, answer.reason) == (vector.active, "ELASTIC_DISABLED")


def test_settings_have_the_documented_names_and_defaults() -> None:
    """PL1, RL2: eleven keys and one of ours."""
    policy = make_policy(PolicySpec("load_ratio", {}), 1, 8)
    assert policy.settings == {
        "scale_down_threshold": 0.5,
        "scale_up_threshold": 0.8,
        "min_workers": 1,
        "max_workers": 8,
        "requests_per_worker_capacity": 8,
        "monitoring_interval": 5.0,
        "drain_timeout": 30.0,
        "scale_down_cooldown": 60.0,
        "scale_up_cooldown": 30.0,
        "min_stable_period": 10.0,
        "enable_elastic": True,
        "cross_threshold_guard": True,
    }
    changed = make_policy(PolicySpec("load_ratio", {"requests_per_worker_capacity": 10.0, "min_workers": 2.0}), 2, 8)
    assert (changed.capacity, changed.settings["min_workers"]) == (10, 2)


BAD: tuple[tuple[str, Mapping[str, Setting], str, str], ...] = (
    ("interval longer than the window", {"monitoring_interval": 12}, "monitoring_interval", "min_stable_period"),
    ("thresholds crossed", {"scale_down_threshold": 0.9}, "scale_down_threshold", "scale_up_threshold"),
    ("thresholds equal", {"scale_down_threshold": 0.8}, "scale_down_threshold", "scale_up_threshold"),
    ("no capacity", {"requests_per_worker_capacity": 0}, "requests_per_worker_capacity", "at least 1"),
    ("half a request", {"requests_per_worker_capacity": 1.5}, "requests_per_worker_capacity", "whole number"),
    ("endless capacity", {"requests_per_worker_capacity": float("inf")}, "requests_per_worker_capacity", "whole"),
    ("negative cooldown", {"scale_up_cooldown": -1}, "scale_up_cooldown", "at least 0"),
    ("text for a number", {"drain_timeout": "long"}, "drain_timeout", "no number"),
    ("not a number", {"drain_timeout": float("nan")}, "drain_timeout", "no number"),
    ("truth for a number", {"drain_timeout": True}, "drain_timeout", "no number"),
    ("number for a truth", {"enable_elastic": 1}, "enable_elastic", "true nor false"),
    ("misspelt", {"scale_up_treshold": 0.9}, "scale_up_treshold", "Did you mean scale_up_threshold"),
    ("bound contradicts the pool", {"max_workers": 3}, "max_workers", "the pool's max_workers is 8"),
)


@pytest.mark.parametrize(("name", "settings", "field", "told"), BAD, ids=[row[0] for row in BAD])
def test_bad_settings(name: str, settings: Mapping[str, Setting], field: str, told: str) -> None:
    """PL1: each names the field, the value and the remedy."""
    with pytest.raises(InvalidArgument) as caught:
        make_policy(PolicySpec("load_ratio", settings), 1, 8)
    assert caught.value.field == f"policy.settings.{field}"
    assert told in str(caught.value)
    assert caught.value.remedy


def test_unknown_policy() -> None:
    """PL5: the error says which ones there are."""
    with pytest.raises(InvalidArgument, match=r"Did you mean load_ratio\?.*static"):
        make_policy(PolicySpec("load_ration", {}), 1, 8)


@pytest.mark.parametrize("name", ["static", "no"])
def test_static_keeps_the_desired_count(name: str) -> None:
    """PL5: static, also under its other name."""
    world = World(gpus=8)
    world.add_pool(desired=3, policy=PolicySpec(name))
    world.turn(times=6)
    _put_load(world, 24)
    world.turn(times=60)
    assert world.count(State.ACTIVE) == 3
    assert make_policy(PolicySpec(name, {"workers": 2}), 1, 8).decide(inputs(UP)).wanted == 2


def test_monitoring_interval_is_kept() -> None:
    """PL14: one evaluation per monitoring_interval, and holds are recorded once."""
    world = World(gpus=8, timing=Timing())
    world.add_pool(desired=2, policy=PolicySpec("load_ratio", {}))
    world.turn(times=6)
    _put_load(world, 10)
    world.turn(times=30)
    asked = [plan for plan in world.plans[-40:] if plan.evaluated]
    assert 5 <= len(asked) <= 8
    assert world.decisions[-1].reason == "WITHIN_THRESHOLDS"
    assert world.decisions[-1].count >= 5
