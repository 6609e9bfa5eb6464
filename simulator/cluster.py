"""The fourth seed's things over the simulator: servers are nodes, instances are workers of a pool of their own."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from simulator.node import ModelNode
from simulator.seed_config import ApplicationConfig, ModelParallelism, SeedConfig, ServerConfig
from simulator.world import World
from springtide.errors import InvalidArgument
from springtide.model.enums import NodeState, Phase, State
from springtide.model.worker import Worker

if TYPE_CHECKING:
    from simulator.facade import ScalingManager


class InstanceStatus(StrEnum):
    ACTIVE = "active"
    SCALING_UP = "scaling_up"
    DRAINING = "draining"
    SCALING_DOWN = "scaling_down"


class ServerStatus(StrEnum):
    ACTIVE = "active"
    SCALING_UP = "scaling_up"
    SCALING_DOWN = "scaling_down"


@dataclass(frozen=True, slots=True)
class Processor:
    """One GPU of a server."""

    server_id: str
    processor_id: str


@dataclass(slots=True, eq=False)
class Server:
    server_id: str
    config: ServerConfig
    node: ModelNode
    cluster: "Cluster"
    gone: bool = False

    @property
    def processors(self) -> list[Processor]:
        return [Processor(self.server_id, str(number)) for number in range(self.config.processors)]

    @property
    def instances(self) -> list["Instance"]:
        """Those that hold processors here."""
        return [i for i in self.cluster.instances if i.server is self and i.worker is not None and i.holds]

    @property
    def status(self) -> ServerStatus:
        if self.gone:
            return ServerStatus.SCALING_DOWN
        record = self.cluster.world.store.records.nodes.get(self.server_id)
        up = record is not None and record.state is NodeState.UP
        return ServerStatus.ACTIVE if up else ServerStatus.SCALING_UP


@dataclass(slots=True, eq=False)
class Instance:
    instance_id: str
    tag: str | None
    server: Server
    parallelism: ModelParallelism
    application: "Application"

    @property
    def pool(self) -> str:
        """The pool that it alone is in."""
        return self.instance_id.replace("_", "-")

    @property
    def worker(self) -> Worker | None:
        """Its record; None before it was started."""
        workers = self.server.cluster.world.store.records.workers.values()
        return next((worker for worker in workers if worker.pool == self.pool), None)

    @property
    def holds(self) -> bool:
        worker = self.worker
        return worker is not None and (worker.state is not State.INACTIVE or bool(worker.intent.gpu_ids))

    @property
    def processors(self) -> list[Processor]:
        worker = self.worker
        return [Processor(self.server.server_id, gpu) for gpu in worker.intent.gpu_ids] if worker is not None else []

    @property
    def status(self) -> InstanceStatus:
        worker = self.worker
        if worker is None or worker.state is State.STARTING:
            return InstanceStatus.SCALING_UP
        if worker.state is State.ACTIVE:
            return InstanceStatus.ACTIVE
        releasing = worker.intent.phase is Phase.RELEASING
        draining = worker.state is State.DRAINING and not releasing
        return InstanceStatus.DRAINING if draining else InstanceStatus.SCALING_DOWN

    @property
    def pending(self) -> int:
        """Requests in it, transfers on their way to it included."""
        shims = self.server.cluster.world.endpoints.values()
        worker = self.worker
        return sum(shim.in_flight for shim in shims if worker is not None and shim.worker_id == worker.worker_id)

    def is_active_for_scheduling(self) -> bool:
        return self.application.scaling_manager.can_schedule_to_instance(self)


class Cluster:
    """Servers, and the power that they may draw together."""

    def __init__(self, world: World, config: SeedConfig) -> None:
        self.world = world
        self.config = config
        self.servers: list[Server] = []
        self.instances: list[Instance] = []
        self._servers_made = 0

    @property
    def power_w(self) -> float:
        return sum(server.config.power_w for server in self.servers)

    def get_server_config(self, sku: str | None = None) -> ServerConfig:
        """The first configured one when no SKU is named. Raises InvalidArgument."""
        known = {server.sku: server for server in self.config.servers}
        if sku is None and known:
            return self.config.servers[0]
        if sku not in known:
            raise InvalidArgument(
                field="server_sku",
                value=sku,
                problem="is not configured",
                remedy=f"Configured: {', '.join(known) or 'none'}.",
                reason="UNKNOWN_SKU",
            )
        return known[sku]

    def next_server_id(self) -> str:
        self._servers_made += 1
        return f"server_{self._servers_made - 1}"


@dataclass(slots=True)
class Application:
    config: ApplicationConfig
    instances: list[Instance] = field(default_factory=list)
    _manager: "ScalingManager | None" = None

    @property
    def scaling_manager(self) -> "ScalingManager":
        assert self._manager is not None
        return self._manager

    def get_schedulable_instances(self, instances: Iterable[Instance] | None = None) -> list[Instance]:
        return self.scaling_manager.get_active_instances(self.instances if instances is None else instances)
