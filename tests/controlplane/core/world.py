"""A tiny deterministic world for the pure control plane: records in a dict, fake nodes and routers, virtual time."""

import dataclasses
import random
from dataclasses import dataclass, field

from controlplane.core.desired import DesiredWorker, desired_workers
from controlplane.core.placement import free_gpus
from controlplane.core.plan import plan
from controlplane.core.routing import routing_table
from controlplane.core.snapshot import (
    Delete,
    LiveView,
    LoadSample,
    NodeLive,
    Plan,
    PoolDemand,
    Put,
    RouterLive,
    Snapshot,
    Timing,
)
from springtide.model.enums import ReportedPhase, State, Want
from springtide.model.node import Gpu, Node, NodeObserved
from springtide.model.pool import Pool, PoolIntent, PoolSpec
from springtide.model.record import Decision, Event
from springtide.model.worker import ExitInfo, Worker, WorkerReport

STORE_ID = "store-a"


@dataclass
class FakeEngine:
    """A worker on a fake node."""

    desired: DesiredWorker
    generation: int
    incarnation: int
    phase: ReportedPhase
    ready_at: float
    in_flight: int = 0
    stuck: int = 0  # requests that never end
    exit: ExitInfo | None = None
    probe_failures: int = 0
    weight_version: str = ""
    missing_verbs: dict[str, str] = field(default_factory=dict)

    @property
    def asleep(self) -> bool:
        return self.phase is ReportedPhase.SLEEPING

    def report(self, store_id: str) -> WorkerReport:
        live = self.phase not in (ReportedPhase.STOPPED, ReportedPhase.FAILED)
        return WorkerReport(
            worker_id=self.desired.worker_id,
            pool=self.desired.pool,
            store_id=store_id,
            generation=self.generation,
            incarnation=self.incarnation,
            phase=self.phase,
            endpoint=f"127.0.0.1:{10000 + self.incarnation % 50000}",
            gpu_ids=self.desired.launch.gpu_ids if live else (),
            in_flight=self.in_flight if live else 0,
            max_in_flight=8,
            exit=self.exit,
            probe_failures=self.probe_failures if live else None,
            engine_idle=self.in_flight == 0,
            weight_version=self.weight_version,
            freed_bytes=1 << 30 if self.asleep else None,
            missing_verbs=self.missing_verbs,
            verbs_known=True,
        )


@dataclass
class FakeNode:
    node_id: str
    gpus: int = 4
    labels: dict[str, str] = field(default_factory=dict)
    resources: dict[str, int] = field(default_factory=dict)
    reachable: bool = True
    stopping: bool = False
    stop_deadline_at: float | None = None
    goodbye: bool = False
    start_s: float = 3.0
    fail_starts: bool = False
    never_ready: bool = False
    never_stops: bool = False
    sleeps: bool = True  # False: a release frees nothing
    missing_verbs: dict[str, str] = field(default_factory=dict)
    engines: dict[str, FakeEngine] = field(default_factory=dict)

    def hello(self) -> NodeObserved:
        gpus = tuple(Gpu(str(index), simulated=True) for index in range(self.gpus))
        return NodeObserved(
            boot_id="boot", address="127.0.0.1", gpus=gpus, labels=self.labels, resources=self.resources
        )

    def obey(self, wanted: tuple[DesiredWorker, ...], now: float) -> None:
        """What an agent does with its desired state: never older than it acted on, absence stops nothing."""
        for desired in wanted:
            engine = self.engines.get(desired.worker_id)
            if engine is not None and desired.generation < engine.generation:
                continue
            ended = engine is None or engine.phase in (ReportedPhase.STOPPED, ReportedPhase.FAILED)
            if desired.want is Want.RUN or (desired.want is Want.SLEEP and desired.start_asleep):
                self._run(desired, engine, ended, now)
            elif desired.want is Want.SLEEP and engine is not None and not ended:
                engine.generation, engine.desired = desired.generation, desired
                if not self.sleeps:
                    engine.phase, engine.exit = ReportedPhase.FAILED, ExitInfo(reason="RELEASE_FREED_NOTHING")
                elif engine.phase in (ReportedPhase.DRAINING, ReportedPhase.READY, ReportedPhase.LOADING):
                    assert engine.in_flight == 0, f"{desired.worker_id} sleeps with requests"
                    engine.phase = ReportedPhase.SLEEPING
            elif engine is None:
                self.engines[desired.worker_id] = FakeEngine(desired, desired.generation, 0, ReportedPhase.STOPPED, now)
            elif not ended:
                engine.generation = desired.generation
                if desired.want is Want.DRAIN:
                    engine.phase = ReportedPhase.DRAINING
                    if desired.abort_in_flight:
                        engine.in_flight = engine.stuck = 0
                else:
                    engine.phase = ReportedPhase.STOPPING
            else:
                engine.generation = desired.generation

    def _run(self, desired: DesiredWorker, engine: FakeEngine | None, ended: bool, now: float) -> None:
        if engine is not None and not ended:
            if engine.asleep and desired.want is Want.RUN:
                if self.taken(but=desired.worker_id) & set(engine.desired.launch.gpu_ids):
                    return  # lent: it wakes when they are back
                engine.phase, engine.ready_at = ReportedPhase.LOADING, now + 1.0
            engine.generation = desired.generation
            engine.desired = desired
            if desired.paused and engine.phase is ReportedPhase.READY:
                engine.phase = ReportedPhase.PAUSED
                engine.in_flight = 0 if desired.abort_in_flight else engine.in_flight
            elif not desired.paused and engine.phase is ReportedPhase.PAUSED:
                engine.phase = ReportedPhase.READY
            if engine.phase in (ReportedPhase.DRAINING, ReportedPhase.ADOPTING):
                engine.phase = ReportedPhase.READY
            return
        if engine is not None and engine.generation >= desired.generation:
            return  # it ended at this generation: it is not started twice
        taken = self.taken(but=desired.worker_id)
        assert taken.isdisjoint(desired.launch.gpu_ids), f"{desired.worker_id} started on taken GPUs"
        incarnation = max((engine.incarnation if engine else 0) + 1, int(now * 1000))
        self.engines[desired.worker_id] = FakeEngine(
            desired, desired.generation, incarnation, ReportedPhase.BOOTING, now + self.start_s
        )
        self.engines[desired.worker_id].missing_verbs = self.missing_verbs

    def taken(self, but: str) -> set[str]:
        """GPUs of engines that are awake."""
        others = (e for e in self.engines.values() if e.desired.worker_id != but and not e.asleep)
        return {gpu for e in others if e.report("").gpu_ids for gpu in e.desired.launch.gpu_ids}

    def live_on(self, now: float) -> None:
        """Engines start, stop, finish."""
        for engine in self.engines.values():
            starting = (ReportedPhase.BOOTING, ReportedPhase.LOADING, ReportedPhase.WARMING)
            if engine.phase in starting:
                if self.fail_starts:
                    engine.phase, engine.exit = ReportedPhase.FAILED, ExitInfo(code=1, reason="ENGINE_EXITED")
                elif now >= engine.ready_at and not self.never_ready:
                    asleep = engine.desired.want is Want.SLEEP
                    engine.phase = ReportedPhase.SLEEPING if asleep else ReportedPhase.READY
                    self._load_weights(engine)
                elif engine.phase is not ReportedPhase.WARMING:
                    engine.phase = starting[starting.index(engine.phase) + 1]
            elif engine.phase is ReportedPhase.PAUSED and engine.in_flight == 0:
                self._load_weights(engine)
            elif engine.phase is ReportedPhase.STOPPING and not self.never_stops:
                engine.phase, engine.in_flight = ReportedPhase.STOPPED, 0

    @staticmethod
    def _load_weights(engine: FakeEngine) -> None:
        if engine.desired.weight_source:
            engine.weight_version = engine.desired.weight_version

    def crash(self, worker_id: str) -> None:
        engine = self.engines[worker_id]
        engine.phase, engine.in_flight = ReportedPhase.FAILED, 0
        engine.exit = ExitInfo(signal=9, reason="ENGINE_KILLED")


class World:
    """Store, leader's live view, nodes and routers. `turn` is one round: nodes act and report, the leader plans until
    it has nothing to do at this instant."""

    def __init__(self, *, nodes: int = 1, gpus: int = 4, timing: Timing | None = None, routers: int = 1) -> None:
        self.now = 1_000_000.0
        self.revision = 1
        self.pools: dict[str, Pool] = {}
        self.node_records: dict[str, Node] = {}
        self.workers: dict[str, Worker] = {}
        self.nodes = {f"n{index + 1}": FakeNode(f"n{index + 1}", gpus) for index in range(nodes)}
        self.live_nodes: dict[str, NodeLive] = {}
        self.routers: dict[str, RouterLive] = {}
        self.router_count = routers
        self.demand: dict[str, PoolDemand | None] = {}
        self.routers_ack = True
        self.samples: dict[str, tuple[LoadSample, ...]] = {}
        self.evaluated_at: dict[str, float] = {}
        self.last_decision: dict[str, Decision] = {}
        self.start_ups_s: dict[str, tuple[float, ...]] = {}
        self.decisions: list[Decision] = []
        self.events: list[Event] = []
        self.plans: list[Plan] = []
        self.timing = timing or Timing()
        self.grace_until = 0.0

    # -------------------------------------------------------------- setting up

    def add_pool(self, name: str = "demo", desired: int | None = None, **spec: object) -> Pool:
        pool_spec = PoolSpec(name=name, engine="sim", **spec)  # type: ignore[arg-type]
        wanted = pool_spec.min_workers if desired is None else desired
        self.revision += 1
        self.pools[name] = Pool(pool_spec, PoolIntent(desired_workers=wanted), self.revision)
        self.demand[name] = PoolDemand(0)
        return self.pools[name]

    def set_intent(self, name: str, **fields: object) -> None:
        self.revision += 1
        pool = self.pools[name]
        intent = dataclasses.replace(pool.intent, **fields)  # type: ignore[arg-type]
        self.pools[name] = dataclasses.replace(pool, intent=intent, revision=self.revision)

    # -------------------------------------------------------------- the loop

    def snapshot(self) -> Snapshot:
        live = LiveView(
            nodes=dict(self.live_nodes),
            routers=dict(self.routers),
            samples=dict(self.samples),
            evaluated_at=dict(self.evaluated_at),
            last_decision=dict(self.last_decision),
            start_ups_s=dict(self.start_ups_s),
        )
        return Snapshot(
            STORE_ID,
            self.revision,
            dict(self.pools),
            dict(self.node_records),
            dict(self.workers),
            live,
            self.timing,
            self.grace_until,
        )

    def heartbeats(self) -> None:
        snapshot = self.snapshot()
        for node_id, node in self.nodes.items():
            if not node.reachable:
                if node_id in self.live_nodes:
                    self.live_nodes[node_id] = dataclasses.replace(self.live_nodes[node_id], connected=False)
                node.live_on(self.now)
                continue
            node.obey(desired_workers(snapshot, node_id), self.now)
            node.live_on(self.now)
            self.hear(node)
        for index in range(self.router_count):
            acked = self.revision if self.routers_ack else 0
            demand = {pool: wanted for pool, wanted in self.demand.items() if wanted is not None}
            self.routers[f"r{index}"] = RouterLive(
                True, self.now, acked, demand if index == 0 else dict.fromkeys(demand, PoolDemand(0))
            )

    def hear(self, node: FakeNode) -> None:
        self.live_nodes[node.node_id] = NodeLive(
            connected=not node.goodbye,
            last_heard_at=self.now,
            hello=node.hello(),
            stopping=node.stopping,
            stop_deadline_at=node.stop_deadline_at,
            goodbye=node.goodbye,
            reports={worker_id: engine.report(STORE_ID) for worker_id, engine in node.engines.items()},
            reported=True,
        )

    def plan_once(self) -> Plan:
        made = plan(self.snapshot(), self.now)
        self.apply(made)
        return made

    def apply(self, made: Plan) -> None:
        self.plans.append(made)
        assert len(made.writes) + len(made.decisions) + len(made.events) <= 100
        if made.writes or made.decisions or made.events:
            self.revision += 1
        for write in made.writes:
            if isinstance(write, Delete):
                self._kind(write.kind).pop(write.key)
            else:
                self._put(write)
        for decision in made.decisions:
            self._record(decision)
        self.events += made.events
        for pool, sample in made.samples.items():
            self.samples[pool] = (*self.samples.get(pool, ())[-119:], sample)
        for pool in made.evaluated:
            self.evaluated_at[pool] = self.now
        for pool, seconds in made.start_ups_s.items():
            self.start_ups_s[pool] = (*self.start_ups_s.get(pool, ()), *seconds)[-16:]

    def _kind(self, kind: str) -> dict[str, Pool] | dict[str, Worker] | dict[str, Node]:
        return {"pool": self.pools, "worker": self.workers}.get(kind, self.node_records)  # type: ignore[return-value]

    def _put(self, write: Put) -> None:
        record = dataclasses.replace(write.record, revision=self.revision)
        if isinstance(record, Worker):
            self.workers[record.worker_id] = record
        elif isinstance(record, Pool):
            self.pools[record.name] = record
        else:
            self.node_records[record.node_id] = record

    def _record(self, decision: Decision) -> None:
        if decision.decision_id:
            self.decisions[decision.decision_id - 1] = decision
        else:
            decision = dataclasses.replace(decision, decision_id=len(self.decisions) + 1)
            self.decisions.append(decision)
        self.last_decision[decision.pool] = decision

    def settle(self, limit: int = 50) -> None:
        """Plans until the leader does not want to plan again at once."""
        for _ in range(limit):
            made = self.plan_once()
            if made.wake_at is None or made.wake_at > self.now:
                return
        raise AssertionError(f"the leader never comes to rest: {self.plans[-1]}")

    def turn(self, seconds: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            self.heartbeats()
            self.settle()
            self.now += seconds

    # -------------------------------------------------------------- looking

    def states(self, pool: str = "demo") -> dict[str, str]:
        return {
            w.worker_id: str(w.state)
            for w in sorted(self.workers.values(), key=lambda w: w.worker_id)
            if w.pool == pool
        }

    def count(self, *states: State, pool: str = "demo") -> int:
        return sum(1 for worker in self.workers.values() if worker.pool == pool and worker.state in states)

    def engine(self, worker_id: str) -> FakeEngine:
        return self.nodes[self.workers[worker_id].intent.node_id].engines[worker_id]

    def engine_phase(self, worker_id: str) -> ReportedPhase:
        """Wherever it ran, also after its record is gone."""
        return next(node.engines[worker_id].phase for node in self.nodes.values() if worker_id in node.engines)

    def events_text(self, target: str) -> str:
        return "; ".join(event.message for event in self.events if event.target == target)

    def actions(self, target: str | None = None) -> list[str]:
        return [event.action for event in self.events if target is None or event.target == target]

    def free(self, node_id: str) -> tuple[str, ...]:
        return free_gpus(self.node_records[node_id], self.workers.values(), self.live_nodes.get(node_id))

    def routed(self) -> list[str]:
        return sorted(routing_table(self.snapshot()).workers)

    def spread(self, rng: random.Random, requests: int, pool: str = "demo") -> None:
        """Puts requests onto routed workers; the rest waits."""
        mine = [worker_id for worker_id in self.routed() if self.workers[worker_id].pool == pool]
        routed = [w for w in mine if w in self.nodes[self.workers[w].intent.node_id].engines]  # not one just forgotten
        for worker_id in routed:
            self.engine(worker_id).in_flight = self.engine(worker_id).stuck
        waiting = 0
        for _ in range(requests):
            open_ = [w for w in routed if self.engine(w).in_flight < 8]
            if open_:
                self.engine(rng.choice(open_)).in_flight += 1
            else:
                waiting += 1
        self.demand[pool] = PoolDemand(waiting)
