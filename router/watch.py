"""The stream to the control plane: table in, acknowledgements and demand out. Reconnects for ever."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from router.core.table import Change
from router.upstream import Dispatcher
from springtide.errors import InvalidArgument
from springtide.rpc import channel, decode_error
from springtide.v1 import routing_pb2 as pb
from springtide.v1.routing_pb2_grpc import RoutingServiceStub
from springtide.wire.routing import delta_from_proto, loads_from_proto, report_to_proto, snapshot_from_proto

if TYPE_CHECKING:
    Stream = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class ForeignDelta(Exception):
    """The control plane's store is another one than the table's: a new snapshot is needed."""


class Watch:
    """`run` until cancelled. `on_table` is called after each change of the table."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: str,
        router_id: str,
        session_id: str,
        version: str,
        on_table: Callable[[], Awaitable[None]],
        rng: random.Random | None = None,
    ) -> None:
        self.connected = False
        self.confirmed_at: float | None = None
        """When the control plane last said something in a session that has its table: that what is routed by is so.
        The loop's clock."""
        self._dispatcher = dispatcher
        self._address = address
        self._hello = pb.RouterHello(router_id=router_id, session_id=session_id, version=version)
        self._on_table = on_table
        self._rng = rng or random.Random()
        self._urgent = asyncio.Event()
        self._writing = asyncio.Lock()
        self._confirms = False
        self._loop = asyncio.get_running_loop()
        dispatcher.on_demand = self._urgent.set
        dispatcher.metrics.follow(self)

    async def run(self) -> None:
        """Watches, with capped and jittered back-off between sessions."""
        backoff_s = _FIRST_BACKOFF_S
        quiet = False
        while True:
            try:
                async with channel(self._address) as ch:
                    await self._session(RoutingServiceStub(ch))
                log.info("the control plane ended the routing stream")
            except* grpc.aio.AioRpcError as group:
                if not quiet:
                    first = next(e for e in _leaves(group) if isinstance(e, grpc.aio.AioRpcError))
                    error = decode_error(first, "control plane", self._address)
                    log.warning("routing stream: %s The last table stays in use.", error)
                quiet = True
            except* ForeignDelta:
                log.warning("the control plane's store has changed: asking for its whole table")
            except* (asyncio.InvalidStateError, InvalidArgument) as group:
                log.warning("routing stream: %s", group.exceptions[0])
            except* Exception:
                log.exception("routing stream")
            if self.connected:
                self.connected, backoff_s, quiet = False, _FIRST_BACKOFF_S, False
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    async def _session(self, stub: RoutingServiceStub) -> None:
        call: Stream = stub.Watch()
        try:
            table = self._dispatcher.admission.fleet.table
            hello = pb.RouterHello(store_id=table.store_id, revision=table.revision)
            hello.MergeFrom(self._hello)
            await self._write(call, pb.WatchRequest(hello=hello))
            async with asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report(call))
                await self._read(call)
                reporting.cancel()
        finally:
            self._confirms = False
            call.cancel()

    async def _read(self, call: "Stream") -> None:
        async for message in call:
            kind = message.WhichOneof("message")
            if kind == "loads":
                self._dispatcher.loads(loads_from_proto(message.loads))
            elif kind == "snapshot":
                table = snapshot_from_proto(message.snapshot)
                change = self._dispatcher.snapshot(table)
                self._confirms = change is not Change.KEPT
                if change is Change.KEPT:
                    log.warning("the control plane has an empty, foreign store: the last table stays in use")
                self.connected = True
                await self._applied(call, table.store_id, table.revision)
            elif kind == "delta":
                delta = delta_from_proto(message.delta)
                if self._dispatcher.delta(delta) is Change.FOREIGN:
                    raise ForeignDelta
                await self._applied(call, delta.store_id, delta.revision)
            if self._confirms:
                self.confirmed_at = self._loop.time()

    async def _applied(self, call: "Stream", store_id: str, revision: int) -> None:
        """Acknowledges: from here on nothing is routed by an older table."""
        await self._write(call, pb.WatchRequest(ack=pb.RouterAck(store_id=store_id, revision=revision)))
        await self._on_table()

    async def _report(self, call: "Stream") -> None:
        while True:
            try:
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            self._urgent.clear()
            if self.connected:
                await self._write(call, pb.WatchRequest(report=report_to_proto(self._dispatcher.report())))

    async def _write(self, call: "Stream", request: pb.WatchRequest) -> None:
        async with self._writing:
            await call.write(request)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
