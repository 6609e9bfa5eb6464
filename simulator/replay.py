"""One load against one fleet: what `springtide simulate run` and the comparison do."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from controlplane.core.snapshot import Timing
from simulator.load import DEFAULT_KIND, Arrival
from simulator.node import NodeModel
from simulator.performance import Constants, Performance
from simulator.world import Route, Transfer, World, WorldModel
from springtide.errors import InvalidArgument
from springtide.model.enums import Role
from springtide.model.pool import PolicySpec, PoolSpec

_SETTLE_SLACK_S = 120.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Nodes of one kind and how long engines take to start on them."""

    nodes: int = 4
    gpus: int = 8
    start_up_s: float = 20.0
    start_jitter_s: float = 0.0

    def model(self) -> NodeModel:
        return NodeModel(gpus=self.gpus, start_s=self.start_up_s, start_jitter_s=self.start_jitter_s)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Pools on a fleet. `routes` say which pools serve which kind of request."""

    pools: tuple[PoolSpec, ...]
    routes: Mapping[str, Route]
    fleet: Fleet = Fleet()
    performance: Performance = field(default_factory=Constants)
    transfer: Transfer = field(default_factory=Transfer)
    timing: Timing = field(default_factory=Timing)
    seed: int = 0
    tail_s: float = 0.0
    horizon_s: float = 0.0  # served at least so long, so that costs compare


def one_pool(
    policy: PolicySpec,
    *,
    min_workers: int,
    max_workers: int,
    initial_workers: int | None = None,
    tensor_parallel_size: int = 1,
    **fields: object,
) -> PoolSpec:
    """The usual pool: everything is served by the same workers."""
    spec = PoolSpec(
        "demo",
        "sim",
        tensor_parallel_size=tensor_parallel_size,
        min_workers=min_workers,
        max_workers=max_workers,
        initial_workers=initial_workers,
        policy=policy,
    )
    return replace(spec, **fields)  # type: ignore[arg-type]  # names are PoolSpec's


def split_pools(base: PoolSpec, prefill: int, decode: int) -> tuple[PoolSpec, PoolSpec]:
    """A prefill and a decode pool from one spec, each with its initial count."""
    return (
        replace(base, name="prompt", role=Role.PREFILL, initial_workers=prefill),
        replace(base, name="token", role=Role.DECODE, initial_workers=decode),
    )


def build(scenario: Scenario) -> World:
    """The world, switched on, with its initial workers ACTIVE; policies have not been asked yet. Raises
    InvalidArgument when they do not fit."""
    world = World(
        WorldModel(
            seed=scenario.seed,
            timing=scenario.timing,
            performance=scenario.performance,
            transfer=scenario.transfer,
        )
    )
    for number in range(scenario.fleet.nodes):
        world.add_node(f"node-{number + 1}", scenario.fleet.model())
    world.start()
    for spec in scenario.pools:
        world.apply_pool(spec)
        world.hold_pool(spec.name)
    fleet = scenario.fleet
    if not world.run_until(world.settled, fleet.start_up_s + fleet.start_jitter_s + _SETTLE_SLACK_S):
        raise InvalidArgument(
            field="initial_workers",
            value=sum(pool.intent.desired_workers for pool in world.store.records.pools.values()),
            problem=f"do not become ACTIVE on {fleet.nodes} nodes of {fleet.gpus} GPUs",
            remedy="Give more nodes or GPUs, or fewer workers.",
        )
    for spec in scenario.pools:
        world.resume_pool(spec.name)
    return world


def replay(scenario: Scenario, load: Sequence[Arrival]) -> World:
    """Serves a load to its last answer. Cost and decisions count from the begin of the load."""
    unknown = sorted({arrival.kind for arrival in load} - set(scenario.routes))
    if unknown and DEFAULT_KIND not in scenario.routes:
        raise InvalidArgument(
            field="routes",
            value=", ".join(unknown),
            problem="no pool serves these requests",
            remedy=f"Served kinds: {', '.join(sorted(scenario.routes))}.",
        )
    routes = dict.fromkeys(unknown, scenario.routes[DEFAULT_KIND]) | dict(scenario.routes)
    with _rare_collections():
        world = build(scenario)
        length_s = load[-1].at_s if load else 0.0
        world.serve(
            load,
            routes,
            look_interval_s=max(1.0, length_s / 4000),
            tail_s=scenario.tail_s,
            horizon_s=scenario.horizon_s,
        )
    return world


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Requests stay until the end and cycles are few: looking for garbage as often as usual costs a tenth of a run."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
