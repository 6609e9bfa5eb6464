"""Slices: disjoint, sized by tensor_parallel_size, where labels, resources and the node's state allow (NA1, F35)."""

import dataclasses

import pytest

from controlplane.core.placement import CannotPlace, Slice, foreign_workers, place, slots
from controlplane.core.snapshot import NodeLive
from springtide.model.enums import NodeState, ReportedPhase, State
from springtide.model.node import Gpu, Node, NodeObserved, NodeSpec
from springtide.model.pool import Pool, PoolSpec
from springtide.model.worker import Worker, WorkerIntent, WorkerReport
from tests.controlplane.core.world import STORE_ID, World


def node(node_id: str, gpus: int, **fields: object) -> Node:
    observed = NodeObserved(
        gpus=tuple(Gpu(str(index)) for index in range(gpus)),
        labels={"zone": "a"},
        resources={"licence": 1},
    )
    return dataclasses.replace(Node(node_id, observed=observed), **fields)  # type: ignore[arg-type]


def live(*reports: WorkerReport, **fields: object) -> NodeLive:
    given = NodeLive(True, 0.0, reports={r.worker_id: r for r in reports}, reported=True)
    return dataclasses.replace(given, **fields)  # type: ignore[arg-type]


def holder(worker_id: str, node_id: str, *gpus: str, pool: str = "demo") -> Worker:
    return Worker(worker_id, pool, WorkerIntent(State.ACTIVE, None, node_id=node_id, gpu_ids=gpus))


def spec(**fields: object) -> PoolSpec:
    return dataclasses.replace(PoolSpec("demo", "sim"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "tp", "workers", "rest"),
    [(8, 1, 8, 0), (8, 2, 4, 0), (8, 4, 2, 0), (8, 8, 1, 0), (4, 8, 0, 4), (6, 4, 1, 2)],
)
def test_table_of_sizes(gpus: int, tp: int, workers: int, rest: int) -> None:
    """NA1: gpus // tp workers, disjoint, until nothing fits; a remainder is refused by name."""
    assert slots(gpus, tp) == (workers, rest)
    nodes, placed = {"n1": node("n1", gpus)}, dict[str, Worker]()
    for index in range(gpus + 1):
        found = place(spec(tensor_parallel_size=tp), nodes, placed, {}, {"n1": live()})
        if isinstance(found, CannotPlace):
            break
        placed[f"demo-{index}"] = holder(f"demo-{index}", found.node_id, *found.gpu_ids)
    used = [gpu for worker in placed.values() for gpu in worker.intent.gpu_ids]
    assert len(used) == len(set(used))
    assert len(placed) == (0 if rest else workers)
    if rest and workers:
        assert f"tensor_parallel_size {tp} does not divide its {gpus} GPUs (remainder {rest})" in str(found)


def test_spreads_to_the_emptiest_node_then_by_id() -> None:
    """PL10: deterministic. Most free first, then the smallest id; a node that just failed comes last."""
    nodes = {"n2": node("n2", 4), "n1": node("n1", 4), "n3": node("n3", 2)}
    lives = {name: live() for name in nodes}
    assert place(spec(), nodes, {}, {}, lives) == Slice("n1", ("0",))
    taken = {"demo-1": holder("demo-1", "n1", "0")}
    assert place(spec(), nodes, taken, {}, lives) == Slice("n2", ("0",))
    assert place(spec(), nodes, taken, {}, lives, avoid="n2") == Slice("n1", ("1",))
    assert place(spec(), {"n1": nodes["n1"]}, taken, {}, lives, avoid="n1") == Slice("n1", ("1",))


def test_blocks_are_aligned_while_they_can_be() -> None:
    """F35: neighbours first, so that blocks do not fragment."""
    nodes, lives = {"n1": node("n1", 8)}, {"n1": live()}
    taken = {"a-1": holder("a-1", "n1", "1"), "a-2": holder("a-2", "n1", "6")}
    assert place(spec(tensor_parallel_size=2), nodes, taken, {}, lives) == Slice("n1", ("2", "3"))
    scattered = {f"a-{gpu}": holder(f"a-{gpu}", "n1", gpu) for gpu in ("1", "3", "5", "7")}
    assert place(spec(tensor_parallel_size=2), nodes, scattered, {}, lives) == Slice("n1", ("0", "2"))


@pytest.mark.parametrize(
    ("groups", "held", "size", "chosen"),
    [
        ("aabb", "", 2, "01"),
        ("abab", "", 2, "02"),  # no aligned block is joined
        ("abba", "", 2, "03"),
        ("aaaabb  ", "", 2, "01"),
        ("aaaabbbb", "01", 2, "23"),
        ("aabbbb", "24", 2, "01"),
        ("abbb", "", 2, "23"),
        ("    ", "0", 2, "23"),  # nobody knows: aligned
        ("abcd", "0", 2, "23"),
        ("aabb", "03", 2, "12"),  # none is joined: better apart than not at all
        ("aabb", "", 4, "0123"),
        ("aabb", "0", 1, "1"),
    ],
)
def test_a_tensor_parallel_set_prefers_gpus_that_nvlink_joins(groups: str, held: str, size: int, chosen: str) -> None:
    """NA1: by the groups that the agent reports; what they say never keeps a worker out."""
    gpus = tuple(Gpu(str(at), link_group=name.strip()) for at, name in enumerate(groups))
    host = Node("n1", observed=NodeObserved(gpus=gpus))
    workers = {f"w-{gpu}": holder(f"w-{gpu}", "n1", gpu) for gpu in held}
    found = place(spec(tensor_parallel_size=size), {"n1": host}, workers, {}, {"n1": live()})
    assert found == Slice("n1", tuple(chosen))


def test_engines_without_a_record_hold_their_gpus() -> None:
    """Fault F15: another store's engine, or ours that the record has let go, still takes its GPUs; an ended one does
    not."""
    foreign = WorkerReport("x-1", "x", "other", 1, 1, ReportedPhase.READY, gpu_ids=("0", "1"))
    stray = WorkerReport("demo-7", "demo", STORE_ID, 1, 1, ReportedPhase.STOPPING, gpu_ids=("2",))
    gone = WorkerReport("demo-8", "demo", STORE_ID, 1, 1, ReportedPhase.STOPPED, gpu_ids=("3",))
    found = place(spec(), {"n1": node("n1", 4)}, {}, {}, {"n1": live(foreign, stray, gone)})
    assert found == Slice("n1", ("3",))
    world = World()
    world.live_nodes["n1"] = live(foreign, stray, gone)
    assert foreign_workers(world.snapshot(), "n1") == 2


@pytest.mark.parametrize(
    ("given", "view", "asked", "told"),
    [
        (node("n1", 4, state=NodeState.LOST, reason="LEASE_EXPIRED"), live(), spec(), "it is LOST (LEASE_EXPIRED)"),
        (node("n1", 4, spec=NodeSpec(True, "repair")), live(), spec(), "it is cordoned (repair)"),
        (node("n1", 4), live(connected=False), spec(), "not connected"),
        (node("n1", 4), None, spec(), "not connected"),
        (node("n1", 4), live(reported=False), spec(), "not yet reported"),
        (node("n1", 4), live(), spec(placement={"zone": "b"}), "lacks the label zone=b"),
        (node("n1", 4), live(), spec(tensor_parallel_size=8), "has 4 GPUs, tensor_parallel_size is 8"),
        (node("n1", 1), live(), spec(), "0 of its 1 GPUs are free, 1 are needed"),
        (node("n1", 4), live(), spec(resources={"licence": 1}), "0 licence are left, 1 are needed"),
    ],
)
def test_reason_per_node(given: Node, view: NodeLive | None, asked: PoolSpec, told: str) -> None:
    """NA14, NA17: cannot place, and why, for each node."""
    pools = {"demo": Pool(spec(resources={"licence": 1}))}
    taken = {"demo-1": holder("demo-1", "n1", "0")}
    found = place(asked, {"n1": given}, taken, pools, {} if view is None else {"n1": view})
    assert isinstance(found, CannotPlace)
    assert told in found.reasons["n1"]
    assert told in str(found)


def test_no_node_at_all() -> None:
    """SM10, NA14."""
    assert "no node is known" in str(place(spec(), {}, {}, {}, {}))
