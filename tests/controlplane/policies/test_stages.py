"""Shared stages (PL2, PL4, PL12, PL14): each alone, and around a policy by `stage_` settings."""

import dataclasses

import pytest

from controlplane.core.policy import PolicyInputs
from controlplane.core.stages import (
    Course,
    bounds,
    cooldown,
    cost_gate,
    cross_threshold,
    hysteresis,
    last_in_use,
    panic_window,
    rate_limit,
    signal_age,
    stable_window,
)
from controlplane.core.stages.weights import weight_active, weight_present, workers_for
from tests.controlplane.policies.given import NOW, inputs, policy, sample, steady, supply


def course(needed: int, given: PolicyInputs) -> Course:
    return Course(given, needed, "NEED", f"{needed} needed")


def test_unknown_never_shrinks() -> None:
    """Fault F26: an unknown load holds what would shrink, and lets growth on the known part stand."""
    down = course(1, inputs(None, 4))
    signal_age(down)
    assert (down.count, down.reason) == (4, "UNKNOWN_LOAD")
    up = course(6, inputs(None, 4, at_least=99))
    signal_age(up)
    assert (up.count, up.reason) == (6, "NEED")


@pytest.mark.parametrize(
    ("needs", "needed", "count", "reason"),
    [
        ((8, 8, 8), 8, 8, "NEED"),
        ((6, 8, 8), 8, 6, "NEED"),
        ((3, 8, 8), 8, 4, "NOT_STABLE"),
        ((2, 2, 2), 2, 2, "NEED"),
        ((3, 1, 1), 1, 3, "NEED"),
        ((9, 1, 1), 1, 4, "NOT_STABLE"),
        ((None, 1, 1), 1, 4, "UNKNOWN_LOAD"),
    ],
)
def test_stable_window(needs: tuple[int | None, ...], needed: int, count: int, reason: str) -> None:
    """PL2: up to the least that stood for the window, down to the most of it."""
    samples = [sample(age, load, 4) for age, load in zip((10.0, 5.0, 0.0), needs, strict=True)]
    found = course(needed, inputs(needed, 4, samples=samples))
    stable_window(found, lambda s: None if s.load is None else float(s.load), up_s=10.0, down_s=10.0)
    assert (found.count, found.reason) == (count, reason)


def test_stable_window_that_is_not_covered_says_when_to_look_again() -> None:
    """PL2: an observation that is too short, or has a hole, holds."""
    short = course(8, inputs(8, 4, samples=steady(8, 4, seconds=4)))
    stable_window(short, lambda s: 8.0, up_s=10.0, down_s=10.0)
    assert (short.count, short.reason, short.again) == (4, "NOT_STABLE", NOW + 6.0)
    hole = course(8, inputs(8, 4, samples=[sample(200.0, 8, 4), sample(0.0, 8, 4)]))
    stable_window(hole, lambda s: 8.0, up_s=60.0, down_s=60.0)
    assert (hole.count, hole.reason) == (4, "NOT_STABLE")


def test_panic_never_goes_down_and_ends() -> None:
    """PL2, fault F22: up to the short window's average at once, no collapse after it, an end after the long one."""
    spike = [sample(float(age), 40 if age <= 6 else 4, 4) for age in range(90, -1, -1)]
    panicking = course(2, inputs(4, 4, most=50, samples=spike))
    panic_window(panicking, lambda s: float(s.load or 0), panic_s=6.0, factor=2.0, stable_s=60.0)
    assert panicking.reason == "PANIC"
    assert panicking.count > 30
    later = [dataclasses.replace(s, at=s.at - 30.0) for s in spike] + [
        sample(float(a), 4, 4) for a in range(29, -1, -1)
    ]
    held = course(2, inputs(4, 4, most=50, samples=later))
    panic_window(held, lambda s: float(s.load or 0), panic_s=6.0, factor=2.0, stable_s=60.0)
    assert (held.count, held.reason) == (4, "PANIC")
    assert held.again == pytest.approx(NOW + 31.0, abs=6.0)
    over = course(2, inputs(4, 4, samples=[dataclasses.replace(s, at=s.at - 90.0) for s in spike]))
    panic_window(over, lambda s: float(s.load or 0), panic_s=6.0, factor=2.0, stable_s=60.0)
    assert over.count == 2


def test_guards() -> None:
    """PL2: tolerance, and no step that would be taken back."""
    near = course(5, inputs(0, 4))
    hysteresis(near, 4.3, tolerance=0.1)
    assert (near.count, near.reason) == (4, "WITHIN_TOLERANCE")
    far = course(5, inputs(0, 4))
    hysteresis(far, 4.5, tolerance=0.1)
    assert far.count == 5
    crossing = course(1, inputs(7, 4))
    cross_threshold(crossing, lambda count: 7 / (count * 4), upper=0.8)
    assert (crossing.count, crossing.reason) == (3, "NEED")
    never = course(3, inputs(15, 4))
    cross_threshold(never, lambda count: 15 / (count * 4), upper=0.8)
    assert (never.count, never.reason) == (4, "WOULD_CROSS_THRESHOLD")


def test_pace() -> None:
    """PL2: cooldowns are independent; steps are bounded, and a factor never forbids one."""
    cooling = course(5, inputs(0, 4, last_scale_up_at=NOW - 10.0, last_scale_down_at=NOW - 1.0))
    cooldown(cooling, up_s=30.0, down_s=30.0)
    assert (cooling.count, cooling.reason, cooling.again) == (4, "SCALE_UP_COOLDOWN", NOW + 20.0)
    down = course(3, inputs(0, 4, last_scale_up_at=NOW - 10.0))
    cooldown(down, up_s=30.0, down_s=30.0)
    assert down.count == 3
    cooldown(down, up_s=30.0, down_s=30.0, down_after_up=True)
    assert (down.count, down.reason) == (4, "SCALE_DOWN_COOLDOWN")
    for needed, changes, count in (
        (9, {"up": 2}, 6),
        (9, {"up_factor": 1.5}, 6),
        (9, {"up_factor": 1.1}, 5),
        (0, {"down": 1}, 3),
        (0, {"down_factor": 0.5}, 2),
        (0, {"down_factor": 0.9}, 3),
    ):
        limited = course(needed, inputs(0, 4))
        rate_limit(limited, **changes)
        assert limited.count == count, changes


def test_cost_gate() -> None:
    """PL12: worth more than the mean of the last three start-ups, 10 s while there is none."""
    for benefit, costs, moves in ((9.0, (), False), (11.0, (), True), (25.0, (99.0, 20.0, 30.0, 40.0), False)):
        gated = course(5, inputs(0, 4))
        cost_gate(gated, benefit_s=benefit, costs_s=costs)
        assert (gated.count == 5) is moves
        assert moves or gated.reason == "NOT_WORTH_IT"


def test_bounds_always_hold() -> None:
    """CP4, fault F25: and the last worker in use stays."""
    for needed, present, count, reason in (
        (99, 4, 10, "NEED"),
        (99, 10, 10, "AT_MAX"),
        (0, 4, 2, "NEED"),
        (0, 2, 2, "AT_MIN"),
    ):
        bound = course(needed, inputs(0, present, least=2, most=10))
        bounds(bound)
        assert (bound.count, bound.reason) == (count, reason)
    used = course(0, inputs(3, 1))
    last_in_use(used)
    assert (used.count, used.reason) == (1, "LAST_IN_USE")


def test_weights_of_unlike_workers() -> None:
    """Issue: capacity weights. A need in standard workers becomes a count of the workers that there are."""
    big, small = supply("a", active=2, most=3, weight=2.0), supply("b", active=1, most=9, weight=0.5)
    given = inputs(0, 3, supplies=(big, small))
    assert (weight_active(given), weight_present(given)) == (4.5, 4.5)
    assert workers_for(given, 6.5) == 4  # one more big one
    assert workers_for(given, 7.5) == 6  # and two small ones
    assert workers_for(given, 2.6) == 3  # a big one less would be too few
    assert workers_for(given, 2.5) == 2
    assert workers_for(inputs(0, 3), 4.2) == 5


def test_stages_around_a_policy() -> None:
    """PL2, PL14: `stage_` settings make a policy steady that only looks at the present, and the record shows each."""
    plain = policy("vanilla")
    steadied = policy("vanilla", stage_window_up_s=30, stage_max_up=1)
    spike = (*steady(5, 1), sample(0.0, 50, 1))
    given = inputs(50, 1, samples=spike)
    assert plain.decide(given).wanted == 2
    held = steadied.decide(given)
    assert (held.wanted, held.reason) == (1, "NOT_STABLE")
    assert [step.stage for step in held.trail][-2:] == ["bounds", "window"] or "window" in [s.stage for s in held.trail]
    assert steadied.decide(inputs(50, 1)).wanted == 2
    assert steadied.decide(inputs(50, 0)).wanted == 1, "from zero passes every window"
    assert steadied.settings["stage_max_up"] == 1


def test_cost_gate_around_a_policy() -> None:
    """PL12: a surplus has to last longer than the mean start-up before it is given up."""
    gated = policy("vanilla", stage_cost_gate=True)
    brief = inputs(2, 4, samples=[*(sample(float(a), 40, 4) for a in range(60, 5, -1)), *steady(2, 4, seconds=5)])
    assert gated.decide(dataclasses.replace(brief, start_ups_s=(60.0,))).reason == "NOT_WORTH_IT"
    assert gated.decide(inputs(2, 4, start_ups_s=(60.0,))).wanted == 1
