"""A closed loop under random faults: what must never be wrong is checked after every plan, and when the faults stop
the pools come to rest where they should. A failing seed replays exactly."""

import contextlib
import dataclasses
import random

import pytest

from controlplane.core import orders
from controlplane.core.desired import desired_workers
from controlplane.core.signals import is_leaving, waiting_of
from controlplane.core.snapshot import Plan, Timing
from controlplane.core.worker import PHASES, holds_slice
from springtide.errors import SpringtideError
from springtide.model.enums import Phase, ReportedPhase, State
from springtide.model.pool import PolicySpec
from springtide.model.worker import Worker, WorkerReport
from tests.controlplane.core.world import STORE_ID, FakeNode, World

STEPS = 150
POOLS = {"demo": (1, 3, 1), "wide": (0, 2, 2)}  # min, max, GPUs
FREE_TO_DRAIN = ("OPERATOR_DRAIN", "NODE_STOPPING", "DELETING")
QUICK = {"min_stable_period": 3, "monitoring_interval": 1, "scale_up_cooldown": 3, "scale_down_cooldown": 5}


class Chaos(World):
    """A world in which everything may fail, and every plan is checked."""

    def __init__(self, seed: int) -> None:
        super().__init__(nodes=3, gpus=4, timing=Timing(grace_s=10.0, lease_s=8.0))
        self.rng = random.Random(seed)
        for name, (low, high, gpus) in POOLS.items():
            self.add_pool(
                name,
                min_workers=low,
                max_workers=high,
                tensor_parallel_size=gpus,
                start_timeout_s=15.0,
                drain_timeout_s=6.0,
                policy=PolicySpec("load_ratio", QUICK),
            )
        self.load = dict.fromkeys(POOLS, 0)
        self.old_reports: dict[str, dict[str, WorkerReport]] = {node_id: {} for node_id in self.nodes}
        self.stale_desired = {node_id: desired_workers(self.snapshot(), node_id) for node_id in self.nodes}

    # -------------------------------------------------------------- faults

    def break_something(self) -> None:
        rng = self.rng
        node = self.nodes[rng.choice(sorted(self.nodes))]
        fault = rng.randrange(14)
        if fault == 0:
            node.reachable = not node.reachable
        elif fault == 1 and node.engines:
            worker_id = rng.choice(sorted(node.engines))
            if node.engines[worker_id].phase not in (ReportedPhase.STOPPED, ReportedPhase.FAILED):
                node.crash(worker_id)
        elif fault == 2:
            node.fail_starts = not node.fail_starts
        elif fault == 3:
            node.never_ready = not node.never_ready
        elif fault == 4:
            self.routers_ack = not self.routers_ack
        elif fault == 5:
            node.stopping = not node.stopping
            node.stop_deadline_at = self.now + 30.0 if node.stopping and rng.random() < 0.5 else None
        elif fault == 6:
            self.restart_leader()
        elif fault == 7:
            self.operate()
        elif fault == 8:
            for engine in node.engines.values():
                if engine.phase is ReportedPhase.READY and rng.random() < 0.5:
                    engine.phase = ReportedPhase.ADOPTING  # the agent was restarted and checks what it finds
        elif fault == 9:
            node.engines = {key: e for key, e in node.engines.items() if e.report("").gpu_ids}  # forgets what ended
        elif fault == 10 and node.node_id in self.live_nodes:
            self.hear_late(node.node_id)
        elif fault == 11:
            node.never_stops = not node.never_stops
        elif fault == 12:
            self.demand[rng.choice(sorted(POOLS))] = None
        else:
            node.obey(self.stale_desired[node.node_id], self.now)  # an old answer arrives late

    def restart_leader(self) -> None:
        for memory in (self.live_nodes, self.routers, self.samples, self.evaluated_at, self.last_decision):
            memory.clear()
        self.grace_until = self.now + self.timing.grace_s

    def operate(self) -> None:
        """An operator does something, sensible or not."""
        rng, now = self.rng, self.now
        worker_id = rng.choice(sorted(self.workers) or ["none"])
        pool = rng.choice(sorted(POOLS))
        order = rng.choice(
            [
                lambda s: orders.drain_worker(s, worker_id, now),
                lambda s: orders.undrain_worker(s, worker_id, now),
                lambda s: orders.activate_worker(s, worker_id, now),
                lambda s: orders.cancel_worker(s, worker_id, now),
                lambda s: orders.scale_pool(s, pool, now, workers=rng.randint(*POOLS[pool][:2])),
                lambda s: orders.scale_pool(s, pool, now, automatic=True),
                lambda s: orders.pause_pool(s, pool, now, hold_s=5.0),
                lambda s: orders.cordon_node(s, "n1", now),
                lambda s: orders.uncordon_node(s, "n1", now),
            ]
        )
        with contextlib.suppress(SpringtideError):
            self.apply(order(self.snapshot()))

    def hear_late(self, node_id: str) -> None:
        """What the node said of its workers some time ago is heard again."""
        live = self.live_nodes[node_id]
        late = {key: report for key, report in self.old_reports[node_id].items() if key in live.reports}
        self.live_nodes[node_id] = dataclasses.replace(live, reports={**live.reports, **late})
        self.settle()

    def repair(self, node: FakeNode) -> None:
        node.reachable, node.fail_starts, node.never_ready, node.stopping = True, False, False, False
        node.stop_deadline_at, node.never_stops = None, False

    def heal(self) -> None:
        self.routers_ack = True
        for node in self.nodes.values():
            self.repair(node)
        if "n1" in self.node_records:
            self.apply(orders.uncordon_node(self.snapshot(), "n1", self.now))

    def step(self) -> None:
        if self.rng.random() < 0.25:
            self.break_something()
        if self.rng.random() < 0.15:
            self.repair(self.nodes[self.rng.choice(sorted(self.nodes))])
        for node_id in self.nodes:
            if self.rng.random() < 0.3:
                self.stale_desired[node_id] = desired_workers(self.snapshot(), node_id)
            self.old_reports[node_id] = {key: e.report(STORE_ID) for key, e in self.nodes[node_id].engines.items()}
        for pool in POOLS:
            if self.rng.random() < 0.15:
                self.load[pool] = self.rng.choice((0, 1, 4, 10, 20))
            self.spread(self.rng, self.load[pool], pool)
        self.turn(self.rng.choice((0.2, 1.0, 1.0, 2.0)))

    # -------------------------------------------------------------- what must hold

    def apply(self, made: Plan) -> None:
        before = dict(self.workers)
        if self.rng.random() < 0.05 and made.writes and not made.events:
            self.revision += 1  # another writer was first: the commit is refused
            return
        super().apply(made)
        self.check_records(before)
        self.check_drains(made)

    def check_records(self, before: dict[str, Worker]) -> None:
        taken: set[tuple[str, str]] = set()
        for worker in self.workers.values():
            assert worker.intent.phase in PHASES[worker.state]
            assert worker.state is State.INACTIVE or holds_slice(worker)
            for gpu in worker.intent.gpu_ids:
                assert (worker.intent.node_id, gpu) not in taken, f"{gpu} of {worker.intent.node_id} is given twice"
                taken.add((worker.intent.node_id, gpu))
            old = before.get(worker.worker_id)
            if old is not None:
                assert worker.intent.generation >= old.intent.generation
                assert worker.observed.incarnation >= old.observed.incarnation
        for name, (_, high, gpus) in POOLS.items():
            mine = [worker for worker in self.workers.values() if worker.pool == name]
            there = [w for w in mine if w.state in (State.STARTING, State.ACTIVE)]
            assert sum(1 for w in there if not is_leaving(w, self.node_records)) <= high, self.states(name)
            assert all(len(w.intent.gpu_ids) in (0, gpus) for w in mine)

    def check_drains(self, made: Plan) -> None:
        for event in made.events:
            if event.action != "scale_down_start" or event.reason in FREE_TO_DRAIN:
                continue
            if waiting_of(self.snapshot(), event.pool, self.now)[1] > 0:
                rest = [w for w in self.workers.values() if w.pool == event.pool and w.routable]
                assert rest, f"{event.target} was the last that could serve what waits"

    def check_rest(self) -> None:
        """Faults have stopped and time has passed: everything is where it should be."""
        for pool in self.pools.values():
            mine = [worker for worker in self.workers.values() if worker.pool == pool.name]
            active = [worker for worker in mine if worker.state is State.ACTIVE]
            exhausted = [w for w in mine if w.intent.phase is Phase.FAILED and not w.intent.held and w.intent.attempts]
            low, high, _ = POOLS[pool.name]
            assert low <= pool.intent.desired_workers <= high
            assert len(active) + len(exhausted) >= pool.intent.desired_workers, self.states(pool.name)
            assert len(active) <= max(pool.intent.desired_workers, low), self.states(pool.name)
            assert {worker.state for worker in mine} <= {State.ACTIVE, State.INACTIVE}, self.states(pool.name)
            for worker in mine:
                assert worker.state is State.ACTIVE or not holds_slice(worker), worker
        running = {
            (node_id, engine.desired.worker_id)
            for node_id, node in self.nodes.items()
            for engine in node.engines.values()
            if engine.report(STORE_ID).gpu_ids
        }
        recorded = {(w.intent.node_id, w.worker_id) for w in self.workers.values() if w.state is State.ACTIVE}
        assert running == recorded, "no orphan engine, and none that only the records know"


@pytest.mark.parametrize("seed", range(24))
def test_random_faults(seed: int) -> None:
    """CP1, CP4, CP10, CP12, F15, F34, F35, F37: safety under faults, then rest."""
    world = Chaos(seed)
    for _ in range(STEPS):
        world.step()
    world.heal()
    for _ in range(90):
        for pool in POOLS:
            world.spread(world.rng, 0, pool)
        world.turn()
    world.check_rest()
