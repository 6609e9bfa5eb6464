"""The fourth seed's API over the simulator: servers are nodes, instances are workers of a pool of their own.

Every call acts at the present virtual time through operators' orders and the real control plane; `Simulation.run_until`
lets time pass. Differences to the seed's source, each where that had a fault: ids are never used again, an idle
instance's server goes too, an instance is ACTIVE only when it can serve, transfers count for a drain, a server with
instances stays, power is accounted for.
"""

from collections.abc import Iterable, Sequence

from controlplane.core import orders
from controlplane.core.snapshot import Plan
from controlplane.store.store import Records
from simulator.cluster import Application, Cluster, Instance, InstanceStatus, Processor, Server, ServerStatus
from simulator.load import Arrival
from simulator.node import NodeModel
from simulator.requests import Request
from simulator.seed_config import ApplicationConfig, ModelParallelism, SeedConfig, ServerConfig
from simulator.world import Route, Watchers, World, WorldModel
from springtide.errors import FailedPrecondition, InvalidArgument
from springtide.model.enums import DrainAction
from springtide.model.pool import PolicySpec, PoolSpec

__all__ = [
    "Application",
    "Cluster",
    "Instance",
    "InstanceStatus",
    "Processor",
    "ScalingManager",
    "Server",
    "ServerStatus",
    "Simulation",
]

_FOREVER_S = 86_000.0


class ScalingManager:
    """`log` holds (time, action, target, status)."""

    def __init__(
        self,
        application: Application,
        cluster: Cluster,
        scale_up_delay: float = 10.0,
        drain_check_interval: float = 1.0,
        debug: bool = False,
    ) -> None:
        self.application = application
        self.cluster = cluster
        self.scale_up_delay = scale_up_delay
        self.drain_check_interval = drain_check_interval
        self.debug = debug
        self.log: list[tuple[float, str, str, str]] = []
        self._instances_made = 0
        self._pending_servers: dict[str, Server] = {}
        application._manager = self

    # ------------------------------------------------------------ up

    def scale_up_full(
        self,
        instance_cfg: object,
        parallelism: ModelParallelism,
        tag: str | None = None,
        server_sku: str | None = None,
    ) -> tuple[Server, Instance]:
        """A new server, and one instance on all its processors. Raises InvalidArgument, FailedPrecondition."""
        server = self.scale_up_server(self.cluster.get_server_config(server_sku))
        return server, self.scale_up_instance(instance_cfg, server.processors, parallelism, tag)

    def scale_up_server(self, server_cfg: ServerConfig) -> Server:
        """Raises FailedPrecondition when the power budget has no room for it."""
        cluster = self.cluster
        if cluster.power_w + server_cfg.power_w > cluster.config.power_budget:
            raise FailedPrecondition(
                f"a {server_cfg.sku} server draws {server_cfg.power_w:g} W, "
                f"{cluster.config.power_budget - cluster.power_w:g} W of the power budget are left.",
                reason="POWER_BUDGET",
                field="power_budget",
                value=cluster.config.power_budget,
                remedy="Remove a server first, or raise cluster.power_budget.",
            )
        server_id = cluster.next_server_id()
        model = NodeModel(
            gpus=server_cfg.processors,
            labels={"server": server_id, "sku": server_cfg.sku},
            start_s=max(self.scale_up_delay, self.application.config.spin_up_s),
            stop_s=0.0,
            adopt_s=0.0,
            drain_check_interval_s=self.drain_check_interval,
        )
        server = Server(server_id, server_cfg, cluster.world.add_node(server_id, model), cluster)
        cluster.servers.append(server)
        self._note("scale_up_server", server_id, ServerStatus.SCALING_UP)
        server.node.start_agent()
        self._now()
        return server

    def scale_up_instance(
        self,
        instance_cfg: object,
        processors: Sequence[Processor],
        parallelism: ModelParallelism,
        tag: str | None = None,
    ) -> Instance:
        """In SCALING_UP. It gets as many of its server's free processors; which ones is the placement's choice."""
        owners = {processor.server_id for processor in processors}
        server = next((s for s in self.cluster.servers if {s.server_id} == owners), None)
        taken = sum(len(instance.processors) for instance in server.instances) if server is not None else 0
        if server is None or len(processors) > server.config.processors - taken:
            raise InvalidArgument(
                field="processors",
                value=len(processors),
                problem="are not free processors of one server",
                remedy="Give free processors of one server.",
            )
        if len(processors) < parallelism.num_processors:
            raise InvalidArgument(
                field="parallelism",
                value=parallelism.num_processors,
                problem=f"needs more than the {len(processors)} processors given",
                remedy="Give pipeline_parallelism x tensor_parallelism processors.",
            )
        instance = Instance(f"instance_{self._instances_made}", tag, server, parallelism, self.application)
        self._instances_made += 1
        self.cluster.instances.append(instance)
        self.application.instances.append(instance)
        self.cluster.world.apply_pool(
            PoolSpec(
                instance.pool,
                "sim",
                tensor_parallel_size=len(processors),
                min_workers=0,
                max_workers=1,
                initial_workers=1,
                policy=PolicySpec("static"),
                placement={"server": server.server_id},
                drain_action=DrainAction.WAIT,
                drain_timeout_s=_FOREVER_S,
            )
        )
        self._now()
        return instance

    # ------------------------------------------------------------ down

    def scale_down_full(self, instance: Instance) -> None:
        """Drains the instance; its server goes when it was the last one there."""
        if self.scale_down_instance(instance):
            self._pending_servers[instance.instance_id] = instance.server
            self._finish_servers()
            self._now()

    def scale_down_instance(self, instance: Instance) -> bool:
        """False (and a row in the log) unless it is ACTIVE."""
        worker, status = instance.worker, instance.status
        if worker is None or status is not InstanceStatus.ACTIVE:
            self._note("scale_down_invalid", instance.instance_id, status)
            return False
        self.cluster.world.control.execute(
            lambda snapshot, now: orders.drain_worker(snapshot, worker.worker_id, now, reason="scale_down")
        )
        self._now()
        return True

    def scale_down_server(self, server: Server) -> bool:
        """False (and a row in the log) while it holds an instance."""
        if server.instances:
            self._note("scale_down_server_invalid", server.server_id, "has_instances")
            return False
        if not server.gone:
            server.gone = True
            self._note("scale_down_server", server.server_id, ServerStatus.SCALING_DOWN)
            self.cluster.servers.remove(server)
            server.node.goodbye()
            self._now()
        return True

    def cancel_scale_down(self, instance: Instance) -> None:
        """Keeps a draining instance. Raises FailedPrecondition when it is too late."""
        worker = instance.worker
        if worker is not None:
            self.cluster.world.control.execute(
                lambda snapshot, now: orders.undrain_worker(snapshot, worker.worker_id, now)
            )
            self._pending_servers.pop(instance.instance_id, None)
            self._now()

    # ------------------------------------------------------------ looking

    def can_schedule_to_instance(self, instance: Instance) -> bool:
        return instance.status is InstanceStatus.ACTIVE

    def get_active_instances(self, instances: Iterable[Instance]) -> list[Instance]:
        return [instance for instance in instances if self.can_schedule_to_instance(instance)]

    def get_status_summary(self) -> dict[str, int]:
        instances = [i.status for i in self.application.instances]
        servers = [server.status for server in self.cluster.servers]
        return {
            "active_instances": instances.count(InstanceStatus.ACTIVE),
            "scaling_up_instances": instances.count(InstanceStatus.SCALING_UP),
            "draining_instances": instances.count(InstanceStatus.DRAINING),
            "active_servers": servers.count(ServerStatus.ACTIVE),
            "scaling_up_servers": servers.count(ServerStatus.SCALING_UP),
            "pending_server_scale_downs": len(self._pending_servers),
            "total_servers": len(servers),
            "total_instances": len(instances),
        }

    # ------------------------------------------------------------ inside

    def heard(self, before: Records, after: Records, made: Plan) -> None:
        """The control plane has committed: its events are the log."""
        world = self.cluster.world
        for event in made.events:
            if event.pool and event.action.startswith(("scale_", "drain_cancelled", "worker_failed")):
                self._note(event.action, event.pool.replace("-", "_"), event.status)
            if event.action == "scale_down_complete":
                world.agenda.at(world.now, self._finish_servers)
        ended = [i for i in self.application.instances if i.worker is not None and not i.holds]
        for instance in ended:
            self.application.instances.remove(instance)

    def _finish_servers(self) -> None:
        for instance_id, server in list(self._pending_servers.items()):
            instance = next(i for i in self.cluster.instances if i.instance_id == instance_id)
            if not instance.holds and not server.instances:
                del self._pending_servers[instance_id]
                self.scale_down_server(server)

    def _note(self, action: str, target: str, status: str) -> None:
        self.log.append((round(self.cluster.world.now, 6), action, target, str(status)))
        if self.debug:
            print(f"{self.log[-1][0]:g},{action},{target},{status}")

    def _now(self) -> None:
        """Lets everything happen that takes no time."""
        self.cluster.world.run(0.0)


class Simulation:
    """A cluster and one application of a configuration, at time 0 with its start state ACTIVE."""

    def __init__(self, config: SeedConfig, application: ApplicationConfig | None = None, seed: int = 0) -> None:
        watchers = Watchers()
        self.world = World(WorldModel(seed=seed), watchers)
        self.cluster = Cluster(self.world, config)
        self.application = Application(application or config.applications[0])
        chosen = self.application.config
        self.manager = ScalingManager(
            self.application, self.cluster, chosen.scale_up_delay, chosen.drain_check_interval, chosen.debug
        )
        watchers.committed = self.manager.heard
        self.world.start()
        for group in config.start:
            for _ in range(group.num_instances):
                self.manager.scale_up_full(None, group.parallelism, group.tag)

    @property
    def now(self) -> float:
        return self.world.now

    def run_until(self, time: float) -> None:
        self.world.agenda.run_until(time)

    def submit(self, instance: Instance, prompt_tokens: int, output_tokens: int) -> Request:
        """A request for one instance, as the seed's schedulers choose it."""
        arrival = Arrival(0.0, prompt_tokens, output_tokens)
        return self.world.submit(arrival, {arrival.kind: Route(instance.pool)})
