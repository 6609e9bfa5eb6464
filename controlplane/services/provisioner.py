"""ProvisionerService: one session per provisioner. Reports come in; all orders go out on each report and change."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

from controlplane.live import Live
from controlplane.loops.hub import Hub
from controlplane.loops.leader import Leader
from controlplane.services.joining import Door
from controlplane.services.reports import REPORT_GAP_S, NewestReport
from springtide.clock import Clock
from springtide.errors import Conflict, Exhausted, InvalidArgument, Unavailable
from springtide.model.provisioning import Orders
from springtide.v1 import provisioner_pb2 as pb
from springtide.v1 import provisioner_pb2_grpc as pb_grpc
from springtide.wire import provisioner as wire

log = logging.getLogger(__name__)


class ProvisionerService(pb_grpc.ProvisionerServiceServicer):
    def __init__(
        self, live: Live, hub: Hub, leader: Leader, clock: Clock, report_interval_s: float, door: Door
    ) -> None:
        self._live = live
        self._hub = hub
        self._leader = leader
        self._clock = clock
        self._report_interval_s = report_interval_s
        self._door = door

    async def Session(
        self, request_iterator: AsyncIterator[pb.ProvisionerServiceSessionRequest], context: Any
    ) -> AsyncIterator[pb.ProvisionerServiceSessionResponse]:
        await self._hub.wait_ready()
        async for request in request_iterator:
            kind = request.WhichOneof("message")
            if kind == "hello":
                break
            if kind != "report":
                raise _no_hello(kind or "")
            yield pb.ProvisionerServiceSessionResponse(register_again=True)  # it reconnects without a new hello
        else:
            return
        hello = wire.hello_from_proto(request.hello)
        self._door.provisioner(context, hello.provisioner_id)
        session = _Session(self, hello)
        reader = asyncio.create_task(session.read(request_iterator))
        reader.add_done_callback(lambda _: session.wake.set())
        try:
            while await session.has_news(reader):
                yield self._orders(session.provisioner_id)
            if not reader.done():
                raise self._why_ended(session)
            await reader
        finally:
            reader.cancel()
            session.end()

    def _orders(self, provisioner_id: str) -> pb.ProvisionerServiceSessionResponse:
        snapshot = self._hub.snapshot
        orders = self._with_tokens(self._hub.orders(provisioner_id))
        return wire.orders_to_proto(orders, snapshot.store_id, snapshot.revision, self._report_interval_s)

    def _with_tokens(self, orders: Orders) -> Orders:
        """Tokens are made when an order is sent, and kept nowhere."""
        if self._door.tokens is None or not orders.start:
            return orders
        starts = tuple(
            dataclasses.replace(
                order,
                group=dataclasses.replace(order.group, join_token=self._door.token_for_nodes(order.group.node_ids)),
            )
            for order in orders.start
        )
        return dataclasses.replace(orders, start=starts)

    def _why_ended(self, session: "_Session") -> Exception:
        if self._hub.closing:
            return Unavailable("the control plane stops.", reason="STOPPING", retry_after_s=1.0)
        return Conflict(
            f"provisioner {session.provisioner_id!r} has begun another session.",
            reason="SESSION_REPLACED",
            field="hello.provisioner_id",
            value=session.provisioner_id,
        )


class _Session:
    """One stream's share of the live view, from its hello to its end."""

    def __init__(self, service: ProvisionerService, hello: wire.ProvisionerHello) -> None:
        self._live, self._hub, self._leader = service._live, service._hub, service._leader
        self._clock = service._clock
        self.provisioner_id = hello.provisioner_id
        self.wake = asyncio.Event()
        self._reports = NewestReport()
        self._hello_at = self._clock.now()
        self._connection = self._live.provisioners.hello(hello, self._hello_at)
        self._hub.subscribe_provisioner(self.provisioner_id, self.wake)
        self.wake.set()  # the hello is answered at once
        self._kick()
        log.info("provisioner %s of kind %s: session begins", self.provisioner_id, hello.kind)

    def _kick(self) -> None:
        self._leader.kick(f"provisioner/{self.provisioner_id}")

    async def has_news(self, reader: "asyncio.Task[None]") -> bool:
        """Waits until the provisioner is to be told something; False when the session is over."""
        await self.wake.wait()
        self.wake.clear()
        ended = reader.done() or self._hub.closing
        return not ended and self._live.provisioners.is_current(self.provisioner_id, self._connection)

    async def read(self, requests: AsyncIterator[pb.ProvisionerServiceSessionRequest]) -> None:
        """Takes reports over, the newest of each interval, until the provisioner ends the stream."""
        reading = asyncio.create_task(_next_of(requests))
        try:
            while True:
                await asyncio.wait([reading], timeout=self._reports.due_in_s(self._clock.now()))
                if reading.done():
                    request = reading.result()
                    if request is None:
                        return
                    self._hear(request)
                    reading = asyncio.create_task(_next_of(requests))
                self._take_report()
        finally:
            reading.cancel()

    def _hear(self, request: pb.ProvisionerServiceSessionRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "report":
            self._reports.put(request.report)
        elif kind == "hello":
            self._take_report(at_once=True)
            self._register_again(wire.hello_from_proto(request.hello), self._clock.now())
            self.wake.set()
        elif kind == "goodbye":
            self._take_report(at_once=True)
            log.info("provisioner %s says goodbye: %s", self.provisioner_id, request.goodbye.reason)

    def _take_report(self, *, at_once: bool = False) -> None:
        now = self._clock.now()
        found = self._reports.take(now, at_once=at_once)
        if found is not None:
            report = wire.report_from_proto(found)
            self._leader.kick(self._live.provisioners.report(self.provisioner_id, self._connection, report, now))
            self.wake.set()

    def _register_again(self, hello: wire.ProvisionerHello, now: float) -> None:
        if hello.provisioner_id != self.provisioner_id:
            raise InvalidArgument(
                field="hello.provisioner_id",
                value=hello.provisioner_id,
                problem=f"differs from {self.provisioner_id!r}, whose session this is",
                remedy="Open a session of its own for each provisioner.",
            )
        if now < self._hello_at + REPORT_GAP_S:
            raise Exhausted(
                f"provisioner {self.provisioner_id!r} says hello twice within {REPORT_GAP_S:g} s.",
                reason="TOO_MANY_HELLOS",
                field="hello",
                remedy="Say hello once in each session, and again when it is asked for.",
                retry_after_s=REPORT_GAP_S,
            )
        self._hello_at = now
        self._connection = self._live.provisioners.hello(hello, now)
        self._kick()

    def end(self) -> None:
        """What it said last counts, also where its interval had not passed."""
        try:
            self._take_report(at_once=True)
        except InvalidArgument as error:
            log.warning("the last report of provisioner %s is not taken: %s", self.provisioner_id, error)
        self._hub.unsubscribe_provisioner(self.provisioner_id, self.wake)
        self._live.provisioners.gone(self.provisioner_id, self._connection)
        self._kick()
        log.info("provisioner %s: session ends", self.provisioner_id)


async def _next_of(
    requests: AsyncIterator[pb.ProvisionerServiceSessionRequest],
) -> pb.ProvisionerServiceSessionRequest | None:
    """None: the provisioner has ended the stream."""
    return await anext(requests, None)


def _no_hello(kind: str) -> InvalidArgument:
    return InvalidArgument(
        field="message",
        value=kind,
        problem="is not a hello",
        remedy="Begin each session with a hello.",
        reason="NO_HELLO",
    )
