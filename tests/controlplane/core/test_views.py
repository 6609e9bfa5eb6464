"""What agents, routers and operators are shown of one snapshot (CP2, CP3, CM1, CM2, RT9)."""

import dataclasses

import pytest

from controlplane.core import orders
from controlplane.core.desired import desired_workers
from controlplane.core.routing import diff, routing_table
from controlplane.core.snapshot import PoolDemand
from controlplane.core.views import metrics, pool_status, summary, workers_of
from springtide.errors import NotFound
from springtide.model.enums import Admission, State, Want
from tests.controlplane.core.world import World


def busy() -> World:
    """demo: 2 ACTIVE, 1 DRAINING with requests, 1 STARTING."""
    world = World(nodes=2, gpus=4)
    world.add_pool(desired=3, min_workers=0, engine_args=("--flag",), interpreter="/opt/python")
    world.set_intent("demo", manual_workers=3)
    world.turn(times=6)
    for index, worker_id in enumerate(("demo-1", "demo-2", "demo-3")):
        world.engine(worker_id).in_flight = index + 1
    world.turn()
    world.apply(orders.drain_worker(world.snapshot(), "demo-3", world.now))
    for node in world.nodes.values():
        node.never_ready = True
    world.demand["demo"] = PoolDemand(4, rejected=2)
    world.turn(times=2)
    assert [world.count(state) for state in (State.ACTIVE, State.DRAINING, State.STARTING)] == [2, 1, 1]
    return world


def test_pool_status() -> None:
    """CP3: counts, pending = max(0, desired - active), load of all shims."""
    world = busy()
    status = pool_status(world.snapshot(), "demo", world.now)
    assert dataclasses.asdict(status) == {
        "desired_workers": 3,
        "active": 2,
        "starting": 1,
        "draining": 1,
        "inactive": 0,
        "total": 4,
        "pending": 1,
        "manual_workers": 3,
        "hold_until": None,
        "hold_reason": "",
        "in_flight": 6,
        "waiting": 4,
        "load_ratio": 10 / 16,
        "total_capacity": 16,
        "conditions": (),
        "weight_version": "",
        "weight_source": "",
        "sleeping": 0,
        "weights_behind": 0,
    }
    with pytest.raises(NotFound, match="Known: demo"):
        pool_status(world.snapshot(), "nope", world.now)


def test_metrics_and_summary() -> None:
    """CM1, CM2, 4.10: seven names and eight keys."""
    world = busy()
    assert dataclasses.asdict(metrics(world.snapshot(), "demo", world.now)) == {
        "active_workers": 2,
        "draining_workers": 1,
        "total_workers": 4,
        "active_requests": 6,
        "pending_requests": 4,
        "load_ratio": 10 / 16,
        "total_capacity": 16,
    }
    assert metrics(world.snapshot(), "", world.now) == metrics(world.snapshot(), "demo", world.now)
    assert dataclasses.asdict(summary(world.snapshot())) == {
        "active_instances": 2,
        "scaling_up_instances": 1,
        "draining_instances": 1,
        "active_servers": 2,
        "scaling_up_servers": 0,
        "pending_server_scale_downs": 0,
        "total_servers": 2,
        "total_instances": 4,
    }
    with pytest.raises(NotFound):
        metrics(world.snapshot(), "nope", world.now)


def test_unknown_is_shown_as_unknown() -> None:
    """Rule 1, CP22: a stale node or no router is None, never zero; no capacity divides nothing."""
    world = busy()
    late = world.now + 6.0
    assert pool_status(world.snapshot(), "demo", late).in_flight is None
    assert metrics(world.snapshot(), "demo", late).load_ratio is None
    world.routers.clear()
    assert pool_status(world.snapshot(), "demo", world.now).waiting is None
    empty = World()
    empty.add_pool(min_workers=0)
    empty.turn()
    assert metrics(empty.snapshot(), "demo", empty.now).load_ratio == 0.0
    assert metrics(World().snapshot(), "", 0.0).active_requests == 0


def test_workers_in_order() -> None:
    """CM4: id order, filtered by pool and node."""
    world = busy()
    assert [w.worker_id for w in workers_of(world.snapshot(), "demo")] == ["demo-1", "demo-2", "demo-3", "demo-4"]
    assert {w.intent.node_id for w in workers_of(world.snapshot(), "demo", "n1")} == {"n1"}


def test_routing_table_and_its_changes() -> None:
    """CP2, RT9: only ACTIVE with admission OPEN; a change is the difference to the last table."""
    world = busy()
    table = routing_table(world.snapshot())
    assert sorted(table.workers) == ["demo-1", "demo-2"]
    assert (table.pools["demo"].starting, table.pools["demo"].max_workers) == (1, 8)
    routed = table.workers["demo-1"]
    assert (routed.endpoint, routed.incarnation) == (
        world.workers["demo-1"].observed.endpoint,
        world.workers["demo-1"].observed.incarnation,
    )
    assert routed.traceparent == world.workers["demo-1"].intent.traceparent
    same = diff(table, table)
    assert same is not None
    assert same.empty
    intent = dataclasses.replace(world.workers["demo-1"].intent, admission=Admission.PAUSED)
    world.workers["demo-1"] = dataclasses.replace(world.workers["demo-1"], intent=intent)
    world.revision += 1
    paused = routing_table(world.snapshot())
    change = diff(table, paused)
    assert change is not None
    assert (change.removed_workers, change.workers, change.revision) == (("demo-1",), (), world.revision)
    back = diff(paused, table)
    assert back is not None
    assert [worker.worker_id for worker in back.workers] == ["demo-1"]
    assert diff(table, dataclasses.replace(table, store_id="other")) is None


def test_desired_workers() -> None:
    """CP17: the whole of what is wanted, by state, with the launch line."""
    world = busy()
    wanted = {w.worker_id: w for node in ("n1", "n2") for w in desired_workers(world.snapshot(), node)}
    assert {worker_id: w.want for worker_id, w in wanted.items()} == {
        "demo-1": Want.RUN,
        "demo-2": Want.RUN,
        "demo-3": Want.DRAIN,
        "demo-4": Want.RUN,
    }
    launch = wanted["demo-4"].launch
    assert (launch.engine, launch.engine_args, launch.interpreter) == ("sim", ("--flag",), "/opt/python")
    assert (launch.served_model_name, launch.tensor_parallel_size, launch.start_timeout_s) == ("demo", 1, 900.0)
    assert launch.gpu_ids == world.workers["demo-4"].intent.gpu_ids
    assert wanted["demo-3"].generation == world.workers["demo-3"].intent.generation == 2
    assert desired_workers(world.snapshot(), "nowhere") == ()


def test_an_admission_pause_expires() -> None:
    """RL4 in part: PAUSED counts as capacity, is not routed, and ends by itself."""
    world = World()
    world.add_pool()
    world.turn(times=6)
    worker = world.workers["demo-1"]
    intent = dataclasses.replace(
        worker.intent, admission=Admission.PAUSED, paused_until=world.now + 3.0, generation=worker.intent.generation + 1
    )
    world.workers["demo-1"] = dataclasses.replace(worker, intent=intent)
    world.turn(times=2)
    assert world.routed() == []
    assert world.count(State.ACTIVE) == 1
    assert desired_workers(world.snapshot(), "n1")[0].paused
    world.turn(times=3)
    assert world.routed() == ["demo-1"]
    assert world.workers["demo-1"].intent.generation == intent.generation + 1
