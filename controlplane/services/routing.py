"""RoutingService: the table as a snapshot and deltas, loads every second; acknowledgements and demand come back.

Nothing is queued for a router: a slow one is sent one delta from what it was last sent to the present table.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from controlplane.live import Live
from controlplane.loops.hub import Hub
from controlplane.loops.leader import Leader
from springtide.clock import Clock
from springtide.errors import InvalidArgument, Unavailable
from springtide.v1 import routing_pb2 as pb
from springtide.v1 import routing_pb2_grpc as pb_grpc
from springtide.wire import routing as wire
from springtide.wire.values import identifier

log = logging.getLogger(__name__)


class RoutingService(pb_grpc.RoutingServiceServicer):
    def __init__(self, live: Live, hub: Hub, leader: Leader, clock: Clock, loads_interval_s: float = 1.0) -> None:
        self._live = live
        self._hub = hub
        self._leader = leader
        self._clock = clock
        self._loads_interval_s = loads_interval_s

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        await self._hub.wait_ready()
        request = await anext(aiter(request_iterator), None)
        if request is None:
            return
        router_id, connection = self._register(request)
        wake = asyncio.Event()
        self._hub.subscribe_router(wake)
        reader = asyncio.create_task(self._read(request_iterator, router_id, connection))
        reader.add_done_callback(lambda _: wake.set())
        try:
            sent = self._hub.table
            yield pb.WatchResponse(snapshot=wire.snapshot_to_proto(sent))
            loads_due_at = self._clock.now() + self._loads_interval_s
            while not (reader.done() or self._hub.closing or self._replaced(router_id, connection)):
                try:
                    async with asyncio.timeout(max(0.0, loads_due_at - self._clock.now())):
                        await wake.wait()
                except TimeoutError:
                    pass
                wake.clear()
                if self._hub.table is not sent:
                    changes, sent = self._hub.changes_since(sent), self._hub.table
                    if changes is None:
                        yield pb.WatchResponse(snapshot=wire.snapshot_to_proto(sent))
                    else:
                        yield pb.WatchResponse(delta=wire.delta_to_proto(changes))
                now = self._clock.now()
                if now >= loads_due_at:  # whatever else was sent meanwhile
                    yield pb.WatchResponse(loads=wire.loads_to_proto(self._hub.loads(now)))
                    loads_due_at = now + self._loads_interval_s
            if self._hub.closing:
                raise Unavailable("the control plane stops.", reason="STOPPING", retry_after_s=1.0)
            if reader.done():
                await reader
        finally:
            reader.cancel()
            self._hub.unsubscribe_router(wake)
            self._live.router_gone(router_id, connection)
            self._leader.kick(f"router/{router_id}")
            log.info("router %s: session ends", router_id)

    def _register(self, request: pb.WatchRequest) -> tuple[str, int]:
        if request.WhichOneof("message") != "hello":
            raise InvalidArgument(
                field="message",
                value=request.WhichOneof("message") or "",
                problem="is not a hello",
                remedy="Begin each session with a hello.",
                reason="NO_HELLO",
            )
        hello = request.hello
        router_id = identifier(hello.router_id, "hello.router_id")
        session_id = identifier(hello.session_id, "hello.session_id")
        acked = self._known_revision(hello.store_id, hello.revision)
        connection = self._live.router_hello(router_id, session_id, acked, self._clock.now())
        log.info("router %s: session begins at revision %d", router_id, acked)
        return router_id, connection

    def _known_revision(self, store_id: str, revision: int) -> int:
        """0 unless it is a revision that this store has had."""
        table = self._hub.table
        return revision if store_id == table.store_id and 0 <= revision <= table.revision else 0

    def _replaced(self, router_id: str, connection: int) -> bool:
        session = self._live.routers.get(router_id)
        return session is None or session.connection != connection

    async def _read(self, requests: AsyncIterator[pb.WatchRequest], router_id: str, connection: int) -> None:
        async for request in requests:
            now = self._clock.now()
            kind = request.WhichOneof("message")
            if kind == "ack":
                revision = self._known_revision(request.ack.store_id, request.ack.revision)
                moved = self._live.router_ack(router_id, connection, revision, now)
                if self._hub.awaits_acks:
                    self._leader.kick(moved)
            elif kind == "report":
                report = wire.report_from_proto(request.report)
                self._leader.kick(self._live.router_report(router_id, connection, report, now))
