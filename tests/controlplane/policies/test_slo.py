"""`slo` and what it learns (issue: measured capacity, cold starts excluded, N-1 simulated)."""

import dataclasses
import math
import random

import pytest

from controlplane.core.capacity import Curve, Targets, Window, expected, learn, met_itl, met_ttft, windows
from controlplane.core.policy import PolicyInputs
from controlplane.core.snapshot import LoadSample
from springtide.errors import InvalidArgument
from tests.controlplane.policies.given import NOW, inputs, policy

TARGETS = Targets(1.0, 0.05)
HOLDS = 2.0  # requests per second that one modelled worker holds


def history(
    rates: list[tuple[float, int]], *, seconds: int = 10, holds: float = HOLDS, youngest_s: float = 1000.0
) -> tuple[LoadSample, ...]:
    """One sample per second: (arrivals per second, ACTIVE workers) for so many seconds each. Latency is that of a
    worker that is in time up to `holds` requests per second and late above."""
    samples: list[LoadSample] = []
    arrived, tokens = 0.0, 0.0
    total = len(rates) * seconds
    for second in range(total):
        rate, active = rates[second // seconds]
        each = rate / active
        arrived += rate
        tokens += rate * 100
        late = each > holds
        samples.append(
            LoadSample(
                at=NOW - total + second + 1,
                in_flight=round(rate * 2),
                waiting=0,
                active=active,
                starting=0,
                at_least=round(rate * 2),
                arrivals_total=round(arrived),
                tokens_total=round(tokens),
                engine_waiting=0,
                ttft_p50_s=(3.0 if late else 0.3) if rate else None,
                ttft_p99_s=(9.0 if late else 0.6) if rate else None,
                youngest_s=youngest_s,
            )
        )
    return tuple(samples)


def given(samples: tuple[LoadSample, ...], active: int | None = None, **more: object) -> PolicyInputs:
    last = samples[-1]
    return inputs(
        last.in_flight,
        last.active if active is None else active,
        samples=samples,
        most=40,
        start_ups_s=(20.0,),
        **more,  # type: ignore[arg-type]
    )


def learned(samples: tuple[LoadSample, ...]) -> Curve:
    return learn(windows(samples, 10.0, NOW, 10.0, TARGETS), by_rate=True)


def test_share_met_from_quantiles() -> None:
    """Shares fall from 1 to 0 as the quantiles pass the target."""
    assert met_ttft(0.2, 0.9, 1.0) == 1.0
    assert 0.5 < met_ttft(0.9, 1.5, 1.0) < met_ttft(0.5, 1.5, 1.0) < 1.0
    assert met_ttft(2.0, 3.0, 1.0) == 0.25
    assert (met_itl(0.03, 0.05), met_itl(0.08, 0.05)) == (1.0, 0.0)
    assert met_itl(0.05, 0.05) == pytest.approx(0.5)


def test_the_capacity_is_found() -> None:
    """A worker that is late above 2 requests per second is known to hold about 2."""
    rng = random.Random(1)
    samples = history([(rng.uniform(0.5, 8.0), 2) for _ in range(60)])
    curve = learned(samples)
    assert curve.windows > 30
    assert curve.holds(0.9) == pytest.approx(HOLDS, rel=0.2)
    assert list(curve.shares) == sorted(curve.shares, reverse=True)
    assert list(curve.loads) == sorted(curve.loads)


def test_cold_engines_and_inherited_backlogs_teach_nothing() -> None:
    """Fault F28: cold-start samples are left out; so is a window that only drains what a worse one left."""
    cold = history([(float(rate), 1) for rate in range(1, 9)], youngest_s=3.0)
    assert learned(cold).windows == 0
    good = Window(NOW, 1.0, 1.0, 1.0, 1.0)
    past = [good, Window(NOW, 1.0, 6.0, 6.0, 0.0), Window(NOW, 1.0, 1.0, 9.0, 0.1), good, good]
    curve = learn(past, by_rate=True)
    assert curve.windows == 4
    assert curve.met(1.0) == 1.0


def test_what_was_never_reached_is_probed_and_no_further() -> None:
    """Without a bad window the curve goes on for a quarter beyond the highest load, and no further."""
    curve = learned(history([(1.0, 1), (1.2, 1), (1.4, 1), (1.2, 1)]))
    assert curve.holds(0.9) == pytest.approx(1.4 * 1.25, rel=0.1)
    assert curve.met(100.0) == 0.0
    assert expected(curve, [(1.4, 1.4)], 1) == 1.0
    assert expected(curve, [(5.6, 5.6)], 1) == 0.0
    assert expected(curve, [], 1) == 1.0


def mixed(last: float, active: int) -> tuple[LoadSample, ...]:
    rng = random.Random(2)
    return history([*((rng.uniform(0.5, 8.0), 2) for _ in range(40)), *[(last, active)] * 70])


def test_grows_at_once_to_what_the_present_needs() -> None:
    """Issue: no window and no cooldown before growth."""
    samples = mixed(8.0, 5)
    answer = policy("slo", 1, 40, memory_s=0.0).decide(given(samples, 2, last_scale_up_at=NOW - 1.0))
    assert answer.reason == "SLO_NEEDS_MORE"
    assert answer.wanted == pytest.approx(math.ceil(8.0 / HOLDS), abs=1)
    assert "learned from" in answer.message


def test_simulates_fewer_workers_on_its_memory_before_it_shrinks() -> None:
    """Issue: N-1 is simulated; a busy time within the memory holds, an old one does not."""
    rng = random.Random(3)
    before = [*((rng.uniform(0.5, 8.0), 2) for _ in range(40))]
    busy_lately = history([*before, *[(10.0, 6)] * 20, *[(2.0, 6)] * 5])
    held = policy("slo", 1, 40).decide(given(busy_lately))
    assert held.wanted >= 5, held
    assert any(step.stage == "memory" and "would have met" in step.note for step in held.trail)
    quiet_since = history([*before, *[(10.0, 6)] * 20, *[(2.0, 6)] * 65])
    assert policy("slo", 1, 40).decide(given(quiet_since)).wanted == 4, "0.8 of six, at least"
    freed = policy("slo", 1, 40, shrink_factor=0.1).decide(given(quiet_since))
    assert freed.wanted <= 2, freed


def test_a_steady_load_is_left_alone() -> None:
    """PL2: at what it needs, nothing moves for many looks; the dead band takes the noise."""
    made = policy("slo", 1, 40)
    for seed in range(8):
        rng = random.Random(seed)
        warm = [*((rng.uniform(0.5, 8.0), 2) for _ in range(40))]
        samples = history([*warm, *((rng.uniform(4.6, 5.4), 3) for _ in range(80))])
        answer = made.decide(given(samples))
        assert answer.wanted == 3, (seed, answer)


def test_before_anything_is_learned_the_given_capacity_counts() -> None:
    """A pool without routers that count, or without a past, is sized by requests at a time."""
    first = policy("slo", 1, 40).decide(inputs(33, 1, most=40))
    assert first.wanted == 5
    assert "(given)" in first.message


def test_unknown_holds_and_zero_wakes() -> None:
    """Fault F26, DESIGN rule 12."""
    made = policy("slo", 0, 40)
    assert made.decide(inputs(None, 3)).wanted == 3
    assert made.decide(inputs(2, 0)).reason == "FROM_ZERO"
    assert made.decide(inputs(0, 0)).wanted == 0
    last = made.decide(inputs(1, 1, samples=[]))
    assert last.wanted == 1


def test_the_down_cooldown_also_runs_after_growth() -> None:
    """PL2, fault F22: what was just started is not taken back at once."""
    rng = random.Random(4)
    samples = history([*((rng.uniform(0.5, 8.0), 2) for _ in range(40)), *[(1.0, 6)] * 70])
    answer = policy("slo", 1, 40).decide(given(samples, last_scale_up_at=NOW - 20.0))
    assert (answer.wanted, answer.reason) == (6, "SCALE_DOWN_COOLDOWN")
    assert answer.look_again_at == NOW + 40.0


def test_needs_feed_the_forecast() -> None:
    """PL9: slo+predictive forecasts in workers by what was learned, not by the given capacity."""
    samples = mixed(6.0, 4)
    answer = policy("slo+predictive", 1, 40, predictive_method="peak").decide(given(samples))
    assert answer.wanted >= 4
    assert any(step.stage == "forecast" for step in answer.trail)
    staged = policy("slo+predictive", 1, 40, stage_max_up=1).decide(given(mixed(30.0, 4)))
    assert any(step.stage == "rate" for step in staged.trail)


def test_a_router_that_returns_is_no_burst() -> None:
    """A total that jumps because a router came back says nothing about the load."""
    samples = mixed(4.0, 3)
    jumped = [
        dataclasses.replace(s, arrivals_total=(s.arrivals_total or 0) + 50_000, routers=2) if s.at > NOW - 4 else s
        for s in samples
    ]
    answer = policy("slo", 1, 40).decide(given(tuple(jumped)))
    assert (answer.wanted, answer.reason) == (3, "UNKNOWN_LOAD")


def test_nothing_is_given_back_before_a_whole_memory_was_observed() -> None:
    """DESIGN: a new leader's signals start unknown; it does not shrink on what little it has seen."""
    short = history([(1.0, 6)] * 30)
    answer = policy("slo", 1, 40).decide(given(short))
    assert (answer.wanted, answer.reason) == (6, "NOT_STABLE")
    assert answer.look_again_at == pytest.approx(NOW + 301.0, abs=2.0)
    with pytest.raises(InvalidArgument, match="memory_s"):
        policy("slo", memory_s=1300)


def test_a_gap_in_what_was_seen_is_not_taken_for_good() -> None:
    """Good at 1, bad at 6, nothing in between: hardly more than 1 is held."""
    curve = learn([*[Window(NOW, 1.0, 1.0, 1.0, 1.0)] * 4, *[Window(NOW, 1.0, 6.0, 6.0, 0.0)] * 2], by_rate=True)
    assert 1.0 <= curve.holds(0.9) <= 1.25
    assert curve.met(3.0) == 0.0
