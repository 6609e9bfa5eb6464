"""The peers' formulas, as they publish them (issue: faithful re-implementations)."""

import dataclasses

import pytest

from controlplane.core.policies import make_policy
from controlplane.core.policy import ActiveWorker, PolicyAnswer, PolicyInputs
from controlplane.core.snapshot import LoadSample
from simulator.peers import PEERS, register_peers
from springtide.model.pool import PolicySpec, Setting
from tests.controlplane.policies.given import NOW, inputs, sample, steady

register_peers()


def ask(name: str, given: PolicyInputs, **settings: Setting) -> PolicyAnswer:
    return make_policy(PolicySpec(name, settings), given.min_workers, given.max_workers).decide(given)


def two(first: tuple[float, int], second: tuple[float, int], running: int = 4) -> tuple[ActiveWorker, ...]:
    """Two replicas: (KV use, waiting in the engine) each."""
    return tuple(ActiveWorker(f"w{i}", running, running, queue, kv) for i, (kv, queue) in enumerate((first, second)))


def test_all_are_known_by_name_and_start_from_zero() -> None:
    """Issue: five peers, each labelled as one."""
    assert len(PEERS) == 5
    for name in PEERS:
        assert name.startswith("peer_")
        assert ask(name, inputs(3, 0)).wanted == 1, name
        assert ask(name, inputs(0, 0, least=0)).wanted == 0, name


@pytest.mark.parametrize(
    ("load", "present", "last_up", "wanted"),
    [(9, 3, None, 5), (9, 5, None, 5), (6, 3, None, 3), (9, 3, NOW - 10.0, 3), (2, 3, None, 3)],
)
def test_ray_serve(load: int, present: int, last_up: float | None, wanted: int) -> None:
    """ongoing / 2, rounded up; up after 30 s of asking, down after 600 s only (the samples reach back 120 s)."""
    assert ask("peer_ray_serve", inputs(load, present, last_scale_up_at=last_up)).wanted == wanted


def test_ray_serve_downscale_and_reset() -> None:
    """Down after 600 s in a row; one look that asks otherwise begins again."""
    long = steady(2, 3, seconds=700)
    assert ask("peer_ray_serve", inputs(2, 3, samples=long)).wanted == 1
    broken = [dataclasses.replace(s, in_flight=90) if NOW - 330 < s.at < NOW - 300 else s for s in long]
    assert ask("peer_ray_serve", inputs(2, 3, samples=broken)).reason == "DELAY"


def test_knative_stable_and_panic() -> None:
    """ceil(60 s average / 70), at most halved; in panic never down and up at once."""
    assert ask("peer_knative_kpa", inputs(150, 2)).wanted == 3
    assert ask("peer_knative_kpa", inputs(0, 8)).wanted == 4
    spike = [*steady(10, 1, seconds=60)[:-6], *(sample(float(a), 400, 1) for a in range(5, -1, -1))]
    assert ask("peer_knative_kpa", inputs(400, 1, samples=spike)).reason == "PANIC"
    after = [
        *(dataclasses.replace(s, at=s.at - 20) for s in spike),
        *(sample(float(a), 10, 6) for a in range(19, -1, -1)),
    ]
    assert ask("peer_knative_kpa", inputs(10, 6, samples=after)).wanted == 6


def arrivals(rate: float, active: int, seconds: int) -> tuple[LoadSample, ...]:
    return tuple(
        dataclasses.replace(sample(float(age), 4, active), arrivals_total=round(rate * (seconds - age)))
        for age in range(seconds, -1, -1)
    )


def test_skyserve() -> None:
    """ceil(rate / 2), up after 300 s, down after 1200 s."""
    assert ask("peer_skyserve", inputs(4, 2, samples=arrivals(9.0, 2, 400))).wanted == 5
    assert ask("peer_skyserve", inputs(4, 2, samples=arrivals(9.0, 2, 200))).wanted == 2
    assert ask("peer_skyserve", inputs(4, 6, samples=arrivals(1.0, 6, 1000))).wanted == 6
    assert ask("peer_skyserve", inputs(4, 6, samples=arrivals(1.0, 6, 1400))).wanted == 1


@pytest.mark.parametrize(
    ("replicas", "starting", "wanted"),
    [
        (two((0.5, 0), (0.5, 0)), 0, 2),
        (two((0.75, 0), (0.72, 0)), 0, 3),
        (two((0.1, 3), (0.1, 3)), 0, 3),
        (two((0.9, 0), (0.1, 9)), 0, 3),
        (two((0.1, 0), (0.1, 0)), 0, 1),
        (two((0.75, 0), (0.72, 0)), 1, 3),
        (two((0.4, 0), (0.35, 0)), 0, 2),
    ],
)
def test_llmd_wva(replicas: tuple[ActiveWorker, ...], starting: int, wanted: int) -> None:
    """Spare KV below 0.10 or spare queue below 3: one more; one fewer only where both spares stay; none while one
    starts."""
    given = inputs(8, 2, starting=starting, workers=replicas)
    answer = ask("peer_llmd_wva", given)
    assert answer.wanted == wanted
    assert not starting or answer.reason == "STARTING"


@pytest.mark.parametrize(
    ("replicas", "changes", "wanted"),
    [
        (two((0.1, 9), (0.1, 9)), {}, 3),
        (two((0.1, 9), (0.1, 0)), {}, 2),
        (two((0.1, 0), (0.1, 0)), {}, 1),
        (two((0.6, 0), (0.1, 0)), {}, 2),
        (two((0.1, 9), (0.1, 9)), {"starting": 1}, 3),
        (two((0.1, 0), (0.1, 0)), {"draining": 1}, 2),
        (two((0.1, 0), (0.1, 0), running=300), {}, 3),
    ],
)
def test_dynamo(replicas: tuple[ActiveWorker, ...], changes: dict[str, int], wanted: int) -> None:
    """Up when all exceed the target, down when one fewer leaves 0.8 of it; one step, none while scaling."""
    answer = ask("peer_dynamo_load", inputs(8, 2, workers=replicas, **changes))  # type: ignore[arg-type]
    assert answer.wanted == wanted
    assert not changes or answer.reason == "SCALING"
