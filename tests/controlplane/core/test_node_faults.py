"""Nodes under random faults: a provisioner, a control plane or a host may fail at any step, calls may have unknown
outcomes, notices may come at any time. After each plan what must never be wrong is checked; when the faults stop, the
pool is where it should be and nothing is left over. A failing seed replays exactly."""

import random

import pytest

from controlplane.core.snapshot import Plan, Put
from springtide.model.enums import NodeState, State
from springtide.model.node import Node
from springtide.model.provisioning import CapabilitySet, ProvidedPhase
from tests.controlplane.core.node_world import FakeProvider, NodeWorld

STEPS = 160
SLOTS = 2  # GPUs of each node
MOST = 6  # workers


class Chaos(NodeWorld):
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        kinds = [
            CapabilitySet("std", gpus_per_node=SLOTS, max_nodes=4),
            CapabilitySet("pair", gpus_per_node=SLOTS, max_nodes=4, nodes_per_unit=2, cost_per_hour=1.0),
            CapabilitySet("spot", gpus_per_node=SLOTS, max_nodes=3, spot=True, cost_per_hour=0.5),
        ]
        self.rng.shuffle(kinds)
        one = FakeProvider("a", {kind.name: kind for kind in kinds[:2]})
        other = FakeProvider("b", {kind.name: kind for kind in kinds[2:]})
        super().__init__(one, other)
        self.add_pool(min_workers=0, max_workers=MOST, drain_timeout_s=3.0, start_timeout_s=20.0)
        self.wanted = 0
        self.pin(0)

    def pin(self, workers: int) -> None:
        self.wanted = workers
        self.set_intent("demo", manual_workers=workers)

    # -------------------------------------------------------------- faults

    def break_something(self) -> None:
        rng = self.rng
        provider = rng.choice(list(self.providers.values()))
        fault = rng.randrange(12)
        if fault == 0:
            provider.up = not provider.up
            if provider.up:
                provider.restart()
        elif fault == 1:
            provider.restart()
        elif fault == 2:
            provider.connected = not provider.connected
        elif fault == 3:
            self.restart_leader()
        elif fault == 4:
            provider.outcomes += [rng.choice(("done", "lost", "nothing")) for _ in range(4)]
        elif fault == 5:
            provider.refuses = not provider.refuses
        elif fault == 6:
            provider.never_registers = not provider.never_registers
        elif fault == 7:
            self.end_a_host(provider)
        elif fault == 8:
            self.preempt(provider)
        elif fault == 9:
            self.pin(rng.randint(0, MOST))
        elif fault == 10:
            provider.queue_s = rng.choice((0.0, 2.0, 30.0))
        else:
            self.hide_a_node()

    def restart_leader(self) -> None:
        for memory in (self.live_nodes, self.routers, self.samples, self.evaluated_at, self.last_decision, self.heard):
            memory.clear()
        self.grace_until = self.now + self.timing.grace_s

    def end_a_host(self, provider: FakeProvider) -> None:
        running = [host for host in provider.hosts.values() if host.phase is ProvidedPhase.RUNNING]
        if running:
            host = self.rng.choice(running)
            host.phase, host.since, host.reason = ProvidedPhase.ENDED, self.now, "NODE_FAIL"

    def preempt(self, provider: FakeProvider) -> None:
        running = [host for host in provider.hosts.values() if host.phase is ProvidedPhase.RUNNING]
        if running:
            host = self.rng.choice(running)
            host.ends_at, host.reason = self.now + self.rng.choice((3.0, 15.0, 60.0)), "PREEMPTED"

    def hide_a_node(self) -> None:
        """The network between a node and the control plane is cut, for a while."""
        if self.nodes:
            node = self.nodes[self.rng.choice(sorted(self.nodes))]
            node.reachable = not node.reachable

    def heal(self) -> None:
        for provider in self.providers.values():
            if not provider.up:
                provider.restart()
            provider.connected, provider.refuses, provider.never_registers = True, False, False
            provider.outcomes, provider.queue_s = [], 1.0
        for node in self.nodes.values():
            node.reachable = True

    # -------------------------------------------------------------- what must hold

    def apply(self, made: Plan) -> None:
        if self.rng.random() < 0.05 and made.writes and not made.events:
            self.revision += 1  # another writer was first: the commit is refused
            return
        self.check_plan(made)
        super().apply(made)
        self.check_caps()

    def check_plan(self, made: Plan) -> None:
        for write in made.writes:
            if not isinstance(write, Put) or not isinstance(write.record, Node) or write.record.provided is None:
                continue
            before, after = self.node_records.get(write.record.node_id), write.record
            assert after.provided is not None
            if before is not None and before.provided is not None:
                assert not before.provided.release or after.provided.release, "what is given back stays given back"
                assert (before.state, after.state) != (NodeState.GONE, NodeState.UP)

    def check_caps(self) -> None:
        """Never more than its cap, whatever was restarted; and never more asked for than the pool could ever use."""
        for provider in self.providers.values():
            for name, kind in provider.sets.items():
                assert len(provider.alive(name)) <= kind.max_nodes, name
        most = MOST // SLOTS + 1  # one more than is needed where a unit has two
        assert self.coming() <= most, "what is on its way counts"

    def check_orders(self) -> None:
        """Only drained nodes are given back: no ACTIVE worker is on a node whose shutdown is ordered."""
        for provider in self.providers.values():
            going = {node_id for order in provider.orders.shutdown for node_id in order.node_ids}
            for worker in self.workers.values():
                if worker.intent.node_id in going and worker.state is State.ACTIVE:
                    node = self.node_records[worker.intent.node_id]
                    assert node.state in (NodeState.LOST, NodeState.GONE), (worker, node)

    def coming(self) -> int:
        return len(self.records(NodeState.REQUESTED))

    def check_rest(self) -> None:
        assert self.count(State.ACTIVE) == self.wanted, self.states()
        here = {
            key
            for key, node in self.node_records.items()
            if node.provided is not None and node.state is not NodeState.GONE
        }
        assert set(self.alive()) == here, "no orphan, and none that only the records know"
        used = {w.intent.node_id for w in self.workers.values() if w.state is State.ACTIVE}
        units = {self.node_records[key].provided.group_id for key in used}  # type: ignore[union-attr]
        idle = [key for key in here if self.node_records[key].provided.group_id not in units]  # type: ignore[union-attr]
        assert not idle, "what nothing needs is given back"


@pytest.mark.parametrize("seed", range(16))
def test_random_faults(seed: int) -> None:
    """CP9, CP10, CP13, CP15, CP16, CP17, PV1, F20, F41: safety under faults, then rest."""
    world = Chaos(seed)
    for _ in range(STEPS):
        if world.rng.random() < 0.3:
            world.break_something()
        if world.rng.random() < 0.06:
            world.heal()
        world.turn(world.rng.choice((0.2, 1.0, 1.0, 3.0)))
        world.check_orders()
    world.heal()
    for _ in range(110):
        world.turn()
    world.check_rest()


@pytest.mark.parametrize("step", range(30))
@pytest.mark.parametrize("who", ["leader", "provisioner", "both"])
def test_a_restart_at_each_step_acquires_nothing_twice(step: int, who: str) -> None:
    """CP9, CP10, F19, F41: one scale-up and one scale-down; a crash at any step of it changes nothing."""
    world = Chaos(0)
    world.rng.random = lambda: 1.0  # type: ignore[method-assign]  # no refused commits
    world.pin(4)
    for at in range(60):
        if at == 30:
            world.pin(0)
        if at % 30 == step:
            if who != "provisioner":
                world.restart_leader()
            if who != "leader":
                for provider in world.providers.values():
                    provider.restart()
        if at % 3 == 2:
            world.providers["a"].outcomes += ["lost"]
        world.turn()
        assert len(world.alive()) <= 2, "four workers need two nodes, and no third"
        if at == 29:
            assert world.count(State.ACTIVE) == 4
    for _ in range(15):
        world.turn()
    assert world.alive() == []
    assert sum(len(provider.started) for provider in world.providers.values()) <= 2
