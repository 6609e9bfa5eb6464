"""The seeds' own scenarios, on a virtual clock: a mixed load, and a cluster that grows."""

from controlplane.core import orders
from simulator.load import Arrival
from simulator.node import NodeModel
from simulator.world import Route, World
from springtide.model.enums import State
from springtide.model.pool import PolicySpec, PoolSpec


def _active(world: World, pool: str) -> int:
    records = world.store.records.workers.values()
    return sum(1 for worker in records if worker.pool == pool and worker.state is State.ACTIVE)


def test_mixed_cpu_and_gpu_scenario() -> None:
    """SM9, PL6: 100 CPU-only and 50 GPU requests; the sets scale independently, idle GPU workers go first, and all
    requests are served."""
    world = World()
    for number in range(2):
        world.add_node(f"cpu-{number + 1}", NodeModel(gpus=4, labels={"kind": "cpu"}, start_s=3.0))
        world.add_node(f"gpu-{number + 1}", NodeModel(gpus=4, labels={"gpu": "1"}, start_s=6.0))
    world.start()
    policy = PolicySpec("capability", {})
    for name, placement in (("cpu", {"kind": "cpu"}), ("gpu", {"gpu": "1"})):
        spec = PoolSpec(name, "sim", min_workers=0, max_workers=8, policy=policy, placement=placement, max_in_flight=4)
        world.apply_pool(spec)
    world.run(0.0)
    routes = {"cpu": Route("cpu"), "gpu": Route("gpu")}
    cpu = [world.submit(Arrival(0.0, 100, 4000, "cpu"), routes) for _ in range(100)]
    gpu = [world.submit(Arrival(0.0, 100, 400, "gpu"), routes) for _ in range(50)]
    peaks = {"cpu": 0, "gpu": 0}
    gpu_gone_while_cpu_works = False
    for _ in range(900):
        world.run(1.0)
        peaks = {name: max(peak, _active(world, name)) for name, peak in peaks.items()}
        busy = sum(1 for request in cpu if not request.ended)
        gpu_gone_while_cpu_works |= busy > 0 and peaks["gpu"] > 0 and _active(world, "gpu") == 0
        if world.ended_total == 150 and _active(world, "cpu") == 0:
            break
    assert {request.error for request in cpu + gpu} == {""}
    assert peaks == {"cpu": 8, "gpu": 8}, "each to its own cap"
    assert gpu_gone_while_cpu_works
    for worker in world.store.records.workers.values():
        assert worker.intent.node_id.startswith(worker.pool), "a CPU request never took a GPU node"
    assert _active(world, "gpu") == 0
    assert _active(world, "cpu") == 0


def test_mixed_scenario_in_one_pool() -> None:
    """SM9, PL6, PL11, seed 2's example scenario: 100 requests that need nothing and 50 that ask for gpu=1, of one
    model. What needs nothing is served by plain nodes; the GPU workers start for the others and go first."""
    world = World()
    for number in range(2):
        world.add_node(f"cpu-{number + 1}", NodeModel(gpus=10, labels={"kind": "cpu"}, start_s=3.0))
        world.add_node(f"gpu-{number + 1}", NodeModel(gpus=4, labels={"gpu": "1"}, start_s=6.0))
    world.start()
    policy = PolicySpec("allocate=capability; scaling=capability")
    bounds = {"min_workers": 0, "max_workers": 32, "max_in_flight": 8, "drain_timeout_s": 120.0}
    world.apply_pool(PoolSpec("demo", "sim", policy=policy, **bounds))  # type: ignore[arg-type]
    world.run(0.0)
    routes = {"cpu": Route("demo"), "gpu": Route("demo", labels=(("gpu", "1"),))}
    gpu = [world.submit(Arrival(0.0, 100, 400, "gpu"), routes) for _ in range(50)]
    cpu = [world.submit(Arrival(0.0, 100, 4000, "cpu"), routes) for _ in range(100)]
    gpu_gone_while_cpu_works = False
    most = {"cpu": 0, "gpu": 0}
    for _ in range(900):
        world.run(1.0)
        there = [w.intent.node_id[:3] for w in world.store.records.workers.values() if w.state is State.ACTIVE]
        most = {kind: max(count, there.count(kind)) for kind, count in most.items()}
        gpu_gone_while_cpu_works |= most["gpu"] > 0 and "gpu" not in there and "cpu" in there
        if world.ended_total == 150 and not there:
            break
    assert {request.error for request in cpu + gpu} == {""}
    assert most == {"cpu": 20, "gpu": 8}
    assert {world.store.records.workers[request.worker].intent.node_id[:3] for request in gpu} == {"gpu"}
    assert gpu_gone_while_cpu_works
    assert not there


def _growing_pool(world: World) -> None:
    settings = {"workers": 8}
    world.apply_pool(PoolSpec("demo", "sim", min_workers=0, max_workers=8, policy=PolicySpec("static", settings)))


def test_a_cluster_that_grows_from_nothing() -> None:
    """SM10: begin with no node, add two 10 s apart: a worker on each as it comes."""
    world = World()
    world.start()
    _growing_pool(world)
    world.run(10.0)
    assert _active(world, "demo") == 0
    for number in (1, 2):
        world.add_node(f"node-{number}", NodeModel(gpus=1, start_s=5.0)).start_agent()
        world.run(10.0)
        assert _active(world, "demo") == number
    world.add_node("node-3", NodeModel(gpus=1, start_s=5.0)).start_agent()
    world.run(10.0)
    assert _active(world, "demo") == 3


def _scale(world: World, count: int) -> None:
    world.control.execute(lambda snapshot, now: orders.scale_pool(snapshot, "demo", now, workers=count))


def test_gpus_run_out_cleanly() -> None:
    """SM10, NA14: when no GPU is left the pool says so, and what runs goes on."""
    world = World()
    world.add_node("node-1", NodeModel(gpus=2, start_s=5.0))
    world.start()
    world.apply_pool(PoolSpec("demo", "sim", min_workers=0, max_workers=4, policy=PolicySpec("static")))
    for count in (1, 2, 3):
        _scale(world, count)
        world.run(10.0)
    pool = world.store.records.pools["demo"]
    assert _active(world, "demo") == 2
    assert any("CANNOT_PLACE" in text and "GPUs are free" in text for text in pool.intent.conditions)
    request = world.submit(Arrival(0.0, 100, 10), {"default": Route("demo")})
    world.run(5.0)
    assert (request.ended, request.error) == (True, "")
