"""What an agent says to the control plane and takes from it.

While no control plane answers, nothing changes on the node: the last known desired state goes on.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

import grpc.aio

from nodeagent.metrics import AgentMetrics
from nodeagent.node import Node
from springtide.errors import SpringtideError
from springtide.session import Say, Session
from springtide.v1 import agent_pb2, agent_pb2_grpc
from springtide.wire.agent import Heartbeat, Hello, desired_from_proto, heartbeat_to_proto, hello_to_proto

Request: TypeAlias = agent_pb2.SessionRequest
Response: TypeAlias = agent_pb2.SessionResponse
AgentSession: TypeAlias = Session[Request, Response]


class AgentSpeaker:
    """Implements springtide.session.Speaker. Its reports are heartbeats."""

    log = logging.getLogger(__name__)

    def __init__(
        self,
        node: Node,
        hello: Hello,
        metrics: AgentMetrics,
        *,
        stopping: Callable[[], float | None],
        stop_reason: Callable[[], str],
    ) -> None:
        """`stopping`: None, or the seconds until this node is gone (0: no deadline). `stop_reason`: UPPER_SNAKE."""
        self._node = node
        self._hello = hello
        self.metrics = metrics
        self._stopping = stopping
        self._stop_reason = stop_reason
        self._sequence = 0

    def open(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[Request]
    ) -> "grpc.aio.StreamStreamCall[Request, Response]":
        return agent_pb2_grpc.AgentServiceStub(channel).Session(requests)

    def hello(self) -> Request:
        return Request(hello=hello_to_proto(self._hello))

    async def refresh(self) -> None:
        """The shims' counts."""
        await self._node.refresh()

    def report(self) -> Request:
        self.metrics.heartbeats.inc()
        return self._heartbeat()

    def take(self, response: Response, say: Say[Request]) -> None:
        desired = []
        for message in response.workers:
            try:
                desired.append(desired_from_proto(message))
            except SpringtideError as error:
                self.log.error("an order cannot be read: %s", error)
        if response.store_id:
            self._node.apply(response.store_id, desired)

        async def answer(result: agent_pb2.VerbResult) -> None:
            """One that is lost is asked for again: the order comes again."""
            say(Request(verb_result=result))

        self._node.take_verbs(response.verbs, answer)

    def goodbye(self, reason: str) -> Sequence[Request]:
        """The last state of all workers goes before it."""
        return [self._heartbeat(), Request(goodbye=agent_pb2.NodeGoodbye(reason=reason))]

    def on_change(self, call: Callable[[], None]) -> None:
        self._node.on_change(call)

    def _heartbeat(self) -> Request:
        self._sequence += 1
        left_s = self._stopping()
        beat = Heartbeat(
            sequence=self._sequence,
            reports=self._node.reports(),
            stopping=left_s is not None,
            stop_deadline_s=left_s or None,
            stop_reason=self._stop_reason(),
        )
        return Request(heartbeat=heartbeat_to_proto(beat))
