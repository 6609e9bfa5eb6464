"""Random worlds from seeds: a safety phase in which anything may fail, then a liveness phase in which nothing does.

What must never be wrong is checked all the time; when the faults have stopped, the world has to come to rest where it
should be and serve. A seed gives the same world, faults and outcome every time.
"""

import dataclasses
import random
from dataclasses import dataclass
from hashlib import sha256
from traceback import format_exception

from controlplane.core.snapshot import NodeRules, Timing
from nodeagent.engines.sim.batching import Timing as EngineTiming
from simulator.checkers import Checkers, Violation
from simulator.controlplane import Livelock
from simulator.faults import Faults
from simulator.load import Arrival
from simulator.network import Conditions
from simulator.node import NodeModel
from simulator.performance import Constants
from simulator.provisioner import ModelProvisioner
from simulator.world import Route, World, WorldModel
from springtide.model.enums import DrainAction, ScaleDown
from springtide.model.pool import PolicySpec, PoolSpec
from springtide.model.provisioning import CapabilitySet

_START_AT_S = 1_000_000.0
_REST_LIMIT_S = 180.0
_QUICK = {"min_stable_period": 2, "monitoring_interval": 1, "scale_up_cooldown": 2, "scale_down_cooldown": 3}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one seed. `violation` is empty when all held; `digest` is equal for equal runs."""

    seed: int
    violation: str
    digest: str
    virtual_s: float
    plans: int
    commits: int
    requests: int
    failed: int
    transcript: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """How large and how bad a world is. `intensity` 0..1."""

    nodes: int
    gpus: int
    routers: int
    pools: int
    intensity: float
    safety_s: float

    @classmethod
    def of(cls, rng: random.Random) -> "Shape":
        return cls(
            nodes=rng.choice((1, 2, 2, 3, 3, 4, 6)),
            gpus=rng.choice((1, 2, 2, 4)),
            routers=rng.choice((1, 1, 2, 3)),
            pools=rng.choice((1, 1, 2)),
            intensity=rng.random(),
            safety_s=rng.uniform(20.0, 50.0),
        )


def run_seed(seed: int) -> Outcome:
    """One world, from its begin to its rest or its first violation."""
    swarm = Swarm(seed)
    violation = ""
    try:
        swarm.safety()
        swarm.liveness()
    except (Violation, Livelock) as error:
        violation = str(error)
    except Exception as error:  # noqa: BLE001  what raises anywhere is a finding of this seed as well
        violation = "".join(format_exception(error))
    return swarm.outcome(violation)


class Swarm:
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.shape = Shape.of(self.rng)
        self.world = self._build()
        self.checkers = Checkers(self.world)
        self.faults = Faults(self.world, self.rng, self.checkers.note, self.shape.intensity)
        self.provisioners = self._provisioners()
        self.pools: list[PoolSpec] = self._pools()
        self.routes = self._routes()

    def _build(self) -> World:
        timing = Timing(
            lease_s=6.0,
            grace_s=8.0,
            suspect_after_s=3.0,
            unhealthy_after_s=8.0,
            signal_max_age_s=3.0,
            router_lease_s=4.0,
            start_backoff_s=0.5,
            start_backoff_max_s=4.0,
            inactive_retention_s=self.rng.choice((5.0, 3600.0)),
        )
        engine = EngineTiming(max_num_seqs=self.rng.choice((4, 32)), kv_blocks=self.rng.choice((256, 4096)))
        world = World(
            WorldModel(
                seed=self.seed,
                timing=timing,
                conditions=Conditions(latency_s=0.002, jitter_s=0.01),
                routers=self.shape.routers,
                performance=Constants(engine),
                start_at_s=_START_AT_S,
            )
        )
        for number in range(self.shape.nodes):
            model = NodeModel(
                gpus=self.shape.gpus,
                start_s=self.rng.uniform(0.5, 4.0),
                start_jitter_s=1.0,
                stop_s=self.rng.uniform(0.0, 1.0),
            )
            world.add_node(f"n{number + 1}", model)
        return world

    def _provisioners(self) -> list[ModelProvisioner]:
        """One world of three lacks nodes, which provisioners give and take back; drawn apart, so that the rest of a
        world is as before."""
        rng = random.Random(f"nodes {self.seed}")
        if rng.random() >= 1 / 3:
            return []
        world = self.world
        for node_id in sorted(world.nodes)[1:]:
            if rng.random() < 0.7:
                del world.nodes[node_id]
        world.control.rules = NodeRules(
            register_timeout_s=8.0,
            idle_s=rng.choice((1.0, 5.0)),
            lost_release_s=6.0,
            rollover_lead_s=rng.choice((5.0, 15.0)),
            backoff_s=0.5,
            backoff_max_s=4.0,
            gone_retention_s=rng.choice((5.0, 3600.0)),
            base_on_demand=rng.choice((0, 1)),
            dynamic_fallback=rng.random() < 0.5,
        )
        kinds = [
            CapabilitySet("std", gpus_per_node=self.shape.gpus, max_nodes=rng.choice((2, 4))),
            CapabilitySet("pair", gpus_per_node=self.shape.gpus, max_nodes=4, nodes_per_unit=2, cost_per_hour=2.0),
            CapabilitySet("spot", gpus_per_node=self.shape.gpus, max_nodes=4, spot=True, cost_per_hour=1.0),
        ]
        rng.shuffle(kinds)
        parts = (kinds[:2], kinds[2:])[: rng.choice((1, 2))]
        found = [
            ModelProvisioner(f"giver-{n + 1}", world, part, random.Random(rng.random()), self.checkers.watch)
            for n, part in enumerate(parts)
        ]
        self.checkers.provisioners = found
        return found

    def _node_fault(self, rng: random.Random, end: float) -> None:
        if self.world.now < end:
            self.checkers.note(f"fault {rng.choice(self.provisioners).inject(rng)}")
            self.world.agenda.after(rng.expovariate(1 / 4.0), self._node_fault, rng, end)

    def _pools(self) -> list[PoolSpec]:
        found = []
        for number in range(self.shape.pools):
            size = 2 if number == 1 and self.shape.gpus % 2 == 0 else 1
            slots = self.shape.nodes * self.shape.gpus // size
            low = self.rng.choice((0, 1, 1))
            found.append(
                PoolSpec(
                    f"p{number + 1}",
                    "sim",
                    tensor_parallel_size=size,
                    min_workers=min(low, slots),
                    max_workers=max(1, min(self.rng.choice((1, 2, 4)), slots)),
                    policy=PolicySpec("load_ratio", {**_QUICK, "requests_per_worker_capacity": 4}),
                    start_timeout_s=10.0,
                    drain_timeout_s=self.rng.choice((1.0, 5.0)),
                    drain_action=self.rng.choice(tuple(DrainAction)),
                    stop_grace_s=2.0,
                    max_waiting=self.rng.choice((4, 64)),
                    waiting_timeout_s=15.0,
                    max_in_flight=self.rng.choice((0, 2, 8)),
                )
            )
        return [self._sleeping(pool) for pool in found]

    def _sleeping(self, pool: PoolSpec) -> PoolSpec:
        """Two pools of three know sleep, spares and loans; drawn apart, so that the rest of a world is as before."""
        rng = random.Random(f"sleep {self.seed} {pool.name}")
        if rng.random() < 1 / 3:
            return pool
        return dataclasses.replace(
            pool,
            scale_down=rng.choice(tuple(ScaleDown)),
            sleep_stop_after_s=rng.choice((3.0, 600.0)),
            lend_gpus=rng.random() < 0.5,
            spares=rng.choice((0, 0, 1)),
        )

    def _routes(self) -> dict[str, Route]:
        routes = {pool.name: Route(pool.name) for pool in self.pools}
        if len(self.pools) == 2 and self.rng.random() < 0.5:
            routes["split"] = Route(self.pools[0].name, self.pools[1].name)
        return routes

    # ------------------------------------------------------------ phases

    def safety(self) -> None:
        """Anything may fail, one thing after another and at once."""
        world, rng = self.world, self.rng
        world.start()
        world.run(0.1)
        for pool in self.pools:
            world.apply_pool(pool)
        end = world.now + self.shape.safety_s
        world.agenda.after(rng.uniform(0.5, 6.0), self._fault, end)
        world.agenda.after(0.0, self._arrivals, end)
        memory = random.Random(f"memory {self.seed}")
        if memory.random() < 0.5:
            world.agenda.after(memory.uniform(1.0, 6.0), self._memory, end, memory)
        for provisioner in self.provisioners:
            provisioner.start()
        if self.provisioners:
            world.agenda.after(2.0, self._node_fault, random.Random(f"node faults {self.seed}"), end)
        while world.now < end:
            world.run(0.5)
            self.checkers.look()
        self.checkers.check_pace(world.control.plans_total, self.shape.safety_s)

    def _fault(self, end: float) -> None:
        if self.world.now < end:
            self.faults.inject()
            mean_s = 6.0 - 4.5 * self.shape.intensity
            self.world.agenda.after(self.rng.expovariate(1 / mean_s), self._fault, end)

    def _memory(self, end: float, rng: random.Random) -> None:
        if self.world.now < end:
            self.faults.order_memory(rng)
            self.world.agenda.after(rng.expovariate(1 / 3.0), self._memory, end, rng)

    def _arrivals(self, end: float) -> None:
        """Requests in waves."""
        world, rng = self.world, self.rng
        if world.now >= end:
            return
        rate = rng.choice((0.0, 0.5, 2.0, 8.0))
        wave_end = min(end, world.now + rng.uniform(1.0, 10.0))
        at = world.now
        while rate and (at := at + rng.expovariate(rate)) < wave_end:
            kind = rng.choice(sorted(self.routes))
            arrival = Arrival(0.0, rng.randint(1, 2000), rng.choice((1, 20, 200)), kind)
            world.agenda.at(at, world.submit, arrival, self.routes)
        world.agenda.at(wave_end, self._arrivals, end)

    def liveness(self) -> None:
        """Nothing fails any more: the world comes to rest, serves one request per pool, and comes to rest again."""
        world, checkers = self.world, self.checkers
        checkers.note("heal")
        for provisioner in self.provisioners:
            provisioner.heal()
        self.faults.heal()
        began, plans = world.now, world.control.plans_total
        self._come_to_rest()
        probes = {pool.name: world.submit(Arrival(0.0, 50, 5, pool.name), self.routes) for pool in self.pools}
        world.run_until(lambda: all(probe.ended for probe in probes.values()), 60.0)
        for name, probe in probes.items():
            served = probe.ended and not probe.error
            if not served and not self._cannot_serve(name):
                raise Violation(f"pool {name} does not serve at rest: {probe.error or 'no answer'}")
        self._come_to_rest()
        checkers.check_rest()
        checkers.check_pace(world.control.plans_total - plans, world.now - began)

    def _come_to_rest(self) -> None:
        def at_rest() -> bool:
            self.checkers.look()
            return not self.checkers.unrest()

        if not self.world.run_until(at_rest, _REST_LIMIT_S, step_s=1.0):
            text = f"not at rest {_REST_LIMIT_S:g} s after the last fault: {self.checkers.unrest()}"
            self.checkers.note(f"VIOLATION {text}")
            raise Violation(text)

    def _cannot_serve(self, name: str) -> bool:
        """For a reason that the pool itself gives."""
        pool = self.world.store.records.pools.get(name)
        return pool is None or bool(pool.intent.conditions)

    # ------------------------------------------------------------ outcome

    def outcome(self, violation: str) -> Outcome:
        world = self.world
        digest = sha256()
        for event in world.store.events:
            digest.update(repr((event.at, event.action, event.target, event.reason)).encode())
        for request in world.requests:
            digest.update(repr((request.number, request.worker, request.done_at, request.error)).encode())
        return Outcome(
            seed=self.seed,
            violation=violation,
            digest=digest.hexdigest()[:16],
            virtual_s=world.now - _START_AT_S,
            plans=world.control.plans_total,
            commits=self.checkers.commits_total,
            requests=len(world.requests),
            failed=sum(1 for request in world.requests if request.error),
            transcript=tuple(self.checkers.transcript),
        )
