"""The node saga, step by step: demand, caps, units, deadlines, idle nodes, preemption, rollover, ownership."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.nodes.orders import provisioner_orders
from controlplane.core.snapshot import PoolDemand
from controlplane.core.supply import supplies_of
from springtide.model.enums import NodeState, ScaleDown, State
from springtide.model.provisioning import CapabilitySet, ProvidedPhase
from springtide.wire.values import identifier
from tests.controlplane.core.node_world import RULES, Host, NodeWorld, provider
from tests.controlplane.core.world import FakeNode

UP, REQUESTED, GONE = NodeState.UP, NodeState.REQUESTED, NodeState.GONE


def want(world: NodeWorld, workers: int, **spec: object) -> None:
    """A pool that an operator has pinned at so many workers."""
    world.add_pool(desired=workers, min_workers=0, **spec)  # type: ignore[arg-type]
    world.set_intent("demo", manual_workers=workers)


def test_a_pool_that_fits_nowhere_gets_nodes_and_gives_them_back() -> None:
    """CP9, CP3, PV1: acquire -> register -> workers; drained -> idle -> released. Four workers of one GPU take two
    nodes of two."""
    world = NodeWorld(provider())
    want(world, 4)
    world.settle()
    world.turn()
    assert len(world.records(REQUESTED)) == 2, "asked for at once, once, and no more than fits"
    assert "AWAITS_NODE" in world.pools["demo"].intent.conditions[0]
    world.turn(times=12)
    assert world.count(State.ACTIVE) == 4
    assert len(world.alive()) == 2
    assert not world.pools["demo"].intent.conditions
    world.set_intent("demo", manual_workers=0)
    world.turn(times=40)
    assert world.count(State.ACTIVE) == 0
    assert world.alive() == []
    assert not world.records(UP, REQUESTED, NodeState.RELEASING)
    for action in ("node_requested", "node_up", "node_releasing", "node_gone"):
        assert world.actions().count(action) == 2, action


def test_the_record_is_committed_before_the_order() -> None:
    """CP9: what the provisioner is told follows from records alone."""
    world = NodeWorld(provider())
    want(world, 1)
    world.heartbeats()
    before = provisioner_orders(world.snapshot(), "p1")
    assert before.start == ()
    world.settle()
    told = provisioner_orders(world.snapshot(), "p1")
    (start,) = told.start
    assert start.group.node_ids == tuple(world.records(REQUESTED))
    assert [wanted.pending for wanted in told.desired] == [1]
    assert told == provisioner_orders(world.snapshot(), "p1"), "the same each time: CP17"


def test_long_names_make_no_id_that_an_agent_may_not_have() -> None:
    """CP9: provisioner and set may each have the longest name; the node's id is still one."""
    name = "s" * 128
    world = NodeWorld(provider("p" * 128, sets=(CapabilitySet(name, gpus_per_node=2, max_nodes=4, nodes_per_unit=2),)))
    want(world, 2)
    world.heartbeats()
    world.settle()
    found = world.records(REQUESTED)
    assert len(found) == 2
    assert [identifier(node_id, "node_id") for node_id in found] == list(found)


def test_never_beyond_the_cap_and_whole_units() -> None:
    """PV1: caps, rounding up to whole units."""
    kinds = (CapabilitySet("pair", gpus_per_node=1, max_nodes=5, nodes_per_unit=2),)
    world = NodeWorld(provider(sets=kinds))
    want(world, 7)
    world.turn(times=12)
    assert len(world.alive()) == 4, "two pairs; a fifth would be half a pair"
    assert len({world.node_records[key].provided.group_id for key in world.alive()}) == 2  # type: ignore[union-attr]
    assert world.count(State.ACTIVE) == 4
    assert "cap of 5" in world.pools["demo"].intent.conditions[0]


def test_labels_and_sizes_choose_the_set_and_the_cheapest_comes_first() -> None:
    """PV1, RT7: only a set whose nodes hold the worker; of those the cheapest per worker."""
    kinds = (
        CapabilitySet("small", gpus_per_node=1, max_nodes=9, cost_per_hour=0.1, labels={"zone": "a"}),
        CapabilitySet("elsewhere", gpus_per_node=4, max_nodes=9, cost_per_hour=0.1, labels={"zone": "b"}),
        CapabilitySet("dear", gpus_per_node=4, max_nodes=9, cost_per_hour=9.0, labels={"zone": "a"}),
        CapabilitySet("fair", gpus_per_node=4, max_nodes=9, cost_per_hour=4.0, labels={"zone": "a"}),
        CapabilitySet("unsaid", gpus_per_node=4, max_nodes=9, labels={"zone": "a"}),
    )
    world = NodeWorld(provider(sets=kinds))
    want(world, 2, tensor_parallel_size=2, placement={"zone": "a"})
    world.turn(times=10)
    provided = [world.node_records[key].provided for key in world.alive()]
    assert [found.capability_set for found in provided if found] == ["fair"]
    assert world.count(State.ACTIVE) == 2


def test_several_provisioners_share_one_demand() -> None:
    """CP16, PL5: two provisioners, one demand: it is answered once."""
    world = NodeWorld(provider("a", nodes=1), provider("b", nodes=9))
    want(world, 4)
    world.turn(times=12)
    assert len(world.alive()) == 2
    assert {world.node_records[key].provided.provisioner_id for key in world.alive()} == {"a", "b"}  # type: ignore[union-attr]
    world.set_intent("demo", manual_workers=0)
    world.turn(times=40)
    assert world.alive() == [], "each stop went to the owner"


def test_a_node_that_never_registers_is_given_back_and_tried_again_later() -> None:
    """CP13, CP14: the deadline counts from RUNNING; the set rests, longer each time."""
    world = NodeWorld(provider(never_registers=True))
    want(world, 1)
    world.turn(times=60)
    asked = [event.at for event in world.events if event.action == "node_requested"]
    given_up = [event for event in world.events if event.action == "node_gone"]
    assert len(asked) >= 2
    assert all(event.reason == "START_FAILED" and "NEVER_REGISTERED" in event.message for event in given_up)
    assert len(world.alive()) <= 1, "the first is given back before the next comes"
    world.providers["p1"].never_registers = False
    world.turn(times=60)
    assert world.count(State.ACTIVE) == 1
    assert len(world.alive()) == 1


def test_a_wait_in_the_queue_is_no_failure_unless_it_is_bounded() -> None:
    """CP13, 4.2: a job that is PENDING for hours keeps its place; with pending_timeout_s it is given back."""
    world = NodeWorld(provider(queue_s=10_000.0))
    want(world, 1)
    world.turn(seconds=10.0, times=20)
    assert len(world.records(REQUESTED)) == 1
    assert world.actions().count("node_requested") == 1
    world.rules = dataclasses.replace(RULES, pending_timeout_s=30.0)
    world = NodeWorld(provider(queue_s=10_000.0), rules=world.rules)
    want(world, 1)
    world.turn(seconds=5.0, times=20)
    assert any("stayed in the queue" in event.message for event in world.events)


def test_no_capacity_is_answered_and_another_set_is_asked_at_once() -> None:
    """CP15: WORKER_GROUP_TOO_MUCH ends the request; the next best provisioner is asked in the same plan's commit."""
    world = NodeWorld(provider("a", refuses=True), provider("b"))
    want(world, 1)
    world.turn(times=12)
    assert any("WORKER_GROUP_TOO_MUCH" in event.message for event in world.events)
    assert world.count(State.ACTIVE) == 1
    assert [host.node_id.split("-")[0] for host in world.providers["b"].alive()] == ["b"]
    assert not world.providers["a"].alive()


def test_a_request_that_nobody_needs_any_more_is_cancelled() -> None:
    """CP8: a node on its way is given back when its need is gone for long enough, and not before."""
    world = NodeWorld(provider(queue_s=1000.0))
    want(world, 1)
    world.turn(times=3)
    (node_id,) = world.records(REQUESTED)
    world.set_intent("demo", manual_workers=0)
    world.turn(times=5)
    assert world.records(REQUESTED) == [node_id], "a short lull cancels nothing"
    world.turn(times=10)
    assert world.node_records[node_id].reason == "NOT_NEEDED"
    world.turn(times=3)
    assert world.alive() == []


def test_greedy_sets_keep_their_nodes() -> None:
    """PL7, PV4: keep_nodes has nodes without any pool, follows its target at run time, and gives back on less."""
    kinds = (CapabilitySet("std", gpus_per_node=1, max_nodes=4, keep_nodes=3),)
    world = NodeWorld(provider(sets=kinds))
    world.turn(times=30)
    assert len(world.alive()) == 3
    world.providers["p1"].sets["std"] = dataclasses.replace(kinds[0], keep_nodes=1)
    world.turn(times=30)
    assert len(world.alive()) == 1
    world.providers["p1"].sets["std"] = dataclasses.replace(kinds[0], keep_nodes=9)
    world.turn(times=30)
    assert len(world.alive()) == 4, "never beyond max_nodes"


def test_a_preempted_node_is_replaced_in_the_same_commit() -> None:
    """NA10, PV4: the notice comes with its end; the replacement is requested by the same plan, the worker serves on
    until it is replaced, or until there is no more time."""
    world = NodeWorld(provider())
    want(world, 1, drain_timeout_s=3.0)
    world.turn(times=10)
    (node_id,) = world.records(UP)
    host = world.providers["p1"].hosts[node_id]
    host.ends_at, host.reason = world.now + 15.0, "PREEMPTED"
    world.heartbeats()
    made = world.plan_once()
    actions = [event.action for event in made.events]
    assert "node_preempted" in actions
    assert "node_requested" in actions, "requested in the same commit"
    active_before = world.count(State.ACTIVE)
    world.turn(times=3)
    assert world.count(State.ACTIVE) == active_before, "it serves on while its replacement comes"
    world.turn(times=20)
    (other,) = world.records(UP)
    assert other != node_id
    assert world.count(State.ACTIVE) == 1
    assert world.node_records[node_id].state is GONE


def test_a_time_limit_rolls_over() -> None:
    """PV4: a replacement is up before the node ends; no moment without an ACTIVE worker."""
    world = NodeWorld(provider())
    want(world, 1, drain_timeout_s=2.0)
    world.turn(times=10)
    (node_id,) = world.records(UP)
    world.providers["p1"].hosts[node_id].ends_at = world.now + 40.0
    least = 9
    for _ in range(60):
        world.turn()
        least = min(least, len(world.routed()))
    assert least >= 1
    assert node_id not in world.alive()
    assert len(world.alive()) == 1


def test_a_failed_node_is_replaced() -> None:
    """CP12: its provisioner says NODE_FAIL and its agent is gone: replaced without waiting for the lease."""
    world = NodeWorld(provider())
    want(world, 1)
    world.turn(times=10)
    (node_id,) = world.records(UP)
    host = world.providers["p1"].hosts[node_id]
    host.phase, host.since, host.reason = ProvidedPhase.ENDED, world.now, "NODE_FAIL"
    world.turn(seconds=0.5, times=2)
    assert world.node_records[node_id].state is GONE
    assert world.node_records[node_id].reason == "NODE_FAIL"
    assert len(world.records(REQUESTED)) == 1
    world.turn(times=12)
    assert world.count(State.ACTIVE) == 1


def test_a_late_agent_of_a_node_that_was_given_up_never_counts() -> None:
    """CP12, CP13: what comes after its deadline is leaving, not capacity."""
    world = NodeWorld(provider(never_registers=True))
    want(world, 1)
    world.turn(times=28)
    late = world.records(GONE)[0]
    world.set_intent("demo", manual_workers=0)
    world.providers["p1"].hosts[late].phase = ProvidedPhase.RUNNING  # its provider did not hear of the stop
    world.nodes[late] = FakeNode(late, 2)
    world.turn()
    assert world.node_records[late].state is NodeState.RELEASING
    assert world.node_records[late].reason == "COMES_LATE"
    assert late in [node_id for order in world.providers["p1"].orders.shutdown for node_id in order.node_ids]
    assert world.count(State.STARTING, State.ACTIVE) == 0


def test_an_empty_store_takes_in_what_runs() -> None:
    """CP10: a control plane that has forgotten everything orphans nothing: what its provisioner lists is taken in, used
    where it fits, and given back where it does not."""
    world = NodeWorld(provider())
    want(world, 4)
    world.turn(times=12)
    before = world.alive()
    fresh = NodeWorld(*world.providers.values())
    fresh.nodes, fresh.now = world.nodes, world.now
    for node in fresh.nodes.values():
        node.engines.clear()
    want(fresh, 2)
    fresh.turn(times=4)
    assert sorted(fresh.records(UP)) == before
    assert "node_requested" not in fresh.actions()
    fresh.turn(times=30)
    assert fresh.count(State.ACTIVE) == 2
    assert len(fresh.alive()) <= 2, "what nothing needs is given back"


def test_static_nodes_are_never_ordered() -> None:
    """PV2: a static provisioner's nodes are used as they are; nothing is started or stopped."""
    still = provider("s1", nodes=2, kind="static", never_registers=True)
    still.hosts["n1"] = Host("n1", "n1", "std", ProvidedPhase.RUNNING, 0.0)
    still.hosts["n2"] = Host("n2", "n2", "std", ProvidedPhase.RUNNING, 0.0)
    world = NodeWorld(still, nodes=1)
    want(world, 6)
    world.turn(times=20)
    assert world.count(State.ACTIVE) == 4
    assert list(world.node_records) == ["n1"], "one whose agent is not there is none"
    assert world.node_records["n1"].provided is not None
    assert world.node_records["n1"].provided.provisioner_id == "s1"
    world.set_intent("demo", manual_workers=0)
    world.turn(times=30)
    assert world.records(UP) == ["n1"]
    assert "node_requested" not in world.actions()
    assert still.started == []


def test_from_zero_a_first_request_brings_a_node() -> None:
    """F37, CP9: a pool at zero with one waiting request: node, worker, and back to nothing."""
    world = NodeWorld(provider())
    world.add_pool(min_workers=0)
    world.turn(times=3)
    assert world.alive() == []
    world.demand["demo"] = PoolDemand(1)
    world.turn(times=12)
    assert world.count(State.ACTIVE) == 1
    assert len(world.alive()) == 1


SPOT = CapabilitySet("spot", gpus_per_node=1, max_nodes=9, spot=True, cost_per_hour=1.0)
STEADY = CapabilitySet("steady", gpus_per_node=1, max_nodes=9, cost_per_hour=3.0)


def kinds_of(world: NodeWorld) -> list[str]:
    """Sets of the nodes that ACTIVE workers are on."""
    nodes = [world.node_records[w.intent.node_id] for w in world.workers.values() if w.state is State.ACTIVE]
    return sorted(node.provided.capability_set for node in nodes if node.provided is not None)


def test_the_first_workers_stay_off_spot_nodes() -> None:
    """Policies.md, SkyServe: base_on_demand workers on on-demand nodes, the rest on spot."""
    world = NodeWorld(provider(sets=(SPOT, STEADY)), rules=dataclasses.replace(RULES, base_on_demand=1))
    want(world, 3)
    world.turn(times=15)
    assert kinds_of(world) == ["spot", "spot", "steady"]
    assert len(world.alive()) == 3


def test_on_demand_nodes_stand_in_for_spot_nodes_until_these_are_ready() -> None:
    """Policies.md, SkyServe: dynamic fallback; then everything goes back to spot, and no moment is without worker."""
    slow = provider("a", sets=(SPOT,), queue_s=25.0)
    quick = provider("b", sets=(STEADY,))
    world = NodeWorld(slow, quick, rules=dataclasses.replace(RULES, dynamic_fallback=True))
    want(world, 2, drain_timeout_s=3.0)
    world.turn(times=12)
    assert kinds_of(world) == ["steady", "steady"]
    assert len(slow.alive()) == 2, "still asked for"
    least = 9
    for _ in range(70):
        world.turn()
        least = min(least, len(world.routed()))
    assert kinds_of(world) == ["spot", "spot"]
    assert least >= 1
    assert quick.alive() == []


def test_shrinking_empties_whole_nodes() -> None:
    """CP9: among equals the worker goes whose node can then be given back."""
    world = NodeWorld(provider(gpus=2))
    want(world, 4)
    world.turn(times=12)
    assert len(world.alive()) == 2
    world.set_intent("demo", manual_workers=2)
    world.turn(times=30)
    assert world.count(State.ACTIVE) == 2
    assert len(world.alive()) == 1


def test_policies_see_what_could_be_had() -> None:
    """PL5, PV1: a supply's room counts nodes that its provisioner could still give, and those on their way."""
    world = NodeWorld(provider("p1", nodes=3, gpus=2))
    want(world, 1)
    world.heartbeats()
    draft = Draft(world.snapshot(), world.now)
    (supply,) = supplies_of(draft, world.pools["demo"])
    assert (supply.provisioner, supply.most, supply.present) == ("p1", 6, 0)
    world.turn(times=8)
    draft = Draft(world.snapshot(), world.now)
    found = supplies_of(draft, world.pools["demo"])
    assert sum(supply.most or 0 for supply in found) == 6


def test_one_trace_from_the_need_of_a_node_to_the_worker() -> None:
    """Rule 11, CM7: the first worker on a node that was asked for it is in the node's trace; later ones are not."""
    world = NodeWorld(provider(gpus=2))
    want(world, 1)
    world.turn(times=10)
    (node_id,) = world.records(UP)
    provided = world.node_records[node_id].provided
    assert provided is not None
    (first,) = world.workers.values()
    assert first.intent.traceparent.split("-")[1] == provided.traceparent.split("-")[1]
    assert first.intent.traceparent != provided.traceparent
    world.set_intent("demo", manual_workers=2)
    world.turn(times=5)
    other = next(worker for worker in world.workers.values() if worker.worker_id != first.worker_id)
    assert other.intent.traceparent.split("-")[1] != provided.traceparent.split("-")[1]


def test_nothing_waits_for_the_word_of_a_node_that_was_given_back() -> None:
    """CP9, CP10: a LOST worker, and one that was to stop, end with their node; their slices are nobody's. (Swarm, seeds
    20 and 71.)"""
    world = NodeWorld(provider())
    want(world, 2)
    world.turn(times=10)
    (node_id,) = world.records(UP)
    world.nodes[node_id].never_stops = True
    world.set_intent("demo", manual_workers=1)
    world.turn(times=2)
    host = world.providers["p1"].hosts[node_id]
    host.phase, host.since, host.reason = ProvidedPhase.ENDED, world.now, "NODE_FAIL"
    world.turn(times=3)
    there = [worker for worker in world.workers.values() if worker.intent.node_id == node_id]
    assert there
    assert all(worker.state is State.INACTIVE and not worker.intent.gpu_ids for worker in there)


def test_no_spot_node_is_kept_for_workers_that_cannot_move() -> None:
    """Policies.md: workers on nodes that nobody takes back, or that another pool uses, too, stay where they are.
    (Swarm, seeds 5 and 199.)"""
    world = NodeWorld(provider(sets=(SPOT, STEADY)), rules=dataclasses.replace(RULES, dynamic_fallback=True), nodes=1)
    want(world, 1)
    world.turn(times=60)
    assert world.count(State.ACTIVE) == 1
    assert world.alive() == [], "its worker runs on a host of our own"


def test_a_node_with_a_sleeper_goes_back_to_spot_as_well() -> None:
    """Policies.md, CP9: what sleeps there is stopped with its node and needs no room on spot. (Swarm, seed 9055.)"""
    later, first = provider("a", sets=(SPOT,)), provider("b", sets=(dataclasses.replace(STEADY, gpus_per_node=2),))
    later.up = later.connected = False
    world = NodeWorld(later, first, rules=dataclasses.replace(RULES, dynamic_fallback=True))
    want(world, 2, drain_timeout_s=3.0, scale_down=ScaleDown.SLEEP)
    world.turn(times=12)
    world.set_intent("demo", manual_workers=1)
    world.turn(times=10)
    assert kinds_of(world) == ["steady"]
    assert (len(first.alive()), sum(worker.asleep for worker in world.workers.values())) == (1, 1)
    later.up = later.connected = True
    world.turn(times=40)
    assert kinds_of(world) == ["spot"]
    assert (len(later.alive()), first.alive()) == (1, [])


def test_no_spot_node_is_kept_for_a_part_of_a_node() -> None:
    """Policies.md: one worker stays off spot nodes, and the other one's node could not be given back without it."""
    both = (dataclasses.replace(STEADY, gpus_per_node=2), SPOT)
    later, first = provider("a", sets=both[1:]), provider("b", sets=both[:1])
    later.up = later.connected = False
    world = NodeWorld(later, first, rules=dataclasses.replace(RULES, dynamic_fallback=True, base_on_demand=1))
    want(world, 2)
    world.turn(times=12)
    assert kinds_of(world) == ["steady", "steady"]
    later.up = later.connected = True
    world.turn(times=40)
    assert kinds_of(world) == ["steady", "steady"]
    assert (later.alive(), len(first.alive())) == ([], 1)


def test_a_decision_says_which_nodes_are_awaited_or_why_none_is() -> None:
    """PL14, rule 11: for an operator's pin and for a policy; each outlook once, not each look."""
    world = NodeWorld(provider(nodes=1, gpus=1, queue_s=15.0))
    want(world, 2)
    world.turn(times=6)
    (decision,) = [found for found in world.decisions if found.pool == "demo"]
    (node_id,) = world.records(REQUESTED)
    assert decision.reason == "AWAITS_NODE"
    assert node_id in decision.message
    assert "p1/std has reached its cap of 1 nodes" in decision.message
    world.turn(times=20)
    reasons = [found.reason for found in world.decisions]
    assert reasons[0] == "AWAITS_NODE"
    assert reasons[-1] == "CANNOT_PLACE"
    assert len(reasons) <= 5
    world = NodeWorld(provider(queue_s=1000.0))
    world.add_pool(min_workers=1, max_workers=2)
    world.turn(times=20)
    assert world.decisions[-1].reason == "AWAITS_NODE"
    assert world.records(REQUESTED)[0] in world.decisions[-1].message


def test_nodes_that_live_for_less_than_the_lead_serve_all_the_same() -> None:
    """PV4: with a time limit below rollover_lead_s each node serves for half of its time; the pool is never empty."""
    world = NodeWorld(provider(life_s=40.0, queue_s=1.0), rules=dataclasses.replace(RULES, rollover_lead_s=600.0))
    want(world, 1, drain_timeout_s=2.0)
    world.turn(times=10)
    least = 9
    for _ in range(150):
        world.turn()
        least = min(least, len(world.routed()))
    assert least >= 1
    assert world.actions().count("node_requested") < 14


def test_a_control_plane_that_was_away_gives_up_nobody_unheard() -> None:
    """Rule 8, CP10: deadlines that passed while nobody listened wait for one grace period."""
    world = NodeWorld(provider(boot_s=15.0, queue_s=0.5))
    want(world, 1)
    world.turn(times=4)
    (node_id,) = world.records(REQUESTED)
    provided = world.node_records[node_id].provided
    assert provided is not None
    assert provided.phase is ProvidedPhase.RUNNING
    for memory in (world.live_nodes, world.routers, world.heard):
        memory.clear()
    world.now += 100.0  # it was away; the node has come meanwhile and tries to register
    world.grace_until = world.now + world.timing.grace_s
    world.settle()
    assert world.records(REQUESTED) == [node_id]
    world.turn(times=10)
    assert world.records(UP) == [node_id]
    assert world.actions().count("node_requested") == 1
