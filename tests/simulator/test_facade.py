"""The fourth seed's API and its timeline vectors (spec, vectors 5.1 to 5.3)."""

from pathlib import Path

import pytest

from simulator.facade import InstanceStatus, Simulation
from simulator.load import poisson
from simulator.replay import replay
from simulator.seed_config import (
    ApplicationConfig,
    ModelParallelism,
    SeedConfig,
    ServerConfig,
    parse_config,
    read_config,
    scenario_of,
)
from springtide.client.spec import pool_spec
from springtide.errors import FailedPrecondition, InvalidArgument, SpringtideError

CONFIG = SeedConfig(
    servers=(ServerConfig("A100", 4, processors=2),),
    topology="p2p",
    power_budget=30_000.0,
    applications=(ApplicationConfig(),),
    start=(),
)
ONE = ModelParallelism()

SEED_YAML = """
cluster:
  servers:
    - sku: A100
      count: 4
  interconnects:
    - topology: p2p
  power_budget: 100000

applications:
  - application_id: 0
    model_architecture: LLaMA
    model_size: 70B
    scheduler: AdaptiveMixedPoolScheduler
    allocator: StaticAllocator
    scaling_manager:
      scale_up_delay: 10.0
      drain_check_interval: 1.0
    debug: true

start_state:
  state_type: splitwise
  application_id: 0
  split_type: homogeneous
  prompt:
    num_instances: 2
    pipeline_parallelism: 1
    tensor_parallelism: 1
  token:
    num_instances: 2
    pipeline_parallelism: 1
    tensor_parallelism: 1
"""


def simulation(**application: float) -> Simulation:
    return Simulation(CONFIG, ApplicationConfig(**application))  # type: ignore[arg-type]


def test_scale_up_full() -> None:
    """SM1: at 10.5 with a delay of 10; schedulable from 20.5 on."""
    sim = simulation()
    sim.run_until(10.5)
    server, instance = sim.manager.scale_up_full(None, ONE, "prompt", "A100")
    assert sim.manager.log == [
        (10.5, "scale_up_server", "server_0", "scaling_up"),
        (10.5, "scale_up_start", "instance_0", "scaling_up"),
    ]
    assert instance.status is InstanceStatus.SCALING_UP
    assert len(instance.processors) == len(server.processors)
    sim.run_until(20.4)
    assert not sim.manager.can_schedule_to_instance(instance)
    sim.run_until(20.5)
    assert sim.manager.can_schedule_to_instance(instance)
    assert instance.is_active_for_scheduling()
    assert sim.manager.log[2:] == [(20.5, "scale_up_complete", "instance_0", "active")]


def test_scale_down_full_waits_for_the_last_task() -> None:
    """SM1: drained at 100.0, the last task ends at 124.3, checks every second: gone at 125.0, with its server."""
    sim = simulation()
    _, instance = sim.manager.scale_up_full(None, ONE)
    sim.run_until(30.0)
    probe = sim.submit(instance, 1000, 500)
    sim.run_until(60.0)
    assert probe.done_at is not None
    lasts = probe.done_at - probe.arrived_at
    sim.run_until(124.3 - lasts)
    task = sim.submit(instance, 1000, 500)
    sim.manager.log.clear()
    if sim.now < 100.0:
        sim.run_until(100.0)
    began = sim.now
    sim.manager.scale_down_full(instance)
    assert sim.manager.log[0][0] == pytest.approx(began)
    assert [row[1:] for row in sim.manager.log] == [("scale_down_start", "instance_0", "draining")]
    assert instance.status is InstanceStatus.DRAINING
    assert not sim.manager.can_schedule_to_instance(instance)
    sim.run_until(130.0)
    assert task.done_at == pytest.approx(124.3)
    assert task.error == ""
    ends = [row[0] for row in sim.manager.log[1:]]
    assert [row[1] for row in sim.manager.log[1:]] == ["scale_down_complete", "scale_down_server"]
    assert ends[0] == ends[1]
    assert 124.3 <= ends[0] <= 125.3
    assert sim.cluster.servers == []
    assert sim.application.instances == []


def test_scale_down_at_a_whole_second() -> None:
    """SM1: the vector's own numbers: start 100.0, complete 125.0."""
    sim = simulation()
    _, instance = sim.manager.scale_up_full(None, ONE)
    sim.run_until(100.0)
    tasks = [sim.submit(instance, 10, tokens) for tokens in (10, 2100)]
    sim.manager.log.clear()
    sim.manager.scale_down_full(instance)
    sim.run_until(140.0)
    assert 121.0 < (tasks[1].done_at or 0) < 125.0
    wanted = float(int(tasks[1].done_at or 0) + 1)
    assert sim.manager.log == [
        (100.0, "scale_down_start", "instance_0", "draining"),
        (wanted, "scale_down_complete", "instance_0", "scaling_down"),
        (wanted, "scale_down_server", "server_0", "scaling_down"),
    ]
    assert sim.manager.get_status_summary()["total_servers"] == 0


def test_scale_down_of_an_idle_instance() -> None:
    """Start and complete at once, no server and no entry left (the source left both)."""
    sim = simulation()
    _, instance = sim.manager.scale_up_full(None, ONE)
    sim.run_until(50.25)
    sim.manager.log.clear()
    sim.manager.scale_down_full(instance)
    assert sim.manager.log == [
        (50.25, "scale_down_start", "instance_0", "draining"),
        (50.25, "scale_down_complete", "instance_0", "scaling_down"),
        (50.25, "scale_down_server", "server_0", "scaling_down"),
    ]
    assert sim.manager.get_status_summary() == dict.fromkeys(
        (
            "active_instances",
            "scaling_up_instances",
            "draining_instances",
            "active_servers",
            "scaling_up_servers",
            "pending_server_scale_downs",
            "total_servers",
            "total_instances",
        ),
        0,
    )


def test_scale_down_of_a_starting_instance_is_invalid() -> None:
    sim = simulation()
    _, instance = sim.manager.scale_up_full(None, ONE)
    sim.run_until(5.0)
    before = sim.manager.get_status_summary()
    sim.manager.scale_down_full(instance)
    assert sim.manager.log[-1] == (5.0, "scale_down_invalid", "instance_0", "scaling_up")
    assert sim.manager.get_status_summary() == before
    sim.run_until(20.0)
    assert instance.status is InstanceStatus.ACTIVE


def test_active_only_when_delay_and_spin_up_have_passed() -> None:
    sim = simulation(spin_up_s=30.0)
    _, instance = sim.manager.scale_up_full(None, ONE)
    sim.run_until(11.0)
    assert not sim.manager.can_schedule_to_instance(instance)
    sim.run_until(30.0)
    assert sim.manager.can_schedule_to_instance(instance)


def test_ids_are_never_used_again() -> None:
    sim = simulation()
    server, instance = sim.manager.scale_up_full(None, ONE)
    sim.run_until(20.0)
    sim.manager.scale_down_full(instance)
    again, other = sim.manager.scale_up_full(None, ONE)
    assert (server.server_id, again.server_id) == ("server_0", "server_1")
    assert (instance.instance_id, other.instance_id) == ("instance_0", "instance_1")
    sim.run_until(40.0)
    assert other.status is InstanceStatus.ACTIVE


def test_unknown_sku_creates_nothing() -> None:
    sim = simulation()
    with pytest.raises(InvalidArgument, match="B200"):
        sim.manager.scale_up_full(None, ONE, server_sku="B200")
    assert sim.cluster.servers == []
    assert sim.manager.log == []


def test_a_server_with_an_instance_stays() -> None:
    sim = simulation()
    server = sim.manager.scale_up_server(sim.cluster.get_server_config())
    halves = [server.processors[:1], server.processors[1:]]
    instances = [sim.manager.scale_up_instance(None, half, ONE) for half in halves]
    with pytest.raises(InvalidArgument, match="not free processors"):
        sim.manager.scale_up_instance(None, server.processors[:1], ONE)
    sim.run_until(20.0)
    assert not sim.manager.scale_down_server(server)
    assert sim.manager.log[-1] == (20.0, "scale_down_server_invalid", "server_0", "has_instances")
    sim.manager.scale_down_full(instances[0])
    assert sim.cluster.servers == [server], "the other instance keeps it"
    sim.manager.scale_down_instance(instances[1])
    assert sim.manager.scale_down_server(server)
    assert sim.cluster.servers == []


def test_power_budget_and_cancelled_drain() -> None:
    sim = simulation()
    for _ in range(4):
        _, instance = sim.manager.scale_up_full(None, ONE)
    with pytest.raises(FailedPrecondition, match="power budget"):
        sim.manager.scale_up_full(None, ONE)
    sim.run_until(20.0)
    sim.submit(instance, 10, 500)
    sim.manager.scale_down_full(instance)
    assert sim.manager.get_status_summary()["draining_instances"] == 1
    sim.manager.cancel_scale_down(instance)
    assert instance.status is InstanceStatus.ACTIVE
    sim.run_until(60.0)
    assert sim.manager.get_status_summary()["active_servers"] == 4


def test_the_seeds_own_yaml(tmp_path: Path) -> None:
    """The document's example: 2 prompt and 2 token instances on 4 servers; it starts, and serves as a split fleet."""
    path = tmp_path / "config.yaml"
    path.write_text(SEED_YAML)
    config = read_config(path)
    sim = Simulation(config)
    sim.run_until(10.0)
    active = sim.application.get_schedulable_instances()
    assert [instance.tag for instance in active] == ["prompt", "prompt", "token", "token"]
    assert sim.manager.get_status_summary()["active_servers"] == 4
    world = replay(scenario_of(config), poisson(2.0, 60.0, 500.0, 50.0, 1))
    assert {request.error for request in world.requests} == {""}
    assert any(request.transfer_s > 0 for request in world.requests)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("cluster: {servers: []}", "cluster.servers"),
        ("cluster: {servers: [{count: 2}]}", "cluster.servers[0].sku"),
        ("cluster: {servers: [{sku: A100, count: -1}]}", "cluster.servers[0].count"),
        ("cluster: {servers: [{sku: A100}]}", "applications"),
        (
            "{cluster: {servers: [{sku: A100}]}, applications: [{scaling_manager: {drain_check_interval: 0}}]}",
            "applications[0].scaling_manager.drain_check_interval",
        ),
        (
            "{cluster: {servers: [{sku: A100}]}, applications: [{}], start_state: {state_type: magic}}",
            "start_state.state_type",
        ),
        (
            "{cluster: {servers: [{sku: A}]}, applications: [{}], start_state: {state_type: orca, instance: []}}",
            "start_state.instance",
        ),
        ("[", "config"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SpringtideError) as caught:
        read_config(path)
    assert caught.value.field == field


def test_pipeline_parallelism_is_simulated() -> None:
    """An instance takes pipeline x tensor processors; live pools accept only pipeline_parallelism = 1."""
    config = parse_config(
        {
            "cluster": {"servers": [{"sku": "H100", "count": 1}]},
            "applications": [{}],
            "start_state": {
                "state_type": "orca",
                "instance": {"num_instances": 2, "pipeline_parallelism": 2, "tensor_parallelism": 2},
            },
        }
    )
    assert [pool.tensor_parallel_size for pool in scenario_of(config).pools] == [4]
    live = {"name": "chat", "engine": "vllm"}
    assert pool_spec({**live, "pipeline_parallelism": 1}) == pool_spec(live)
    for key in ("pipeline_parallelism", "pipeline_parallel_size"):
        with pytest.raises(InvalidArgument, match="is not 1: a worker is one engine on the GPUs of one node") as caught:
            pool_spec({**live, key: 2}, "pools[0].")
        assert (caught.value.field, caught.value.reason) == (f"pools[0].{key}", "PIPELINE_PARALLELISM")
