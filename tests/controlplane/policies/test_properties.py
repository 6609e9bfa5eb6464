"""Properties for any input (PL2, PL4, CP4): curves, forecasts, waterfalls, and every policy within its bounds."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.core.capacity import PROBE, Window, expected, learn
from controlplane.core.forecast import trend, weighted_quantile
from controlplane.core.policies import known_policies
from controlplane.core.policies.capability import Capability
from controlplane.core.policies.plugins import PLUGINS
from controlplane.core.policies.slo import Slo
from controlplane.core.policies.waterfall import Rule, Waterfall
from controlplane.core.policy import Demand, Supply
from controlplane.core.snapshot import LoadSample
from springtide.model.enums import Role
from tests.controlplane.policies.given import NOW, inputs, policy

FEW = settings(max_examples=60, deadline=None)
keys = st.frozensets(st.sampled_from(("gpu", "tpu", "big")), max_size=2)
demands = st.lists(st.builds(Demand, keys, st.integers(0, 200)), max_size=4, unique_by=lambda d: d.needs)
supplies = st.lists(
    st.builds(
        Supply, st.sampled_from("abc"), keys, st.integers(0, 9), st.integers(0, 3), st.none() | st.integers(12, 30)
    ),
    max_size=5,
)
windows = st.lists(
    st.builds(
        Window,
        st.just(NOW),
        st.floats(1, 9),
        st.floats(0, 50),
        st.floats(0, 50),
        st.none() | st.floats(0, 1),
        st.booleans(),
    ),
    max_size=40,
)


@FEW
@example([Window(NOW, 1.0, 0.0, held, 0.7506197645280297) for held in (1.0, 49.0, 49.0)], False, 1.0)
@example([Window(NOW, 1.0, 0.0, held, met) for held, met in ((5e-324, 0.75), (4.0, 0.75), (0.4, 0.0))], False, 0.5)
@given(windows, st.booleans(), st.floats(0.05, 1))
def test_a_curve_never_rises_and_holds_what_it_says(past: list[Window], by_rate: bool, goal: float) -> None:
    """More load per worker never meets more; what it is said to hold meets the goal; more workers never meet less."""
    curve = learn(past, by_rate=by_rate)
    assert list(curve.loads) == sorted(set(curve.loads))
    assert all(a >= b for a, b in zip(curve.shares, curve.shares[1:], strict=False))
    held = curve.holds(goal)
    if held > 0:
        assert curve.met(held * 0.999) >= goal - 1e-6
        assert held <= PROBE * curve.loads[-1] + 1e-9
    loads = [(window.rate or 0.0, 1.0) for window in past]
    met = [expected(curve, loads, workers) for workers in (1, 2, 4, 8, 16)]
    assert met == sorted(met)


@FEW
@given(windows, st.floats(0.05, 0.99), st.integers(1, 64))
def test_the_fewest_are_the_fewest(past: list[Window], goal: float, most: int) -> None:
    """One fewer would not have met the goal."""
    curve = learn(past, by_rate=True)
    loads = [(window.rate, 1.0) for window in past if window.rate]
    found = Slo._fewest(curve, loads, goal, most)
    assert 0 <= found <= most
    if found > 0:
        assert expected(curve, loads, found - 1) < goal
    if found < most:
        assert expected(curve, loads, found) >= goal


@FEW
@given(demands, supplies)
def test_capability_asks_for_what_can_be_served_and_counts_a_worker_once(
    asked: list[Demand], there: list[Supply]
) -> None:
    """PL5, PL6: each set gets at least what its requests need; what is kept beyond it is not more than is there."""
    made = Capability()
    wanted, unmet, _ = made.desired(asked, there)
    busy = [demand for demand in asked if demand.tasks > 0]
    assert len(wanted) + len(unmet) == len(busy)
    need = {",".join(sorted(d.needs)): max(1, -(-d.tasks // 5)) for d in busy}
    assert all(wanted[name] >= need[name] for name in wanted)
    kept = sum(wanted[name] - need[name] for name in wanted)
    assert kept <= sum(supply.present for supply in there)


@FEW
@given(demands, supplies, st.lists(st.integers(0, 3), min_size=3, max_size=3), st.none() | st.integers(0, 8))
def test_a_waterfall_never_passes_a_cap_and_spreads_once(
    asked: list[Demand], there: list[Supply], priorities: list[int], most: int | None
) -> None:
    """PL5: per provisioner at most its cap; in total at most what the requests need."""
    rules = [Rule(priority, name, most) for priority, name in zip(priorities, "abc", strict=True)]
    parts = Waterfall(rules="1,a").share(rules, asked, there)
    busy = [demand for demand in asked if demand.tasks > 0]
    if not busy:
        return
    assert sum(parts.values()) <= sum(max(1, -(-d.tasks // 10)) for d in busy)
    for name in "abc":
        given_to = sum(count for (provisioner, _), count in parts.items() if provisioner == name)
        assert most is None or given_to <= most
        assert given_to == 0 or any(supply.provisioner == name for supply in there)


@FEW
@given(st.lists(st.floats(0, 1e6), max_size=50), st.floats(0, 100))
def test_a_forecast_is_a_count(series: list[float], steps: float) -> None:
    """PL9: never negative, never endless."""
    assert 0 <= trend(series, steps) < 1e9
    pairs = [(value, value) for value in series]
    assert weighted_quantile(pairs, 0.9) <= max(series, default=0.0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_policy_stays_within_its_bounds(data: st.DataObject) -> None:
    """CP4, fault F25, F26: any past, any counts: the answer is within the bounds or the present count, with a reason;
    an unknown load never shrinks."""
    name = data.draw(st.sampled_from([n for n in known_policies() if n not in PLUGINS]))
    extra = {"waterfall": {"rules": "1,a\n2,b"}, "schedule": {"schedule_table": "* 00:00-24:00 0 99"}}.get(name, {})
    least = data.draw(st.integers(0, 3))
    most = data.draw(st.integers(max(least, 1), 9))
    active, starting = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 3))
    loads = data.draw(st.lists(st.none() | st.integers(0, 400), min_size=1, max_size=60))
    samples = [
        LoadSample(NOW - 5.0 * (len(loads) - 1 - i), load, 0, active, starting, load or 0, arrivals_total=i * 3)
        for i, load in enumerate(loads)
    ]
    given_inputs = inputs(
        loads[-1],
        active,
        starting=starting,
        least=least,
        most=most,
        samples=samples,
        role=data.draw(st.sampled_from(list(Role))),
        supplies=tuple(data.draw(supplies)),
        start_ups_s=tuple(data.draw(st.lists(st.floats(1, 600), max_size=4))),
    )
    answer = policy(name, least, most, **extra).decide(given_inputs)
    present = active + starting
    assert least <= answer.wanted <= most or answer.wanted == present, answer
    assert answer.reason == answer.reason.upper()
    assert answer.message
    if loads[-1] is None and least <= present <= most:
        assert answer.wanted >= present or name == "schedule", answer
