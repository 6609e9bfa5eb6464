"""A whole system on one agenda: control plane, nodes, routers, and the requests that come in."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from controlplane.core import orders
from controlplane.core.orders.pools import LONGEST_HOLD_S
from controlplane.core.snapshot import Plan, Timing
from controlplane.store.store import Records
from simulator.agenda import Agenda
from simulator.controlplane import ModelControlPlane
from simulator.load import Arrival
from simulator.meter import Look, Meter
from simulator.network import Conditions, Network
from simulator.node import ModelNode, NodeModel
from simulator.performance import Constants, Performance
from simulator.requests import Request
from simulator.router import ModelRouter
from simulator.shim import Shim
from simulator.store import ModelStore
from simulator.worker import ModelWorker
from springtide.model.enums import State
from springtide.model.pool import PoolSpec

LONGEST_DRAIN_OUT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """How a KV cache travels from a prefilling to a decoding worker."""

    bytes_per_token: float = 327_680.0  # 80 layers, 8 KV heads of 128, two tensors, two bytes
    bytes_per_s: float = 25e9
    latency_s: float = 0.002

    def seconds(self, tokens: int) -> float:
        return self.latency_s + tokens * self.bytes_per_token / self.bytes_per_s


@dataclass(slots=True)
class Route:
    """Which pools serve a kind of request."""

    pool: str
    decode_pool: str = ""
    labels: tuple[tuple[str, str], ...] = ()  # that its requests ask of a worker


@dataclass(slots=True)
class Watchers:
    """Who looks at what happens; the swarm's checkers do. Each default does nothing."""

    committed: Callable[[Records, Records, Plan], None] = lambda before, after, made: None
    spawned: Callable[[ModelNode, ModelWorker], None] = lambda node, worker: None
    dispatched: Callable[[ModelRouter, Request, str], None] = lambda router, request, worker_id: None
    ended: Callable[[Request], None] = lambda request: None


@dataclass(slots=True)
class WorldModel:
    """What a world is made of."""

    seed: int = 0
    timing: Timing = field(default_factory=Timing)
    conditions: Conditions = field(default_factory=Conditions)
    routers: int = 1
    performance: Performance = field(default_factory=Constants)
    transfer: Transfer = field(default_factory=Transfer)
    start_at_s: float = 0.0
    store_id: str = "simulated"


class World:
    """Build it, add nodes and pools, `start`, then `run` it for a while or let it `serve` a load."""

    def __init__(self, model: WorldModel | None = None, watchers: Watchers | None = None) -> None:
        self.model = model or WorldModel()
        self.watchers = watchers or Watchers()
        self.agenda = Agenda(self.model.start_at_s)
        self.rng = random.Random(self.model.seed)
        self.network = Network(self.agenda, random.Random(self.rng.random()), self.model.conditions)
        self.store = ModelStore(self.model.store_id, random.Random(self.rng.random()))
        self.meter = Meter()
        self.control = ModelControlPlane(self.agenda, self.network, self.store, self.model.timing, self._committed)
        self.endpoints: dict[str, Shim] = {}
        self.nodes: dict[str, ModelNode] = {}
        self.routers: list[ModelRouter] = []
        self.requests: list[Request] = []
        self.looks: list[Look] = []
        self.load_began_at = self.model.start_at_s
        self.ended_total = 0
        for number in range(self.model.routers):
            self.add_router(f"router-{number + 1}")

    @property
    def now(self) -> float:
        return self.agenda.now

    # ------------------------------------------------------------ building

    def add_router(self, router_id: str) -> ModelRouter:
        router = ModelRouter(
            router_id,
            self.agenda,
            self.network,
            self.control,
            random.Random(self.rng.random()),
            self.endpoints,
            self._request_ended,
            self.model.transfer.seconds,
            self.watchers.dispatched,
        )
        self.routers.append(router)
        return router

    def add_node(
        self, node_id: str, model: NodeModel | None = None, performance: Performance | None = None
    ) -> ModelNode:
        """A node that is not yet switched on."""
        node = ModelNode(
            node_id,
            self.agenda,
            self.network,
            self.control,
            random.Random(self.rng.random()),
            self.endpoints,
            model,
            performance or self.model.performance,
            self.model.timing.heartbeat_interval_s,
            self.watchers.spawned,
        )
        self.nodes[node_id] = node
        return node

    def apply_pool(self, spec: PoolSpec) -> None:
        """Creates or changes a pool, as `springtide apply` does. Raises InvalidArgument."""
        self.control.execute(lambda snapshot, now: orders.apply_pool(snapshot, spec, now))

    def hold_pool(self, name: str) -> None:
        """Its policy is not asked, until `resume_pool` or for a day."""
        self.control.execute(lambda s, now: orders.pause_pool(s, name, now, hold_s=LONGEST_HOLD_S))

    def resume_pool(self, name: str) -> None:
        self.control.execute(lambda s, now: orders.resume_pool(s, name, now))

    def start(self) -> None:
        """Switches everything on."""
        self.control.start()
        self.agenda.run_until(self.now)
        for node in self.nodes.values():
            node.start_agent()
        for router in self.routers:
            router.start()
        self.agenda.run_until(self.now)

    # ------------------------------------------------------------ running

    def run(self, seconds: float) -> None:
        self.agenda.run_until(self.now + seconds)

    def run_until(self, done: Callable[[], bool], limit_s: float, step_s: float = 0.5) -> bool:
        """Runs until `done`, at most `limit_s`. Whether it is."""
        end = self.now + limit_s
        while not done():
            if self.now >= end:
                return False
            self.run(min(step_s, end - self.now))
        return True

    def settled(self) -> bool:
        """Every pool has as many ACTIVE workers as it wants, and nobody is on the way."""
        records = self.store.records
        for name, pool in records.pools.items():
            states = [worker.state for worker in records.workers.values() if worker.pool == name]
            if states.count(State.ACTIVE) != pool.intent.desired_workers or State.STARTING in states:
                return False
        return True

    def submit(self, arrival: Arrival, routes: Mapping[str, Route]) -> Request:
        """One request, now, to the routers in turn."""
        route = routes[arrival.kind]
        request = Request(
            len(self.requests), self.now, arrival.prompt_tokens, arrival.output_tokens, route.pool, route.decode_pool
        )
        request.labels = route.labels
        self.requests.append(request)
        live = [router for router in self.routers if router.up]
        if live:
            live[request.number % len(live)].submit(request)
        else:
            request.error, request.done_at = "ROUTER_LOST", self.now
            self._request_ended(request)
        return request

    def serve(
        self,
        load: Iterable[Arrival],
        routes: Mapping[str, Route],
        *,
        look_interval_s: float = 1.0,
        tail_s: float = 0.0,
        horizon_s: float = 0.0,
    ) -> None:
        """Replays a load and waits for its last answer plus `tail_s`, and at least until `horizon_s`. Cost and looks
        count from its begin."""
        self.load_began_at = self.now
        self.meter.begin(self.now)
        self.meter.committed(self.store.records, self.now)
        arrivals = iter(load)
        self._next_arrival(arrivals, routes)
        self._look(look_interval_s)
        end = self.now + LONGEST_DRAIN_OUT_S
        while self._arriving or self.ended_total < len(self.requests):
            self.run(5.0)
            if self._arriving:
                end = self.now + LONGEST_DRAIN_OUT_S
            elif self.now > end:
                break
        self.agenda.run_until(max(self.now + tail_s, self.load_began_at + horizon_s))
        self.meter.advance(self.now)
        self._looking = False

    def _next_arrival(self, arrivals: Iterator[Arrival], routes: Mapping[str, Route]) -> None:
        arrival = next(arrivals, None)
        self._arriving = arrival is not None
        if arrival is not None:
            self.agenda.at(self.load_began_at + arrival.at_s, self._arrive, arrival, arrivals, routes)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], routes: Mapping[str, Route]) -> None:
        self.submit(arrival, routes)
        self._next_arrival(arrivals, routes)

    _arriving = False
    _looking = True

    # ------------------------------------------------------------ watching

    def _committed(self, before: Records, after: Records, made: Plan) -> None:
        self.meter.committed(after, self.now)
        self.watchers.committed(before, after, made)

    def _request_ended(self, request: Request) -> None:
        self.ended_total += 1
        self.watchers.ended(request)

    def _look(self, interval_s: float) -> None:
        if not self._looking:
            return
        workers = self.meter.counts()
        self.looks.append(
            Look(
                at_s=self.now - self.load_began_at,
                arrived=len(self.requests),
                ended=self.ended_total,
                in_flight=sum(shim.in_flight for shim in self.endpoints.values()),
                waiting=sum(r.admission.waiting(pool) for r in self.routers for pool in r.admission.waiting_pools()),
                starting=workers[State.STARTING],
                active=workers[State.ACTIVE],
                draining=workers[State.DRAINING],
            )
        )
        self.agenda.after(interval_s, self._look, interval_s)
