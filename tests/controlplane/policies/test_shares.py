"""Shares: where starts go and whom a scale-down takes when a policy spreads its count (PL5, PL6)."""

import pytest

from controlplane.core.snapshot import PoolDemand
from springtide.model.enums import State
from springtide.model.pool import PolicySpec
from tests.controlplane.core.world import FakeNode, World


def two_provisioners(policy: PolicySpec, desired: int = 0, least: int = 0) -> World:
    """Node n1 of `own` with 2 GPUs, node n2 of `cloud` with 6: by free GPUs alone the cloud would come first."""
    world = World(nodes=0, routers=1)
    world.nodes["n1"] = FakeNode("n1", 2, labels={"provisioner": "own", "zone": "a"})
    world.nodes["n2"] = FakeNode("n2", 6, labels={"provisioner": "cloud", "spot": "yes"})
    world.add_pool("demo", desired, min_workers=least, max_workers=8, policy=policy)
    world.turn(times=6)
    return world


def where(world: World) -> dict[str, int]:
    counts = {"n1": 0, "n2": 0}
    for worker in world.workers.values():
        if worker.state in (State.STARTING, State.ACTIVE):
            counts[worker.intent.node_id] += 1
    return counts


def test_waterfall_fills_and_empties_in_order() -> None:
    """PL5: own nodes first, the cloud after; the cloud is given back first."""
    world = two_provisioners(PolicySpec("waterfall", {"rules": "1,own\n2,cloud"}))
    world.demand["demo"] = PoolDemand(5)
    world.turn(times=8)
    assert where(world) == {"n1": 1, "n2": 0}
    world.demand["demo"] = PoolDemand(40)
    world.turn(times=12)
    assert where(world) == {"n1": 2, "n2": 2}
    world.demand["demo"] = PoolDemand(15)
    world.turn(times=20)
    assert where(world) == {"n1": 2, "n2": 0}


def test_fixed_elastic_never_takes_the_pinned_tier() -> None:
    """PL5, seed 2 §2.12: only burst workers are stopped, although the pinned one has the least to do."""
    world = two_provisioners(PolicySpec("fixed_elastic", {"pinned": "own"}))
    assert where(world) == {"n1": 1, "n2": 0}
    world.demand["demo"] = PoolDemand(60)
    world.turn(times=60)
    assert where(world)["n2"] >= 2
    assert where(world)["n1"] == 1
    world.demand["demo"] = PoolDemand(0)
    world.turn(times=60)
    assert where(world) == {"n1": 1, "n2": 0}


def test_capability_starts_where_the_keys_are() -> None:
    """PL6: a request that needs `zone` starts a worker on the node that offers it; each set goes by itself."""
    world = two_provisioners(PolicySpec("capability"))
    world.demand["demo"] = PoolDemand(8, by_needs={"zone": 8})
    world.turn(times=8)
    assert where(world) == {"n1": 2, "n2": 0}
    world.demand["demo"] = PoolDemand(13, by_needs={"zone": 8, "spot": 5})
    world.turn(times=8)
    assert where(world) == {"n1": 2, "n2": 1}
    world.demand["demo"] = PoolDemand(5, by_needs={"zone": 0, "spot": 5})
    world.turn(times=20)
    assert where(world) == {"n1": 0, "n2": 1}


@pytest.mark.parametrize("policy", ["vanilla", "load_ratio"])
def test_policies_that_do_not_share_out_place_as_before(policy: str) -> None:
    """The node with most free GPUs first."""
    world = two_provisioners(PolicySpec(policy), desired=1, least=1)
    assert where(world) == {"n1": 0, "n2": 1}
