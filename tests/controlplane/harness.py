"""A control plane in this loop, and fake agents and routers that speak to it over real sockets."""

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio

from controlplane.assembly import ControlPlane
from controlplane.config import ControlPlaneConfig, TimingSettings
from controlplane.loops.leader import Step
from controlplane.store.memory import MemoryStore
from controlplane.store.store import Store
from springtide.clock import SystemClock
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from springtide.model.node import Gpu, NodeObserved
from springtide.model.routing import PoolReport, RouterReport, RoutingTable
from springtide.model.worker import ExitInfo, WorkerReport
from springtide.rpc import channel
from springtide.v1 import agent_pb2, agent_pb2_grpc, controlplane_pb2_grpc, routing_pb2, routing_pb2_grpc
from springtide.wire import agent as agent_wire
from springtide.wire import routing as routing_wire

FAST = TimingSettings(
    heartbeat_interval_s=0.1,
    suspect_after_s=1.0,
    lease_s=3.0,
    grace_s=3.0,
    ack_timeout_s=10.0,
    sample_interval_s=0.1,
    start_backoff_s=0.05,
    monitoring_interval_s=0.2,
)


async def until(condition: Callable[[], Any], what: str = "", bound_s: float = 20.0) -> Any:
    """Polls `condition` (plain or async) until it is true, and returns what it gave."""
    deadline = asyncio.get_running_loop().time() + bound_s
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {bound_s:g} s: {what or condition}")
        await asyncio.sleep(0.01)


async def start_control(
    store: Store | None = None,
    timing: TimingSettings = FAST,
    on_step: Callable[[Step], None] = lambda step: None,
    **settings: Any,
) -> tuple[ControlPlane, str]:
    """A control plane on a free port."""
    config = ControlPlaneConfig(listen="127.0.0.1:0", timing=timing, stop_timeout_s=0.2, **settings)
    control = ControlPlane(store or MemoryStore(), config, SystemClock(), on_step)
    return control, await control.start()


def operator(ch: grpc.aio.Channel) -> Any:  # the generated stub; its asyncio type exists for type checkers only
    return controlplane_pb2_grpc.ControlPlaneServiceStub(ch)


class FakeAgent:
    """Does what it is told at once. `orders` remembers every order that it was sent, once for each generation."""

    def __init__(self, address: str, node_id: str = "n1", gpus: int = 4, interval_s: float = 0.1) -> None:
        self.address = address
        self.node_id = node_id
        self.session_id = secrets.token_hex(4)
        self.observed = NodeObserved("boot", "127.0.0.1", tuple(Gpu(str(i), simulated=True) for i in range(gpus)))
        self.reports: dict[str, WorkerReport] = {}
        self.in_flight: dict[str, int] = {}
        self.orders: list[tuple[str, Want | None]] = []
        self.desired: dict[str, DesiredWorker] = {}
        self.answers = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.starts_as = ReportedPhase.READY
        self._interval_s = interval_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said_goodbye = False

    async def __aenter__(self) -> "FakeAgent":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """As by SIGKILL: the connection goes, nothing is said. Its engines live on in `reports`."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def say(self) -> None:
        """A heartbeat now."""
        self._wake.set()

    def set_in_flight(self, worker_id: str, number: int) -> None:
        self.in_flight[worker_id] = number
        self._refresh(worker_id)
        self.say()

    def set_phase(self, worker_id: str, phase: ReportedPhase, exit_info: ExitInfo | None = None) -> None:
        self.reports[worker_id] = dataclasses.replace(self.reports[worker_id], phase=phase, exit=exit_info)
        self.say()

    def goodbye(self) -> None:
        self._said_goodbye = True
        self.say()

    async def _run(self) -> None:
        while True:
            try:
                async with channel(self.address) as ch:
                    stub = agent_pb2_grpc.AgentServiceStub(ch)
                    async for response in stub.Session(self._requests()):
                        self._take(response)
            except grpc.aio.AioRpcError as error:
                self.error = error
            await asyncio.sleep(0.05)

    async def _requests(self) -> Any:
        hello = agent_wire.Hello(self.node_id, self.session_id, self.observed)
        yield agent_pb2.SessionRequest(hello=agent_wire.hello_to_proto(hello))
        sequence = 0
        while True:
            sequence += 1
            beat = agent_wire.Heartbeat(sequence, tuple(self.reports.values()))
            yield agent_pb2.SessionRequest(heartbeat=agent_wire.heartbeat_to_proto(beat))
            if self._said_goodbye:
                yield agent_pb2.SessionRequest(goodbye=agent_pb2.NodeGoodbye(reason="test"))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            self._wake.clear()

    def _take(self, response: agent_pb2.SessionResponse) -> None:
        self.answers += 1
        reported = dict(self.reports)
        for message in response.workers:
            desired = agent_wire.desired_from_proto(message)
            before = self.desired.get(desired.worker_id)
            if before is None or (before.generation, before.want) != (desired.generation, desired.want):
                self.orders.append((desired.worker_id, desired.want))
            self.desired[desired.worker_id] = desired
            self._obey(desired, response.store_id)
        if reported != self.reports:
            self.say()

    def _obey(self, desired: DesiredWorker, store_id: str) -> None:
        report = self.reports.get(desired.worker_id)
        ended = report is None or report.phase in (ReportedPhase.STOPPED, ReportedPhase.FAILED)
        if report is not None and (desired.generation < report.generation or store_id != report.store_id):
            return
        if desired.want is Want.RUN and ended and (report is None or desired.generation > report.generation):
            self.reports[desired.worker_id] = WorkerReport(
                desired.worker_id,
                desired.pool,
                store_id,
                desired.generation,
                incarnation=(report.incarnation if report is not None else 0) + 1,
                phase=self.starts_as,
                endpoint=f"127.0.0.1:{9000 + len(self.reports)}",
                gpu_ids=desired.launch.gpu_ids,
                max_in_flight=8,
                in_flight=0,
                traceparent=desired.traceparent,
            )
        elif report is not None and not ended:
            phases = {Want.RUN: report.phase, Want.DRAIN: ReportedPhase.DRAINING, Want.STOP: ReportedPhase.STOPPED}
            phase = phases.get(desired.want, report.phase) if desired.want is not None else report.phase
            if desired.want is Want.RUN and phase is ReportedPhase.DRAINING:
                phase = ReportedPhase.READY
            if desired.abort_in_flight:
                self.in_flight[desired.worker_id] = 0
            self.reports[desired.worker_id] = dataclasses.replace(report, phase=phase, generation=desired.generation)
            self._refresh(desired.worker_id)

    def _refresh(self, worker_id: str) -> None:
        number = self.in_flight.get(worker_id, 0)
        report = self.reports[worker_id]
        idle = number == 0 and report.phase is ReportedPhase.DRAINING
        self.reports[worker_id] = dataclasses.replace(report, in_flight=number, engine_idle=idle)


class FakeRouter:
    """Keeps a table as a router does and acknowledges each revision, unless told not to."""

    def __init__(self, address: str, router_id: str = "r1") -> None:
        self.address = address
        self.router_id = router_id
        self.session_id = secrets.token_hex(4)
        self.table = RoutingTable()
        self.acks = True
        self.messages: list[routing_pb2.WatchResponse] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._outbox: asyncio.Queue[routing_pb2.WatchRequest] = asyncio.Queue()
        self._demand = RouterReport()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "FakeRouter":
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._report())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def demand(self, *pools: PoolReport) -> None:
        self._demand = RouterReport(pools)
        self._outbox.put_nowait(routing_pb2.WatchRequest(report=routing_wire.report_to_proto(self._demand)))

    def ack(self) -> None:
        ack = routing_pb2.RouterAck(store_id=self.table.store_id, revision=self.table.revision)
        self._outbox.put_nowait(routing_pb2.WatchRequest(ack=ack))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self._outbox.put_nowait(routing_pb2.WatchRequest(report=routing_wire.report_to_proto(self._demand)))

    async def _run(self) -> None:
        while True:
            try:
                async with channel(self.address) as ch:
                    async for message in routing_pb2_grpc.RoutingServiceStub(ch).Watch(self._requests()):
                        self._take(message)
            except grpc.aio.AioRpcError as error:
                self.error = error
            await asyncio.sleep(0.05)

    async def _requests(self) -> Any:
        self._outbox = asyncio.Queue()
        yield routing_pb2.WatchRequest(
            hello=routing_pb2.RouterHello(
                router_id=self.router_id,
                session_id=self.session_id,
                store_id=self.table.store_id,
                revision=self.table.revision,
            )
        )
        while True:
            yield await self._outbox.get()

    def _take(self, message: routing_pb2.WatchResponse) -> None:
        self.messages.append(message)
        if message.HasField("snapshot"):
            self.table = routing_wire.snapshot_from_proto(message.snapshot)
        elif message.HasField("delta"):
            delta = routing_wire.delta_from_proto(message.delta)
            pools = {name: pool for name, pool in self.table.pools.items() if name not in delta.removed_pools}
            workers = {key: worker for key, worker in self.table.workers.items() if key not in delta.removed_workers}
            pools.update({pool.name: pool for pool in delta.pools})
            workers.update({worker.worker_id: worker for worker in delta.workers})
            self.table = RoutingTable(delta.store_id, delta.revision, pools, workers)
        else:
            return
        if self.acks:
            self.ack()
