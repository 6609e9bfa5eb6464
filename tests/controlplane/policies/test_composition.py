"""Names, composition, plug-ins and bad input (PL5, PL9, PL13), and the small policies (PL7, PL8)."""

from importlib.metadata import EntryPoint

import pytest

from controlplane.core.forecast import buckets, quantile, start_up_s, trend, weighted_quantile
from controlplane.core.policies import RECOMMENDED, Factory, known_policies, make_policy, register
from controlplane.core.policies.content import ALLOCATE, normalised
from controlplane.core.policies.plugins import PLUGINS
from controlplane.core.policies.static import Static
from controlplane.core.policy import Partner, PolicyAnswer, PolicyInputs
from controlplane.core.routing import routing_table
from controlplane.core.snapshot import PoolDemand
from controlplane.plugins import load_policies
from springtide.errors import InvalidArgument
from springtide.model.enums import Role, State
from springtide.model.pool import PolicySpec, RoutingSpec
from springtide.model.routing_policy import ROUTING_POLICIES
from tests.controlplane.core.world import World
from tests.controlplane.policies.given import NOW, inputs, policy, sample, steady

TABLE = "mon-fri 08:00-20:00 2 8 # working hours\n* 20:00-08:00 0 2\n"
MONDAY = 1_704_067_200.0  # 2024-01-01, a Monday, 00:00 UTC


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "settings", "plain", "allocate"),
    [
        ("allocate=capability; scaling=vanilla", {}, "vanilla", "capability"),
        (" scaling = no ;allocate=even_load; ", {}, "no", "even_load"),
        ("load_ratio", {"policy_content": "allocate=even_load; scaling=capability"}, "capability", "even_load"),
        ("allocate=even_load; scaling=fixed_elastic", {}, "fixed_elastic", "even_load"),
        ("slo", {}, "slo", None),
    ],
)
def test_string_form(name: str, settings: dict[str, str], plain: str, allocate: str | None) -> None:
    """PL5, seed 2 §2.02: `allocate=X; scaling=Y`, as a name or as policy_content."""
    spec, told = normalised(PolicySpec(name, settings))
    assert (spec.name, told) == (plain, allocate)
    assert make_policy(PolicySpec(name, settings), 0, 8)


@pytest.mark.parametrize(
    ("policy_spec", "own", "chosen"),
    [
        (PolicySpec("allocate=capability; scaling=vanilla"), RoutingSpec(), "capabilities"),
        (PolicySpec("allocate=even_load; scaling=vanilla"), RoutingSpec(), "least_in_flight"),
        (
            PolicySpec("slo", {"policy_content": "allocate=capability; scaling=capability"}),
            RoutingSpec(),
            "capabilities",
        ),
        (PolicySpec("allocate=capability; scaling=vanilla"), RoutingSpec("sticky"), "sticky"),
        (PolicySpec("capability"), RoutingSpec(), "least_in_flight"),
        (PolicySpec("allocate=of_a_later_version; scaling=vanilla"), RoutingSpec(), "least_in_flight"),
    ],
)
def test_allocate_is_how_routers_choose(policy_spec: PolicySpec, own: RoutingSpec, chosen: str) -> None:
    """PL5, seed 2 §2.02, §2.03: `allocate` is the pool's routing, unless it has one of its own; routers are told."""
    world = World()
    world.add_pool(policy=policy_spec, routing=own)
    [pool] = routing_table(world.snapshot()).pools.values()
    assert pool.routing.name == chosen
    assert set(ALLOCATE.values()) <= set(ROUTING_POLICIES)


def test_string_form_with_a_count() -> None:
    """PL5: static[:N]."""
    assert policy("allocate=even_load; scaling=static:3").decide(inputs(0, 1)).wanted == 3


BAD: tuple[tuple[str, str, dict[str, object], str], ...] = (
    ("no such policy", "vanila", {}, "Did you mean vanilla?"),
    ("no such part", "slo+predictiv", {}, "Did you mean predictive?"),
    ("a part twice", "slo+predictive+predictive", {}, "twice"),
    ("no such allocation", "allocate=best; scaling=no", {}, "there is no allocation 'best'"),
    ("one key only", "scaling=vanilla", {}, "it does not say allocate"),
    ("a third key", "allocate=even_load; scaling=no; x=1", {}, "'x=1' is none of its two parts"),
    ("a key twice", "scaling=no; scaling=no; allocate=even_load", {}, "said twice"),
    ("no scaling of that name", "allocate=even_load; scaling=nothing", {}, "there is no such policy"),
    ("no text", "vanilla", {"policy_content": 3}, "it is no text"),
    ("unknown key", "vanilla", {"upper_ratio": 3}, "Did you mean upper_task_ratio?"),
    ("unknown key of a part", "slo+predictive", {"predictive_led_s": 3}, "Did you mean predictive_lead_s?"),
    ("a part's key without the part", "slo", {"predictive_lead_s": 3}, "has no such setting"),
    ("unknown stage", "slo", {"stage_maxup": 1}, "Did you mean stage_max_up?"),
    ("interval longer than the window", "vanilla", {"stage_window_up_s": 4}, "asked every 5 s"),
    ("crossed", "vanilla", {"upper_task_ratio": 1, "lower_task_ratio": 2}, "must be below upper_task_ratio"),
    ("crossed capability", "capability", {"lower_task_ratio": 5}, "must be below upper_task_ratio"),
    ("crossed forecast", "slo+predictive", {"predictive_down_factor": 2}, "must be below"),
    ("crossed thresholds", "thresholds", {"signal": "use", "up": 0.1}, "it must be below up"),
    ("no known word", "vanilla", {"rule": "fast"}, "Give one of declarative, step"),
    ("no number", "slo", {"attainment": "high"}, "it is no number"),
    ("bound contradicts", "vanilla", {"max_workers": 3}, "the pool's max_workers is 10"),
    ("no table", "schedule", {}, "line 1: there is no entry"),
    ("no time", "schedule", {"schedule_table": "* 25:00-26:00 1 2"}, "line 1"),
    ("no day", "schedule", {"schedule_table": "* 01:00-02:00 1 2\nnoday 01:00-02:00 1 2"}, "line 2: 'noday' is no day"),
    ("crossed bounds", "schedule", {"schedule_table": "* 01:00-02:00 3 2"}, "least (3) is above its most (2)"),
)


@pytest.mark.parametrize(("name", "spec", "settings", "told"), BAD, ids=[row[0] for row in BAD])
def test_bad_input(name: str, spec: str, settings: dict[str, object], told: str) -> None:
    """Issue, bad input: field, value and remedy."""
    with pytest.raises(InvalidArgument) as caught:
        make_policy(PolicySpec(spec, settings), 0, 10)  # type: ignore[arg-type]
    assert told in str(caught.value)
    assert caught.value.field
    assert caught.value.remedy


def test_every_policy_holds_the_bounds_and_an_unknown_load() -> None:
    """CP4, fault F26: whatever the policy, nothing is answered outside of the bounds, and unknown does not shrink."""
    for name in [name for name in known_policies() if name not in PLUGINS]:
        extra: dict[str, str] = {"rules": "1,static"} if name == "waterfall" else {}
        extra |= {"schedule_table": TABLE} if name == "schedule" else {}
        made = policy(name, 1, 6, **extra)
        for load, active in ((0, 6), (500, 6), (500, 1), (0, 1), (30, 3), (None, 4)):
            answer = made.decide(inputs(load, active, least=1, most=6))
            assert 1 <= answer.wanted <= 6, (name, load, active, answer)
            if load is None and name != "schedule":
                assert answer.wanted >= active, (name, answer)
            assert answer.reason
            assert answer.message
        assert made.capacity >= 1
        assert made.settings is not None
    assert policy(RECOMMENDED.name)


# ---------------------------------------------------------------- plug-ins


class Raises:
    """A plug-in with a fault."""

    name = "raises"
    monitoring_interval_s = 1.0
    capacity = 8
    drain_timeout_s = 1.0
    settings: dict[str, object] = {}  # noqa: RUF012 - a plug-in as people write them

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        raise ZeroDivisionError("no such luck")


class Odd(Raises):
    """A plug-in whose answer cannot be meant."""

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        return PolicyAnswer("many", "X", "y")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factory", "reason", "told"),
    [
        (lambda raw, least, most: Raises(), "POLICY_FAILED", "no such luck"),
        (lambda raw, least, most: Odd(), "POLICY_FAILED", "no count of workers"),
        (lambda raw, least, most: 1 / 0, "POLICY_INVALID", "division by zero"),
        (lambda raw, least, most: object(), "POLICY_INVALID", "AttributeError"),
    ],
    ids=["decide raises", "odd answer", "factory raises", "no policy"],
)
def test_a_plug_in_that_fails_holds_its_own_pool_only(
    monkeypatch: pytest.MonkeyPatch, factory: Factory, reason: str, told: str
) -> None:
    """PL13, issue: the pool holds, the decision says why, others go on."""
    monkeypatch.setitem(PLUGINS, "faulty", factory)
    world = World(gpus=8)
    world.add_pool("bad", 2, policy=PolicySpec("faulty"))
    world.add_pool("good", 1, policy=PolicySpec("vanilla"))
    world.turn(times=8)
    world.demand["bad"] = world.demand["good"] = PoolDemand(50)
    world.turn(times=20)
    assert world.count(State.ACTIVE, pool="bad") == 2
    assert world.count(State.ACTIVE, pool="good") >= 2
    last = [d for d in world.decisions if d.pool == "bad"][-1]
    assert last.reason == reason
    assert told in last.message
    assert last.count > 1, "it is written down once"


def test_plug_ins_by_entry_point(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """PL13: one that cannot be loaded is known and refused with its reason; a name of ours cannot be taken."""
    monkeypatch.setattr("controlplane.core.policies.plugins.PLUGINS", PLUGINS)
    group = "springtide.policies"
    found = [
        EntryPoint("test_fixed", "controlplane.core.policies.static:Static.read", group),
        EntryPoint("test_gone", "no_such_package:make", group),
        EntryPoint("slo", "controlplane.core.policies.static:Static.read", group),
    ]
    try:
        assert load_policies(found) == ["test_fixed", "test_gone"]
        assert make_policy(PolicySpec("test_fixed", {"workers": 3}), 0, 8).decide(inputs(0, 1)).wanted == 3
        assert make_policy(PolicySpec("test_fixed+predictive"), 0, 8).name == "test_fixed+predictive"
        with pytest.raises(InvalidArgument, match=r"could not be loaded.*no_such_package"):
            make_policy(PolicySpec("test_gone"), 0, 8)
        assert type(make_policy(PolicySpec("slo"), 0, 8)) is not Static
        assert "left out" in caplog.text
    finally:
        PLUGINS.pop("test_fixed", None)
        PLUGINS.pop("test_gone", None)


def test_a_registered_policy_is_the_same_object_live_and_simulated() -> None:
    """PL13: what is registered is what make_policy gives, settings and all."""
    try:
        register("test_same", Static.read)
        made = make_policy(PolicySpec("test_same", {"workers": 2}), 0, 8)
        assert dict(made.settings) == {"workers": 2, "requests_per_worker_capacity": 8}
        assert "test_same" in known_policies()
    finally:
        PLUGINS.pop("test_same", None)


# ---------------------------------------------------------------- small policies


def test_greedy() -> None:
    """PL7: fills to the cap, or to a target that may be adjusted."""
    assert policy("greedy").decide(inputs(0, 2)).wanted == 10
    assert policy("greedy", target=4).decide(inputs(0, 2)).wanted == 4
    assert policy("greedy", target=40).decide(inputs(0, 2)).wanted == 10


@pytest.mark.parametrize(
    ("settings", "given", "wanted"),
    [
        ({"signal": "queue"}, inputs(0, 2, waiting=11), 3),
        ({"signal": "queue"}, inputs(3, 2, waiting=0), 1),
        ({"signal": "use"}, inputs(26, 4), 5),
        ({"signal": "use"}, inputs(5, 4), 3),
        ({"signal": "use"}, inputs(7, 4), 4),
        ({}, inputs(0, 2, role=Role.DECODE, samples=[sample(0.0, 4, 2, kv_use=0.81)]), 3),
        ({}, inputs(0, 2, role=Role.DECODE, samples=[sample(0.0, 4, 2, kv_use=0.29)]), 1),
        ({}, inputs(16, 2, role=Role.PREFILL), 3),
        ({}, inputs(5, 2, role=Role.PREFILL), 1),
        ({}, inputs(10, 2, role=Role.PREFILL), 2),
    ],
)
def test_thresholds(settings: dict[str, object], given: PolicyInputs, wanted: int) -> None:
    """PL8: queue length, utilisation < 0.2, load 0.8 / 0.3 by role."""
    assert policy("thresholds", **settings).decide(given).wanted == wanted  # type: ignore[arg-type]


def test_role_ratio() -> None:
    """Issue: prefill and decode pools keep their ratio; without a partner nothing changes."""
    decode = Partner("token", 9, 0, 9)
    follow = policy("role_ratio", role_ratio_per_partner=0.33)
    assert follow.decide(inputs(0, 1, partner=decode)).wanted == 3
    assert follow.decide(inputs(0, 1)).wanted == 0
    floor = policy("vanilla+role_ratio", role_ratio_per_partner=0.33)
    assert floor.decide(inputs(15, 5, partner=decode)).wanted == 5
    exact = policy("vanilla+role_ratio", role_ratio_per_partner=0.33, role_ratio_exact=True)
    assert (exact.decide(inputs(15, 5, partner=decode)).wanted, exact.decide(inputs(15, 5)).wanted) == (3, 5)


def test_partner_pools_in_the_plan() -> None:
    """Issue: the pool of the other role and the same model is the partner."""
    world = World(nodes=2, gpus=4)
    world.add_pool("token", 4, role=Role.DECODE, served_model_name="m", policy=PolicySpec("static"))
    world.add_pool(
        "prompt",
        1,
        role=Role.PREFILL,
        served_model_name="m",
        policy=PolicySpec("role_ratio", {"role_ratio_per_partner": 0.5}),
    )
    world.turn(times=15)
    assert world.count(State.ACTIVE, pool="prompt") == 2


def test_schedule() -> None:
    """Issue: bounds by a table, over any policy; a higher lower bound is answered ahead by the start-up time."""
    table = policy("schedule", 0, 6, schedule_table=TABLE)
    night, day = MONDAY + 3 * 3600, MONDAY + 9 * 3600
    assert table.decide(inputs(0, 4, most=6, now=night)).wanted == 2
    assert table.decide(inputs(0, 1, most=6, now=day)).wanted == 2
    assert table.decide(inputs(0, 6, most=6, now=day)).wanted == 6
    eight = MONDAY + 8 * 3600
    before = inputs(0, 0, most=6, now=eight - 100, start_ups_s=(120.0,))
    assert table.decide(before).wanted == 2
    assert table.decide(inputs(0, 0, most=6, now=eight - 200, start_ups_s=(120.0,))).wanted == 0
    saturday = MONDAY + 5 * 86_400 + 9 * 3600
    assert table.decide(inputs(0, 5, most=6, now=saturday)).wanted == 5, "no line: the pool's bounds"
    shifted = policy("schedule", 0, 6, schedule_table=TABLE, schedule_utc_offset_s=-7200)
    assert shifted.decide(inputs(0, 4, most=6, now=day)).wanted == 2
    over = policy("vanilla+schedule", 0, 6, schedule_table=TABLE)
    answer = over.decide(inputs(100, 2, most=6, now=night))
    assert (answer.wanted, answer.trail[-1].stage) == (2, "schedule")
    assert answer.look_again_at is not None


# ---------------------------------------------------------------- forecasts


def test_forecast_arithmetic() -> None:
    """PL9: buckets, trend, quantiles, lead time."""
    points = [(NOW - age, float(age)) for age in range(40, 0, -1)]
    assert [round(b.value, 1) for b in buckets(points, 10.0, NOW)][-1] == 5.0
    assert trend([], 3) == 0.0
    assert trend([4.0] * 20, 5) == pytest.approx(4.0)
    assert trend([float(i) for i in range(30)], 5) > 29.0
    assert trend([30.0 - i for i in range(30)], 50) >= 0.0
    assert quantile([3, 1, 2], 0.5) == 2
    assert weighted_quantile([(1.0, 1.0), (9.0, 9.0)], 0.5) == 9.0
    assert weighted_quantile([(1.0, 9.0), (9.0, 1.0)], 0.9) == 1.0
    assert (start_up_s((10.0, 50.0, 20.0)), start_up_s(()), start_up_s((9.0,), 5.0)) == (20.0, 60.0, 5.0)


@pytest.mark.parametrize(
    ("load", "present", "floor"),
    [(40, 4, 5), (38, 4, 4), (20, 4, 4), (16, 4, 4), (15, 4, 2), (400, 4, 10)],
)
def test_predictive_in_its_simplest_form(load: int, present: int, floor: int) -> None:
    """PL9, seed 4 §4.22: more above 1.2 times the capacity, fewer only below 0.5 times; a steady load is its own
    forecast."""
    assert policy("predictive").decide(inputs(load, present, samples=steady(load, present))).wanted == floor


def test_predictive_is_a_floor_and_looks_one_start_up_ahead() -> None:
    """PL9: it raises what the policy inside wants and never lowers it; the lead is the measured start-up time."""
    rising = [sample(float(age), 60 - age // 2, 5) for age in range(120, -1, -1)]
    given = inputs(60, 5, samples=rising, start_ups_s=(60.0,))
    soon = policy("static+predictive").decide(given)
    far = policy("static+predictive").decide(inputs(60, 5, samples=rising, start_ups_s=(300.0,)))
    assert 5 < soon.wanted <= far.wanted
    assert "in 60 s" in soon.message
    assert soon.reason == "FORECAST"
    idle = inputs(0, 5, samples=steady(0, 5))
    assert policy("greedy+predictive").decide(idle).wanted == 10
    peaked = (*(sample(float(a), 60 if 300 < a < 320 else 4, 5) for a in range(500, -1, -1)),)
    assert policy("static+predictive", predictive_method="peak").decide(inputs(4, 5, samples=peaked)).wanted == 8
    share = policy("vanilla+predictive", predictive_method="share", predictive_share=0.5)
    assert share.decide(inputs(4, 5, samples=peaked)).wanted < 8


def test_predictive_without_a_known_load_changes_nothing() -> None:
    """Fault F26."""
    answer = policy("static+predictive").decide(inputs(None, 3, samples=steady(None, 3)))
    assert (answer.wanted, answer.trail[-1].note) == (3, "no load is known to forecast from")
