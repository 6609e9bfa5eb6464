"""A look that only samples loads leaves nothing undone: the whole plan would have found nothing else (CP4)."""

import pytest

from controlplane.core.plan import plan
from controlplane.core.snapshot import Plan, Snapshot
from simulator.controlplane import ModelControlPlane
from simulator.load import DEFAULT_KIND, bursty
from simulator.replay import Scenario, one_pool, replay
from simulator.swarm import run_seed
from simulator.world import Route
from springtide.model.pool import PolicySpec

SEEDS = (3, 11, 29, 46)


def test_nothing_is_due_while_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN §3: `wake_at` and `quiet_until` say when time alone could change the answer, and news does the rest."""
    compared = 0
    glanced = ModelControlPlane._glance

    def glance(self: ModelControlPlane, snapshot: Snapshot, sampled: Plan, now: float) -> None:
        nonlocal compared
        made = plan(snapshot, now)
        if all("NOT_ON_NODE" not in str(write) for write in made.writes):  # concluded from heartbeats that are no news,
            # up to an interval later
            assert (*made.writes, *made.decisions, *made.events, *made.evaluated) == (), f"at {now}"
        compared += 1
        glanced(self, snapshot, sampled, now)

    monkeypatch.setattr(ModelControlPlane, "_glance", glance)
    for seed in SEEDS:
        assert not run_seed(seed).violation
    for name in ("load_ratio", "slo+predictive"):
        pool = one_pool(PolicySpec(name), min_workers=0, max_workers=8)
        replay(Scenario((pool,), {DEFAULT_KIND: Route(pool.name)}), bursty(4.0, 120.0, 800.0, 60.0, 1))
    assert compared > 100


def test_what_a_second_and_a_request_cost() -> None:
    """Issue, simulator: a trace hour takes seconds. Counts instead of times, which other work on the machine changes:
    plans per virtual second, calls per request."""
    load = bursty(6.0, 300.0, 1000.0, 200.0, 2)
    pool = one_pool(PolicySpec("load_ratio"), min_workers=1, max_workers=8)
    world = replay(Scenario((pool,), {DEFAULT_KIND: Route(pool.name)}), load)
    seconds = world.now - world.load_began_at
    assert world.control.plans_total < 0.75 * world.now
    assert world.agenda.calls_total < 30 * seconds + 10 * len(load), "not a call per token: there are 200 a request"
