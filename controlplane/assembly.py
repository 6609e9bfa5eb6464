"""The parts of a control plane put together around a store: used by the process, and by tests in their own loop."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from controlplane.config import ControlPlaneConfig
from controlplane.live import Live
from controlplane.loops.hub import Hub
from controlplane.loops.leader import Leader, Step
from controlplane.services.agent import AgentService
from controlplane.services.controlplane import ControlPlaneService
from controlplane.services.joining import Door
from controlplane.services.pools import create_missing
from controlplane.services.provisioner import ProvisionerService
from controlplane.services.routing import RoutingService
from controlplane.store.store import Store
from controlplane.verbs import Verbs
from springtide.clock import Clock
from springtide.rpc import Server
from springtide.rpc.tokens import JoinTokens, load_secret
from springtide.v1 import agent_pb2_grpc, controlplane_pb2_grpc, provisioner_pb2_grpc, routing_pb2_grpc

log = logging.getLogger(__name__)

CONTROLPLANE = "springtide.v1.ControlPlaneService"
PROVISIONERS = "springtide.v1.ProvisionerService"
_HEALTH_INTERVAL_S = 0.25


class ControlPlane:
    """`start` binds and leads, `stop` ends it. `leader`, `live` and `hub` are open to metrics and tests."""

    def __init__(
        self, store: Store, settings: ControlPlaneConfig, clock: Clock, on_step: Callable[[Step], None] = lambda _: None
    ) -> None:
        timing = settings.timing.timing()
        self.store = store
        self.live = Live(timing.heartbeat_interval_s)
        self.hub = Hub()
        self.clock = clock
        self._settings = settings
        self._timing = timing
        self._on_step = on_step
        join = JoinTokens(load_secret(Path(settings.data_dir)), clock) if settings.asks_for_tokens else None
        self._door = Door(join)
        self._server = Server(settings.security(), join=join)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Returns the bound address. Raises before anything runs when the port, the store or a pool cannot be used."""
        settings, timing = self._settings, self._timing
        initial = settings.initial_pools()
        address = self._server.listen(settings.listen, "listen")
        await self.store.open()
        rules = settings.nodes.rules()
        self.leader = Leader(self.store, self.live, self.hub, self.clock, timing, self._on_step, rules)
        await create_missing(self.leader, initial)
        self._add_services()
        await self._server.start()
        self._tasks = [asyncio.create_task(self.leader.run()), asyncio.create_task(self._tell_health())]
        await self._until_published()
        return address

    async def _until_published(self) -> None:
        """Raises the fault of a leader that ends before it has published anything: nobody would be told anything."""
        ready = asyncio.create_task(self.hub.wait_ready())
        await asyncio.wait({ready, self._tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._tasks[0].done():
            self._tasks[0].result()

    async def leading(self) -> None:
        """Returns when the leader has ended: after `stop`, or by a fault that it could not outlive, which is logged."""
        await asyncio.wait(self._tasks[:1])
        fault = None if self._tasks[0].cancelled() else self._tasks[0].exception()
        if fault is not None:
            log.critical("the leader has ended", exc_info=fault)

    async def stop(self) -> None:
        """No new calls, sessions end, the commit under way finishes, the store closes."""
        self.hub.close()
        self.leader.stop()
        await self._server.stop(self._settings.stop_timeout_s)
        leading, telling = self._tasks
        telling.cancel()
        await asyncio.gather(leading, telling, return_exceptions=True)
        await self.store.close()

    def _add_services(self) -> None:
        live, hub, leader, clock = self.live, self.hub, self.leader, self.clock
        verbs = Verbs(hub)
        agents = AgentService(live, hub, leader, clock, self._timing.heartbeat_interval_s, verbs, self._door)
        provisioners = ProvisionerService(live, hub, leader, clock, self._timing.heartbeat_interval_s, self._door)
        routers = RoutingService(live, hub, leader, clock)
        operators = ControlPlaneService(self.store, hub, leader, clock, verbs, self._door)
        add = self._server.add
        add(agent_pb2_grpc.add_AgentServiceServicer_to_server, agents, "springtide.v1.AgentService")
        add(provisioner_pb2_grpc.add_ProvisionerServiceServicer_to_server, provisioners, PROVISIONERS)
        add(routing_pb2_grpc.add_RoutingServiceServicer_to_server, routers, "springtide.v1.RoutingService")
        add(controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server, operators, CONTROLPLANE)

    async def _tell_health(self) -> None:
        """Agents and routers are served the last committed state anyway; operators need a leader that acts."""
        await self.hub.wait_ready()
        await self._server.set_all_serving(True)
        serving = True
        while True:
            if self.leader.healthy is not serving:
                serving = self.leader.healthy
                text = "orders are acted on again" if serving else "orders cannot be acted on now: NOT_SERVING"
                log.log(logging.INFO if serving else logging.ERROR, text)
                await self._server.set_serving(CONTROLPLANE, serving)
                await self._server.set_serving("", serving)
            await asyncio.sleep(_HEALTH_INTERVAL_S)
