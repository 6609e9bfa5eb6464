"""`slo` in closed loop, on the virtual clock with the code that runs live (issue: measurably good, no flapping)."""

from simulator import load as loads
from simulator.load import DEFAULT_KIND, Arrival
from simulator.replay import Fleet, Scenario, one_pool, replay
from simulator.results import Summary, summarize
from simulator.world import Route
from springtide.model.pool import PolicySpec


def run(policy: PolicySpec, load: list[Arrival], initial: int = 2) -> Summary:
    pool = one_pool(policy, min_workers=1, max_workers=12, initial_workers=initial)
    scenario = Scenario((pool,), {DEFAULT_KIND: Route(pool.name)}, Fleet(nodes=2, gpus=8, start_up_s=20.0))
    return summarize(replay(scenario, load))


def test_a_steady_load_is_met_without_flapping() -> None:
    """PL2: nearly all requests in time, on far fewer workers than there may be, and hardly a move."""
    load = loads.poisson(6.0, 900.0, 1024.0, 64.0, 5)
    found = run(PolicySpec("slo"), load)
    assert found.failed == 0
    assert found.slo_attainment > 0.9
    assert found.worker_seconds < 0.5 * 12 * 900
    assert found.flaps <= 2
    assert found.scale_ups + found.scale_downs <= 10


def test_a_step_is_answered_and_given_back() -> None:
    """PL3, PL4: ten times the load for five minutes; up with it, down some time after it."""
    calm, busy = loads.poisson(2.0, 300.0, 1024.0, 64.0, 1), loads.poisson(20.0, 300.0, 1024.0, 64.0, 2)
    after = loads.poisson(2.0, 1200.0, 1024.0, 64.0, 3)
    load = [
        *calm,
        *(Arrival(a.at_s + 300.0, a.prompt_tokens, a.output_tokens) for a in busy),
        *(Arrival(a.at_s + 600.0, a.prompt_tokens, a.output_tokens) for a in after),
    ]
    found = run(PolicySpec("slo", {"memory_s": 300}), load)
    assert found.failed == 0
    assert found.slo_attainment > 0.8
    assert 4 <= found.most_workers <= 12
    assert found.worker_seconds < 0.6 * found.most_workers * found.length_s, "it shrinks when the step is over"
    assert found.scale_downs >= 1
