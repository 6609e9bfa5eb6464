"""A control plane that says what a test wants, simulated engines as workers, and a router in this process."""

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from router.config import Timeouts
from router.grpc_port import GrpcPort
from router.http_front import HttpFront
from router.upstream import Dispatcher
from router.watch import Watch
from springtide.dataplane import Limits, RelayServer
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingDelta, RoutingTable, WorkerLoad
from springtide.rpc import Security, Server
from springtide.v1 import routing_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from springtide.v1.routing_pb2_grpc import RoutingServiceServicer, add_RoutingServiceServicer_to_server
from springtide.wire.routing import delta_to_proto, loads_to_proto, snapshot_to_proto
from tests.dataplane.fakes import until

_numbers = itertools.count()

GENERATE_FRONT = ["h2"]
"""The front of routers that name none; tests of both set it."""

POOL = RoutedPool("p", "m", max_waiting=8, waiting_timeout_s=20.0, max_workers=4)


def worker(name: str, port: int, incarnation: int = 1, **fields: object) -> RoutedWorker:
    return RoutedWorker(name, "p", incarnation, f"127.0.0.1:{port}", **fields)  # type: ignore[arg-type]


def table(*workers: RoutedWorker, pool: RoutedPool = POOL, store_id: str = "s", revision: int = 1) -> RoutingTable:
    return RoutingTable(store_id, revision, {pool.name: pool}, {w.worker_id: w for w in workers})


@dataclass
class ControlPlane(RoutingServiceServicer):
    """Gives `table` to each router that says hello; `send` pushes more."""

    table: RoutingTable
    hellos: list[pb.RouterHello] = field(default_factory=list)
    acks: list[pb.RouterAck] = field(default_factory=list)
    reports: list[pb.RouterReport] = field(default_factory=list)
    streams: list[asyncio.Queue[pb.WatchResponse | None]] = field(default_factory=list)
    address: str = ""

    async def Watch(self, request_iterator, context):
        queue: asyncio.Queue[pb.WatchResponse | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator))
        await until(lambda: self.hellos or reading.done())
        self.streams.append(queue)
        try:
            yield pb.WatchResponse(snapshot=snapshot_to_proto(self.table))
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self.streams.remove(queue)
            reading.cancel()

    async def _read(self, requests) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            into: list[object] = {"hello": self.hellos, "ack": self.acks, "report": self.reports}[kind]  # type: ignore[assignment]
            into.append(getattr(request, kind))

    def delta(self, **changes: object) -> int:
        """Sends a delta at the next revision; gives the revision."""
        revision = self.table.revision + 1
        delta = RoutingDelta(self.table.store_id, revision, **changes)  # type: ignore[arg-type]
        workers = {k: w for k, w in self.table.workers.items() if k not in delta.removed_workers}
        workers.update((w.worker_id, w) for w in delta.workers)
        pools = {k: p for k, p in self.table.pools.items() if k not in delta.removed_pools}
        pools.update((p.name, p) for p in delta.pools)
        self.table = RoutingTable(self.table.store_id, revision, pools, workers)
        self.send(pb.WatchResponse(delta=delta_to_proto(delta)))
        return revision

    def loads(self, *loads: WorkerLoad) -> None:
        self.send(pb.WatchResponse(loads=loads_to_proto(loads)))

    def send(self, message: pb.WatchResponse | None) -> None:
        for queue in self.streams:
            queue.put_nowait(message)

    async def acked(self, revision: int) -> None:
        await until(lambda: any(ack.revision >= revision for ack in self.acks))


@contextlib.asynccontextmanager
async def control_plane(start: RoutingTable, address: str = "127.0.0.1:0") -> AsyncIterator[ControlPlane]:
    fake = ControlPlane(start)
    server = Server()
    server.add(add_RoutingServiceServicer_to_server, fake, "springtide.v1.RoutingService")
    fake.address = server.listen(address)
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(0)


@dataclass
class Router:
    dispatcher: Dispatcher
    front: HttpFront
    relay: RelayServer
    watch: Watch | None
    http_port: int
    grpc_address: str
    port: GrpcPort

    @property
    def in_flight(self) -> int:
        return sum(seat.own for seat in self.dispatcher.admission.fleet.all())


@contextlib.asynccontextmanager
async def router(
    start: RoutingTable | None = None,
    cp: str = "",
    timeouts: Timeouts | None = None,
    max_attempts: int = 5,
    generate_front: str = "",
    security: Security | None = None,
) -> AsyncIterator[Router]:
    """A router with a fixed table, or with a watch on the control plane at `cp`."""
    dispatcher = Dispatcher(timeouts or Timeouts(), max_attempts)
    front = HttpFront(dispatcher)
    relay = RelayServer(front)
    dispatcher.pools.append(relay.pool)
    http_port = await relay.start("127.0.0.1", 0)
    port = GrpcPort(dispatcher, Limits(), security or Security(), generate_front or GENERATE_FRONT[0])
    address = port.listen("127.0.0.1:0")
    await port.start()
    watch, watching = None, None
    if start is not None:
        dispatcher.snapshot(start)
    if cp:

        async def on_table() -> None:
            await port.server.set_all_serving(True)

        watch = Watch(dispatcher, cp, "r1", "session", "0", on_table)
        watching = asyncio.create_task(watch.run())
    try:
        yield Router(dispatcher, front, relay, watch, http_port, address, port)
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await port.stop(0)
        port.close()
        await relay.close()
        dispatcher.close()


@contextlib.asynccontextmanager
async def generation_stub(address: str) -> AsyncIterator[GenerationServiceStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield GenerationServiceStub(channel)


@contextlib.asynccontextmanager
async def sim_engine(folder: Path, *arguments: str) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """A simulated engine as a process; gives its port."""
    port_file = folder / f"port-{next(_numbers)}"
    log = port_file.with_suffix(".log").open("wb")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nodeagent.engines.sim", "--model", "m", "--port", "0", "--port-file", str(port_file),
        "--startup-s", "0", *arguments, stdout=log, stderr=log,
    )  # fmt: skip
    log.close()
    try:
        await until(lambda: port_file.exists() and port_file.read_text().strip(), 20.0)
        yield int(port_file.read_text()), process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
