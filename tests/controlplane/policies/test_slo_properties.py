"""Properties of `slo` for any past (PL2, PL9, PL14, fault F22): what it may give back, what growth may follow from, and
that what it keeps of earlier looks changes nothing."""

import dataclasses
import math
from collections import deque

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controlplane.core.capacity import Targets, expected, learn, windows
from controlplane.core.policies.slo import Slo
from controlplane.core.policy import PolicyInputs
from controlplane.core.snapshot import LoadSample
from tests.controlplane.policies.given import NOW, inputs, policy

FEW = settings(max_examples=60, deadline=None)
TARGETS = Targets(1.0, 0.05)
MOST = 12

phases = st.lists(  # ten seconds each: arrivals per second, ACTIVE workers, half and nearly all first tokens (seconds)
    st.tuples(st.floats(0, 12), st.integers(1, MOST), st.floats(0.05, 3), st.floats(0.1, 9)), min_size=1, max_size=25
)


def past(seen: list[tuple[float, int, float, float]], repeated: int) -> tuple[LoadSample, ...]:
    """One sample per second, up to now; each phase stands for so many in a row."""
    spread = [phase for phase in seen for _ in range(repeated * 10)]
    samples, arrived = [], 0.0
    for second, (rate, active, p50_s, p99_s) in enumerate(spread):
        arrived += rate
        samples.append(
            LoadSample(
                at=NOW - len(spread) + second + 1,
                in_flight=round(rate * 2),
                waiting=0,
                active=active,
                starting=0,
                at_least=round(rate * 2),
                arrivals_total=round(arrived),
                routers=1,
                engine_waiting=0,
                ttft_p50_s=p50_s,
                ttft_p99_s=max(p50_s, p99_s),
                youngest_s=1000.0,
            )
        )
    return tuple(samples)


def seen_by(samples: tuple[LoadSample, ...], **more: object) -> PolicyInputs:
    last = samples[-1]
    return inputs(last.in_flight, last.active, samples=samples, most=MOST, start_ups_s=(20.0,), **more)  # type: ignore[arg-type]


def slo(**more: float) -> Slo:
    made = policy("slo", 0, MOST, **more)
    assert isinstance(made, Slo)
    return made


@FEW
@given(phases, st.floats(0, 4), st.integers(5, 25), st.floats(0.3, 0.99), st.floats(0.1, 1))
def test_it_shrinks_to_what_would_have_met_the_goal(
    seen: list[tuple[float, int, float, float]], last: float, quiet: int, attainment: float, shrink_factor: float
) -> None:
    """Issue, PL2: what it gives back was simulated on the whole memory, and is no more than one decision may give."""
    made = slo(attainment=attainment, memory_s=150.0, shrink_factor=shrink_factor)
    samples = past([*seen, *[(last, MOST, 0.2, 0.4)] * quiet], 1)
    given_inputs = seen_by(samples)
    answer, present = made.decide(given_inputs), given_inputs.present
    assume(answer.wanted < present)
    assert samples[0].at <= NOW - made.memory_s, "a whole memory was observed"
    assert answer.wanted >= min(present - 1, math.floor(present * shrink_factor))
    cut = windows(samples, made.learn_window_s, NOW, made.warm_s, TARGETS)
    known = made._known(cut)
    loads = [(load, load) for w in cut if w.at > NOW - made.memory_s and (load := w.load(known.by_rate))]
    if known.learned:
        assert expected(known.curve, loads, answer.wanted) >= known.goal - 1e-9
    else:
        assert answer.wanted * known.holds >= max((load for load, _ in loads), default=0.0) - 1e-6


@FEW
@given(phases, st.integers(1, 6), st.integers(0, 40), st.integers(1, 200))
def test_more_that_waits_never_asks_for_fewer(
    seen: list[tuple[float, int, float, float]], repeated: int, waiting: int, more: int
) -> None:
    """A longer queue is a reason for more workers, never for fewer."""
    made, samples = slo(), past(seen, repeated)
    fewer = made.decide(seen_by(samples, waiting=waiting))
    assert made.decide(seen_by(samples, waiting=waiting + more)).wanted >= fewer.wanted


@FEW
@given(phases, st.integers(1, 6), st.floats(0, 59), st.booleans())
def test_nothing_is_given_back_while_it_cools_down(
    seen: list[tuple[float, int, float, float]], repeated: int, since_s: float, after_growth: bool
) -> None:
    """PL2, fault F22: neither after the last that was given back nor after the last that was started."""
    last: dict[str, object] = {"last_scale_up_at" if after_growth else "last_scale_down_at": NOW - since_s}
    given_inputs = seen_by(past(seen, repeated), **last)
    assert slo().decide(given_inputs).wanted >= given_inputs.present


@FEW
@given(phases, st.integers(1, 6), phases)
def test_the_same_inputs_have_the_same_answer(
    seen: list[tuple[float, int, float, float]], repeated: int, others: list[tuple[float, int, float, float]]
) -> None:
    """PL14: whatever it was asked in between, and whoever holds the samples; its course leads to its answer."""
    made, given_inputs = slo(), seen_by(past(seen, repeated))
    answer = made.decide(given_inputs)
    made.decide(seen_by(past(others, 2)))
    assert made.decide(given_inputs) == answer
    assert slo().decide(seen_by(past(seen, repeated))) == answer
    assert answer.trail[-1].after == answer.wanted
    assert all(a.after == b.before for a, b in zip(answer.trail, answer.trail[1:], strict=False))


@FEW
@given(
    steps=st.lists(st.tuples(st.floats(0.05, 7.0), st.integers(0, 9)), min_size=40, max_size=100),
    kept=st.integers(5, 25),
    every=st.integers(1, 9),
    width_s=st.sampled_from([2.0, 5.0, 10.0]),
)
def test_a_past_that_was_cut_before_is_cut_in_the_same_way(
    steps: list[tuple[float, int]], kept: int, every: int, width_s: float
) -> None:
    """While samples come and the oldest are forgotten, earlier looks change nothing of what a look gives; nor do looks
    with other targets, or at a part of the past."""
    remembered: deque[LoadSample] = deque(maxlen=kept)
    now = 1000.0
    for number, (seconds, load) in enumerate(steps):
        now += seconds
        remembered.append(
            LoadSample(now, load, 0, 1 + load % 3, 0, load, number * load, ttft_p50_s=0.2, ttft_p99_s=0.3 * load)
        )
        if number % every:
            continue
        for samples in (tuple(remembered), tuple(remembered)[: 1 + len(remembered) // 2]):
            for targets in (TARGETS, Targets(0.5, 0.05)):
                anew = tuple(dataclasses.replace(sample) for sample in samples)  # equal, but nobody has seen them
                found = windows(samples, width_s, now, 10.0, targets)
                assert found == windows(anew, width_s, now, 10.0, targets)
                assert learn(found, by_rate=False) == learn(windows(anew, width_s, now, 10.0, targets), by_rate=False)
