"""The whole simulated system: start, scale, drain, lose nothing, repeat exactly."""

from controlplane.core import orders
from simulator.load import Arrival, bursty
from simulator.node import NodeModel
from simulator.world import Route, World, WorldModel
from springtide.model.enums import DrainAction, Role, State
from springtide.model.pool import PolicySpec, PoolSpec
from springtide.model.worker import ExitInfo

QUICK = {"min_stable_period": 3, "monitoring_interval": 1, "scale_up_cooldown": 5, "scale_down_cooldown": 10}


def small_world(seed: int = 0, nodes: int = 2, **node: object) -> World:
    world = World(WorldModel(seed=seed))
    for number in range(nodes):
        world.add_node(f"node-{number + 1}", NodeModel(**{"start_s": 5.0, **node}))  # type: ignore[arg-type]
    world.start()
    return world


def pool(name: str = "demo", **fields: object) -> PoolSpec:
    base = {"min_workers": 1, "max_workers": 8, "policy": PolicySpec("load_ratio", QUICK)}
    return PoolSpec(name, "sim", **{**base, **fields})  # type: ignore[arg-type]


def digest(world: World) -> list[object]:
    rows: list[object] = [(r.number, r.worker, r.first_at, r.done_at, r.error) for r in world.requests]
    return rows + [(event.at, event.action, event.target) for event in world.store.events]


def served(seed: int) -> World:
    world = small_world(seed, start_jitter_s=2.0)
    world.apply_pool(pool())
    assert world.run_until(world.settled, 60)
    world.serve(bursty(6.0, 300.0, 1500.0, 60.0, seed), {"default": Route("demo")}, tail_s=120.0)
    return world


def test_a_burst_scales_up_and_down_and_loses_nothing() -> None:
    """SM1: every request ends well while the pool grows and shrinks."""
    world = served(3)
    assert {request.error for request in world.requests} == {""}
    assert all(request.produced == request.output_tokens for request in world.requests)
    actions = [event.action for event in world.store.events]
    assert actions.count("scale_up_complete") > 2
    assert actions.count("scale_down_complete") > 1
    assert all(shim.in_flight == 0 for shim in world.endpoints.values())
    assert world.meter.worker_seconds("demo") > 300


def test_the_same_seed_gives_the_same_run() -> None:
    assert digest(served(5)) == digest(served(5))
    assert digest(served(5)) != digest(served(6))


def test_an_engine_crash_before_and_after_the_first_token() -> None:
    """RT5: what has not begun is retried unseen; what has ends with an explicit error."""
    world = small_world()
    world.apply_pool(pool(min_workers=2, policy=PolicySpec("static", {})))
    assert world.run_until(world.settled, 60)
    routes = {"default": Route("demo")}
    begun = [world.submit(Arrival(0.0, 100, 4000), routes) for _ in range(2)]
    world.run(2.0)
    late = [world.submit(Arrival(0.0, 8000, 10), routes) for _ in range(2)]
    world.run(0.1)
    node = world.nodes[world.store.records.workers[begun[0].worker].intent.node_id]
    worker = node.workers[begun[0].worker]
    assert worker.shim is not None
    node.engine_ends(worker, worker.shim, ExitInfo(signal=9, reason="ENGINE_KILLED"))
    world.run(200.0)
    assert [request.error for request in begun] == ["STREAM_CUT", ""]
    assert [request.error for request in late] == ["", ""]
    assert sum(request.retries for request in late) == 1
    assert world.settled()


def test_prefill_and_decode_pools() -> None:
    """SM3: a request is prefilled in one pool and decoded in the other; a drain of either waits for the transfer."""
    world = World(WorldModel())
    for number in range(2):
        world.add_node(f"node-{number + 1}", NodeModel(start_s=5.0))
    slow = 30.0
    for router in world.routers:
        router.transfer_s = lambda tokens: slow
    world.start()
    keep = {"policy": PolicySpec("static", {}), "drain_timeout_s": 600.0, "drain_action": DrainAction.WAIT}
    world.apply_pool(pool("prompt", role=Role.PREFILL, min_workers=1, max_workers=2, initial_workers=2, **keep))
    world.apply_pool(pool("token", role=Role.DECODE, min_workers=1, max_workers=2, initial_workers=2, **keep))
    assert world.run_until(world.settled, 60)
    request = world.submit(Arrival(0.0, 1000, 200), {"default": Route("prompt", "token")})
    world.run(2.0)
    assert request.first_at is not None
    assert not request.ended
    loaded = [shim.worker_id for shim in world.endpoints.values() if shim.in_flight]
    assert sorted(name.split("-")[0] for name in loaded) == ["prompt", "token"]
    for name in loaded:
        world.control.execute(lambda snapshot, now, name=name: orders.drain_worker(snapshot, name, now))  # type: ignore[misc]
    world.run(20.0)
    states = {name: world.store.records.workers[name].state for name in loaded}
    assert set(states.values()) == {State.DRAINING}, "both wait for the transfer"
    world.run(60.0)
    assert request.error == ""
    assert request.transfer_s == slow
    assert request.produced == 200
    assert {world.store.records.workers[name].state for name in loaded} == {State.INACTIVE}
