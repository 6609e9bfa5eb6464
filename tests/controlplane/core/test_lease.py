"""Silence, loss, return, leaving (CP12, CP10, F13, F14, F15)."""

import dataclasses
import math
from typing import Any

import pytest

from controlplane.core import orders
from controlplane.core.desired import desired_workers
from controlplane.core.plan import only_samples
from controlplane.core.snapshot import NodeLive
from springtide.errors import FailedPrecondition
from springtide.model.enums import Condition, DecisionResult, NodeState, Phase, ReportedPhase, State, Want
from springtide.model.worker import WorkerReport
from tests.controlplane.core.world import STORE_ID, World


def two_nodes(desired: int = 1, gpus: int = 2, nodes: int = 2, **spec: Any) -> World:
    world = World(nodes=nodes, gpus=gpus)
    world.add_pool(desired=desired, **spec)
    world.set_intent("demo", manual_workers=desired)
    world.turn(times=6)
    assert world.count(State.ACTIVE) == desired
    return world


def test_suspect_then_lost_then_replaced() -> None:
    """CP12, CP20: 3 s of silence make it SUSPECT and still routed, 15 s LOST with its slice reserved; another takes
    over."""
    world = two_nodes()
    world.nodes["n1"].reachable = False
    world.turn(times=5)
    assert world.workers["demo-1"].intent.condition is Condition.SUSPECT
    assert world.routed() == ["demo-1"]
    world.turn(times=12)
    worker = world.workers["demo-1"]
    assert (worker.state, worker.intent.phase, worker.intent.reason) == (State.INACTIVE, Phase.LOST, "LEASE_EXPIRED")
    assert worker.intent.gpu_ids
    assert world.node_records["n1"].state is NodeState.LOST
    assert world.workers["demo-2"].intent.node_id == "n2"
    replaced = [decision for decision in world.decisions if decision.result is DecisionResult.REPLACE]
    assert [(d.reason, d.workers) for d in replaced] == [("LEASE_EXPIRED", ("demo-2",))]
    assert desired_workers(world.snapshot(), "n1") == (), "nothing is said to a lost one"


def test_heard_again_in_time_is_healthy() -> None:
    """F14: silence within the lease costs nothing."""
    world = two_nodes()
    world.nodes["n1"].reachable = False
    world.turn(times=10)
    world.nodes["n1"].reachable = True
    world.turn(times=2)
    assert world.workers["demo-1"].intent.condition is Condition.HEALTHY
    assert [e.action for e in world.events if e.target == "demo-1"][2:] == ["worker_suspect", "worker_recovered"]


def test_heartbeats_need_no_plan_and_their_end_does() -> None:
    """CP4, CP12: while nodes are heard a look only samples, also beyond the time at which silence would have counted;
    it is a plan when one falls silent, and again when that one is heard."""
    world = two_nodes()
    last = world.plan_once()
    suspect_after_s, began = world.timing.suspect_after_s, world.now
    assert not last.writes
    while world.now < last.quiet_until - 1.0:
        world.now += 1.0
        world.heartbeats()
        made = only_samples(world.snapshot(), world.now, last)
        assert made is not None
        assert made.wake_at is not None
        assert made.wake_at > world.now
        world.apply(made)
    assert world.now - began > suspect_after_s
    world.nodes["n1"].reachable = False
    heard_at, due = world.live_nodes["n1"].last_heard_at, dataclasses.replace(last, quiet_until=math.inf)
    world.now = heard_at + suspect_after_s - 0.1
    assert only_samples(world.snapshot(), world.now, due) is not None
    world.now = heard_at + suspect_after_s + 0.1
    assert only_samples(world.snapshot(), world.now, due) is None
    world.settle()
    assert [event.action for event in world.events][-1] == "worker_suspect"
    last = world.plan_once()
    world.now += 0.1
    assert only_samples(world.snapshot(), world.now, last) is not None, "nothing new: it is still silent"
    world.hear(world.nodes["n1"])
    assert only_samples(world.snapshot(), world.now, last) is None
    world.settle()
    assert [event.action for event in world.events][-1] == "worker_recovered"


def test_late_return_is_adopted_while_wanted() -> None:
    """CP12, F15: it is loaded already, so the replacement that is still starting is cancelled; nothing is loaded
    twice."""
    world = two_nodes()
    incarnation = world.engine("demo-1").incarnation
    world.nodes["n1"].reachable = False
    world.nodes["n2"].never_ready = True
    world.turn(times=17)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "STARTING"}
    world.nodes["n1"].reachable = True
    world.turn(times=3)
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "INACTIVE"}
    assert world.engine("demo-1").incarnation == incarnation
    assert "worker_adopted" in world.actions("demo-1")
    assert "start_cancelled" in world.actions("demo-2")


def test_late_return_is_stopped_when_replaced() -> None:
    """F15: no duplicate after a reconnect; its slice is free when the node says so."""
    world = two_nodes()
    world.nodes["n1"].reachable = False
    world.turn(times=25)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "ACTIVE"}
    world.nodes["n1"].reachable = True
    world.heartbeats()
    assert world.engine("demo-1").phase is ReportedPhase.READY, "nothing was ordered before the plan looked"
    world.settle()
    assert world.workers["demo-1"].intent.reason == "NOT_WANTED"
    assert [w.want for w in desired_workers(world.snapshot(), "n1")] == [Want.STOP]
    world.now += 1
    world.turn(times=3)
    assert world.workers["demo-1"].intent.gpu_ids == ()
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "ACTIVE"}


def test_lost_engine_that_has_ended_frees_its_slice() -> None:
    """CP12: LOST means unknown until the node says that it is gone, or does not know it."""
    for forget in (False, True):
        world = two_nodes()
        world.nodes["n1"].reachable = False
        world.turn(times=25)
        world.nodes["n1"].crash("demo-1")
        if forget:
            world.nodes["n1"].engines.clear()
        world.nodes["n1"].reachable = True
        world.turn(times=4)
        assert world.workers["demo-1"].intent.gpu_ids == ()
        assert world.workers["demo-1"].intent.phase is Phase.STOPPED


def test_no_lease_expires_before_the_grace_ends() -> None:
    """CP10, F13: a restarted control plane knows nothing yet and concludes nothing."""
    world = two_nodes()
    world.live_nodes.clear()
    world.samples.clear()
    world.grace_until = world.now + 30.0
    for _ in range(29):
        world.settle()
        world.now += 1.0
    assert world.states() == {"demo-1": "ACTIVE"}
    assert world.workers["demo-1"].intent.condition is Condition.HEALTHY
    world.now += 2.0
    world.settle()
    assert world.workers["demo-1"].intent.phase is Phase.LOST


def test_restart_of_the_control_plane_changes_nothing() -> None:
    """CP10, rule 8: the same records, a fresh live view: no start, no stop, no second adoption."""
    world = two_nodes(desired=2)
    before = dict(world.workers)
    generations = {key: worker.intent.generation for key, worker in before.items()}
    world.live_nodes.clear()
    world.routers.clear()
    world.samples.clear()
    world.evaluated_at.clear()
    world.last_decision.clear()
    world.grace_until = world.now + 30.0
    world.turn(times=10)
    assert {key: worker.intent.generation for key, worker in world.workers.items()} == generations
    assert world.count(State.ACTIVE) == 2


def test_many_silent_at_once_get_a_grace_period() -> None:
    """Rule 8: a third of the agents at once is likelier our fault than theirs; one of three is not."""
    world = two_nodes(desired=4, gpus=1, nodes=4)
    for node_id in ("n1", "n2"):
        world.nodes[node_id].reachable = False
    world.turn(times=40)
    assert world.count(State.ACTIVE) == 4
    world.turn(times=10)
    assert world.count(State.ACTIVE) == 2
    one = two_nodes(desired=3, gpus=1, nodes=3)
    one.nodes["n1"].reachable = False
    one.turn(times=17)
    assert one.count(State.ACTIVE) == 2


def test_node_that_stops_is_left_after_its_replacement_is_ready() -> None:
    """NA10: with a deadline the replacement starts elsewhere first, then the worker drains; nothing is placed there."""
    world = two_nodes()
    world.nodes["n1"].stopping = True
    world.nodes["n1"].stop_deadline_at = world.now + 120.0
    world.turn()
    assert str(world.node_records["n1"].state) == "RELEASING"
    assert world.states() == {"demo-1": "ACTIVE", "demo-2": "STARTING"}
    assert world.workers["demo-2"].intent.node_id == "n2"
    world.turn(times=8)
    assert world.states() == {"demo-1": "INACTIVE", "demo-2": "ACTIVE"}
    assert any(d.result is DecisionResult.REPLACE and d.reason == "NODE_STOPPING" for d in world.decisions)
    world.nodes["n1"].goodbye = True
    world.turn()
    assert world.node_records["n1"].state is NodeState.GONE
    assert world.actions("n1") == ["node_up", "node_stopping", "node_gone"]


def test_node_that_stops_soon_is_left_at_once() -> None:
    """NA10: no replacement elsewhere, or no time: the drain begins at once and ends before the node does."""
    world = two_nodes(nodes=1)
    world.nodes["n1"].stopping = True
    world.nodes["n1"].stop_deadline_at = world.now + 20.0
    world.engine("demo-1").in_flight = 1
    world.turn()
    worker = world.workers["demo-1"]
    assert (worker.state, worker.intent.reason) == (State.DRAINING, "NODE_STOPPING")
    assert worker.intent.deadline is not None
    assert worker.intent.deadline < world.nodes["n1"].stop_deadline_at


def test_goodbye_without_last_words_is_lost() -> None:
    """CP12: an agent that ends without saying that its engines ended leaves them unknown."""
    world = two_nodes()
    world.nodes["n1"].goodbye = True
    world.turn()
    assert world.workers["demo-1"].intent.reason == "NODE_GONE"
    assert world.workers["demo-1"].intent.phase is Phase.LOST
    world.nodes["n1"].goodbye = False
    world.nodes["n1"].crash("demo-1")
    world.nodes["n1"].reachable = True
    world.turn(times=8)
    assert world.node_records["n1"].state is NodeState.UP
    assert world.count(State.ACTIVE) == 1


def test_engines_of_other_stores_are_left_alone_and_strays_are_stopped() -> None:
    """Issue: an empty or foreign store never stops an engine; ours without a record is stopped at its own
    generation."""
    world = World()
    ready = WorkerReport("x-1", "x", "other", 7, 1, ReportedPhase.READY, gpu_ids=("0",))
    stray = dataclasses.replace(ready, worker_id="x-2", store_id=STORE_ID, gpu_ids=("1",))
    ended = dataclasses.replace(stray, worker_id="x-3", phase=ReportedPhase.STOPPED)
    reports = {report.worker_id: report for report in (ready, stray, ended)}
    world.live_nodes["n1"] = NodeLive(True, world.now, hello=world.nodes["n1"].hello(), reports=reports, reported=True)
    world.settle()
    (wanted,) = desired_workers(world.snapshot(), "n1")
    assert (wanted.worker_id, wanted.want, wanted.generation) == ("x-2", Want.STOP, 7)
    assert world.free("n1") == ("2", "3")


def test_probes_make_suspect_and_healthy_again() -> None:
    """CP20: three failed probes in a row."""
    world = two_nodes()
    for failures, condition in ((2, Condition.HEALTHY), (3, Condition.SUSPECT), (0, Condition.HEALTHY)):
        world.engine("demo-1").probe_failures = failures
        world.turn()
        assert world.workers["demo-1"].intent.condition is condition


def test_a_worker_that_fails_its_probes_gets_no_request_while_others_serve() -> None:
    """CP20, F11: out of the table at the third failed probe and back at the first good one; the last one stays."""
    world = two_nodes(desired=2)
    assert world.routed() == ["demo-1", "demo-2"]
    world.engine("demo-1").probe_failures = 3
    world.turn()
    assert world.routed() == ["demo-2"]
    world.engine("demo-2").probe_failures = 3
    world.turn()
    assert world.routed() == ["demo-1", "demo-2"], "nobody is better"
    world.engine("demo-1").probe_failures = 0
    world.turn()
    assert world.routed() == ["demo-1"]
    world.engine("demo-2").probe_failures = 0
    world.turn()
    assert world.routed() == ["demo-1", "demo-2"]


def test_a_failing_engine_that_ends_has_not_recovered() -> None:
    """CP20: the report of its end knows of no probes."""
    world = two_nodes(desired=2)
    world.engine("demo-1").probe_failures = 3
    world.turn()
    world.nodes[world.workers["demo-1"].intent.node_id].crash("demo-1")
    world.turn()
    assert "worker_suspect" in world.actions("demo-1")
    assert "worker_recovered" not in world.actions("demo-1")


def test_a_silent_node_whose_engine_turns_out_to_hang() -> None:
    """CP20: SUSPECT by silence is routed on; heard again with failed probes it is not."""
    world = two_nodes(desired=2, gpus=1)
    node = world.nodes[world.workers["demo-1"].intent.node_id]
    node.reachable = False
    world.turn(times=5)
    assert world.routed() == ["demo-1", "demo-2"]
    world.engine("demo-1").probe_failures = 3
    node.reachable = True
    world.turn(times=2)
    assert world.workers["demo-1"].intent.condition is Condition.SUSPECT
    assert world.routed() == ["demo-2"]


def test_new_incarnation_is_never_routed_as_the_old_one() -> None:
    """F18: an engine that started anew behind our back is adopted under its own incarnation."""
    world = two_nodes()
    engine = world.engine("demo-1")
    engine.incarnation += 5
    world.hear(world.nodes["n1"])
    world.settle()
    assert world.routed() == []
    world.now += 1
    world.turn(times=3)
    assert world.routed() == ["demo-1"]
    assert world.workers["demo-1"].observed.incarnation == engine.incarnation


def test_an_engine_that_hangs_is_killed_and_replaced() -> None:
    """CP20: probes that fail for a minute end it; its slice is reserved until the node says that it is free."""
    world = two_nodes()
    world.engine("demo-1").probe_failures = 3
    world.turn(times=60)
    assert world.states() == {"demo-1": "ACTIVE"}
    world.now += 1.0
    world.hear(world.nodes["n1"])
    world.settle()
    worker = world.workers["demo-1"]
    assert (worker.intent.phase, worker.intent.reason, worker.intent.kill) == (Phase.FAILED, "PROBES_FAILED", True)
    assert worker.intent.gpu_ids
    world.turn(times=8)
    assert world.states() == {"demo-1": "ACTIVE"}
    assert world.workers["demo-1"].intent.suspect_since is None


def test_a_notice_unroutes_at_once_what_others_can_serve() -> None:
    """NA10: with another ACTIVE worker there is nothing to wait for; a replacement starts at the same commit."""
    world = two_nodes(desired=2, gpus=1, nodes=3)
    leaving = world.workers["demo-1"].intent.node_id
    here = {w.worker_id for w in world.workers.values() if w.intent.node_id == leaving}
    world.apply(orders.notice_node(world.snapshot(), leaving, world.now, 120.0))
    made = world.plan_once()
    world.apply(made)
    assert str(world.node_records[leaving].state) == "RELEASING"
    assert world.node_records[leaving].reason == "NOTICE"
    assert len(here) == 1
    assert not here & set(world.routed())
    assert [w.state for w in world.workers.values() if w.state is State.STARTING], "the replacement is asked for"
    world.turn(times=10)
    assert {w.intent.node_id for w in world.workers.values() if w.state is State.ACTIVE} & {leaving} == set()
    assert world.count(State.ACTIVE) == 2


def test_a_notice_leaves_half_of_a_pool_serving() -> None:
    """NA10: when most of a pool is told to go, half of it serves on until replacements come or time is over."""
    world = two_nodes(desired=4, gpus=1, nodes=8, max_workers=8)
    for worker_id in ("demo-1", "demo-2", "demo-3"):
        node_id = world.workers[worker_id].intent.node_id
        world.apply(orders.notice_node(world.snapshot(), node_id, world.now, 300.0))
    for node in world.nodes.values():
        node.start_s = 1000.0
    world.turn(times=5)
    assert len(world.routed()) == 2
    assert world.count(State.STARTING) == 3


def test_a_notice_is_withdrawn() -> None:
    """NA10: the node is UP again and takes workers; a cordon is not touched by a notice."""
    world = two_nodes()
    world.apply(orders.cordon_node(world.snapshot(), "n2", world.now, reason="look"))
    world.apply(orders.notice_node(world.snapshot(), "n2", world.now, 60.0))
    world.turn()
    assert world.node_records["n2"].state is NodeState.RELEASING
    world.apply(orders.notice_node(world.snapshot(), "n2", world.now, None))
    world.turn()
    record = world.node_records["n2"]
    assert (record.state, record.spec.ends_at, record.spec.cordoned) == (NodeState.UP, None, True)
    assert world.actions("n2")[-4:] == ["node_notice", "node_stopping", "node_notice_withdrawn", "node_up"]


def test_a_node_that_was_taken_and_comes_back_has_no_notice() -> None:
    """NA10: a new machine of the same name is not the one that was to go."""
    world = two_nodes(nodes=3)
    world.apply(orders.notice_node(world.snapshot(), "n2", world.now, 10.0))
    world.turn(times=2)
    world.nodes["n2"].reachable = False
    world.turn(times=30)
    assert str(world.node_records["n2"].state) == "LOST"
    with pytest.raises(FailedPrecondition):
        orders.notice_node(world.snapshot(), "n2", world.now, 10.0)
    world.nodes["n2"].reachable = True
    world.turn(times=2)
    assert world.node_records["n2"].state is NodeState.UP
    assert world.node_records["n2"].spec.ends_at is None


def test_a_drain_under_way_ends_before_its_node_does() -> None:
    """NA10: preemption shortens a drain that began before the notice."""
    world = two_nodes(desired=2, drain_timeout_s=300.0)
    world.engine("demo-1").in_flight = world.engine("demo-1").stuck = 1
    world.turn()
    world.apply(orders.drain_worker(world.snapshot(), "demo-1", world.now))
    world.turn(times=2)
    node = world.nodes[world.workers["demo-1"].intent.node_id]
    node.stopping, node.stop_deadline_at = True, world.now + 20.0
    world.turn()
    deadline = world.workers["demo-1"].intent.deadline
    assert deadline is not None
    assert deadline < node.stop_deadline_at
    world.turn(times=17)
    assert world.workers["demo-1"].state is State.INACTIVE
    assert "drain_aborted" in world.actions("demo-1")


def test_a_node_is_not_up_and_lost_at_the_same_time() -> None:
    """F14: at the very end of its lease, whatever floats make of it, a connected but silent node is lost once."""
    for heard_at in (1_000_000.0, 1_000_010.628, 1_000_003.1, 999_999.9):
        world = two_nodes()
        world.now = heard_at
        world.turn(times=1)
        world.now = world.live_nodes["n1"].last_heard_at + world.timing.lease_s
        world.settle()
        assert world.node_records["n1"].state is NodeState.LOST
        assert world.actions("n1").count("node_lost") == 1


def test_a_start_says_above_which_incarnation_it_is() -> None:
    """F15: a node whose clock is behind the last one's still begins an incarnation that is newer than what was seen."""
    world = two_nodes()
    seen = world.workers["demo-1"].observed.incarnation
    assert seen > 0
    world.nodes["n1"].fail_starts = True
    world.nodes["n1"].crash("demo-1")
    world.turn(times=2)
    (desired,) = (
        d for node_id in world.nodes for d in desired_workers(world.snapshot(), node_id) if d.want is Want.RUN
    )
    assert desired.worker_id == "demo-1"
    assert desired.after_incarnation >= seen
