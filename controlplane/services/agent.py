"""AgentService: one session per node. Reports come in; all that is desired goes out on each heartbeat and change."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from controlplane.live import Live
from controlplane.loops.hub import Hub
from controlplane.loops.leader import Leader
from controlplane.services.joining import Door
from controlplane.verbs import Verbs
from springtide.clock import Clock
from springtide.errors import Conflict, InvalidArgument, Unavailable
from springtide.v1 import agent_pb2 as pb
from springtide.v1 import agent_pb2_grpc as pb_grpc
from springtide.wire import agent as wire

log = logging.getLogger(__name__)


class AgentService(pb_grpc.AgentServiceServicer):
    def __init__(
        self,
        live: Live,
        hub: Hub,
        leader: Leader,
        clock: Clock,
        heartbeat_interval_s: float,
        verbs: Verbs,
        door: Door | None = None,
    ) -> None:
        self._door = door or Door()
        self._verbs = verbs
        self._live = live
        self._hub = hub
        self._leader = leader
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        await self._hub.wait_ready()
        async for request in request_iterator:
            if request.WhichOneof("message") == "hello":
                break
            if request.WhichOneof("message") != "heartbeat":
                raise _no_hello(request)
            yield pb.SessionResponse(register_again=True)  # e.g. an agent that reconnects without a new hello
        else:
            return
        hello = wire.hello_from_proto(request.hello)
        self._door.node(context, hello.node_id, self._hub.snapshot.nodes.get(hello.node_id))
        session = _Session(self, hello)
        reader = asyncio.create_task(session.read(request_iterator))
        reader.add_done_callback(lambda _: session.wake.set())
        try:
            while await session.has_news(reader):
                yield self._desired_state(session.node_id)
            if not reader.done():
                raise self._why_ended(session)
            await reader
        finally:
            reader.cancel()
            session.end()

    def _desired_state(self, node_id: str) -> pb.SessionResponse:
        snapshot = self._hub.snapshot
        return wire.desired_state(
            snapshot.store_id,
            snapshot.revision,
            self._heartbeat_interval_s,
            self._hub.desired(node_id),
            self._verbs.orders(node_id),
        )

    def _why_ended(self, session: "_Session") -> Exception:
        if self._hub.closing:
            return Unavailable("the control plane stops.", reason="STOPPING", retry_after_s=1.0)
        return Conflict(
            f"node {session.node_id!r} has begun another session.",
            reason="SESSION_REPLACED",
            field="hello.node_id",
            value=session.node_id,
        )


class _Session:
    """One stream's share of the live view, from its hello to its end."""

    def __init__(self, service: AgentService, hello: wire.Hello) -> None:
        self._live, self._hub, self._leader = service._live, service._hub, service._leader
        self._clock, self._verbs = service._clock, service._verbs
        self.node_id = hello.node_id
        self.wake = asyncio.Event()
        self._connection = self._live.node_hello(hello, self._clock.now())
        self._hub.subscribe_node(self.node_id, self.wake)
        self.wake.set()  # the hello is answered at once
        self._leader.kick(f"node/{self.node_id}")
        log.info("node %s: session of %s begins", self.node_id, hello.observed.address)

    async def has_news(self, reader: "asyncio.Task[None]") -> bool:
        """Waits until the node is to be told something; False when the session is over."""
        await self.wake.wait()
        self.wake.clear()
        ended = reader.done() or self._hub.closing
        return not ended and self._live.is_current(self.node_id, self._connection)

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Takes reports over until the agent ends the stream."""
        async for request in requests:
            kind = request.WhichOneof("message")
            now = self._clock.now()
            if kind == "heartbeat":
                beat = wire.heartbeat_from_proto(request.heartbeat)
                self._leader.kick(self._live.heartbeat(self.node_id, self._connection, beat, now))
            elif kind == "verb_result":
                self._verbs.answered(self.node_id, request.verb_result)
                continue
            elif kind == "hello":
                self._register_again(wire.hello_from_proto(request.hello), now)
            elif kind == "goodbye":
                log.info("node %s says goodbye: %s", self.node_id, request.goodbye.reason)
                self._live.node_goodbye(self.node_id, self._connection)
                self._leader.kick(f"node/{self.node_id}")
            self.wake.set()

    def _register_again(self, hello: wire.Hello, now: float) -> None:
        if hello.node_id != self.node_id:
            problem = f"differs from {self.node_id!r}, whose session this is"
            remedy = "Open a session of its own for each node."
            raise InvalidArgument(field="hello.node_id", value=hello.node_id, problem=problem, remedy=remedy)
        self._connection = self._live.node_hello(hello, now)
        self._leader.kick(f"node/{self.node_id}")

    def end(self) -> None:
        self._hub.unsubscribe_node(self.node_id, self.wake)
        self._live.node_gone(self.node_id, self._connection)
        self._leader.kick(f"node/{self.node_id}")
        log.info("node %s: session ends", self.node_id)


def _no_hello(request: pb.SessionRequest) -> InvalidArgument:
    return InvalidArgument(
        field="message",
        value=request.WhichOneof("message") or "",
        problem="is not a hello",
        remedy="Begin each session with a hello.",
        reason="NO_HELLO",
    )
