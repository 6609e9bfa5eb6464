"""The session with the control plane: hello, heartbeats, desired state; again and again, for ever.

While no control plane answers, nothing changes on the node: the last known desired state goes on.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from nodeagent.core.backoff import backoff_s
from nodeagent.metrics import AgentMetrics
from nodeagent.node import Node
from springtide import rpc
from springtide.errors import SpringtideError
from springtide.v1 import agent_pb2, agent_pb2_grpc
from springtide.wire.agent import Heartbeat, Hello, desired_from_proto, heartbeat_to_proto, hello_to_proto

log = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""A control plane that answers nothing for this long, or for five heartbeats, is treated as gone."""
_MIN_GAP_S = 0.02
_FIRST_BACKOFF_S = 0.2
_REDIRECT_S = 0.1

Call: TypeAlias = "grpc.aio.StreamStreamCall[agent_pb2.SessionRequest, agent_pb2.SessionResponse]"
Requests: TypeAlias = "asyncio.Queue[agent_pb2.SessionRequest | None]"


class Session:
    """Keeps one session up. `run` ends only when cancelled or after `goodbye`."""

    def __init__(
        self,
        node: Node,
        hello: Hello,
        addresses: Sequence[str],
        metrics: AgentMetrics,
        *,
        heartbeat_interval_s: float,
        reconnect_max_s: float,
        rng: random.Random,
        stopping: Callable[[], float | None],
        stop_reason: Callable[[], str] = lambda: "",
    ) -> None:
        """`stopping`: None, or the seconds until this node is gone (0: no deadline). `stop_reason`: UPPER_SNAKE."""
        self._node = node
        self._hello = hello
        self._addresses = list(addresses)
        self._metrics = metrics
        self._interval_s = heartbeat_interval_s
        self._reconnect_max_s = reconnect_max_s
        self._rng = rng
        self._stopping = stopping
        self._stop_reason = stop_reason
        self._changed = asyncio.Event()
        self._sequence = 0
        self._leader = ""
        self._requests: Requests | None = None
        self._last_error = ""
        self.connected = False
        self.store_id = ""  # of the control plane that answered last
        node.on_change(self._changed.set)

    async def run(self) -> None:
        """Connects, serves, reconnects with capped back-off and jitter."""
        attempt = 0
        while True:
            address = self._leader or self._addresses[attempt % len(self._addresses)]
            self._leader = ""
            worked = False
            try:
                worked = await self._serve(address)
            except grpc.aio.AioRpcError as error:
                worked = self.connected
                self._lost(address, rpc.decode_error(error, "control plane", address))
            except SpringtideError as error:
                worked = self.connected
                self._lost(address, error)
            except Exception:
                log.exception("the session with %s failed; it is begun again", address)
            finally:
                self.connected = False
                self._metrics.connected.set(0)
                self._requests = None
            attempt = 1 if worked else attempt + 1
            pause_s = backoff_s(attempt, _FIRST_BACKOFF_S, self._reconnect_max_s, self._rng)
            await asyncio.sleep(_REDIRECT_S if self._leader else pause_s)

    def _lost(self, address: str, error: SpringtideError) -> None:
        leader = error.metadata.get("leader", "")
        if leader and leader != address:
            self._leader = leader
            log.info("%s is not the leader; going to %s", address, leader)
        elif str(error) != self._last_error:
            self._last_error = str(error)
            log.warning("no session with the control plane: %s", error, extra={"reason": error.reason})

    async def _serve(self, address: str) -> bool:
        """One session. Returns whether the control plane answered at all."""
        async with rpc.channel(address) as channel:
            requests: Requests = asyncio.Queue(maxsize=4)
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            call = stub.Session(_drained(requests))
            await requests.put(agent_pb2.SessionRequest(hello=hello_to_proto(self._hello)))
            self._requests = requests
            self._changed.set()
            tasks = [
                asyncio.create_task(self._receive(call, address)),
                asyncio.create_task(self._send_heartbeats(requests)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                call.cancel()
        return self.connected

    async def _receive(self, call: Call, address: str) -> None:
        while True:
            try:
                async with asyncio.timeout(max(_SILENCE_S, 5 * self._interval_s)):
                    response = await call.read()
            except TimeoutError:
                log.warning("the control plane at %s is silent; connecting again", address)
                return
            if not isinstance(response, agent_pb2.SessionResponse):
                return  # the end of the stream
            if not self.connected:
                self.connected = True
                self._last_error = ""
                self._metrics.sessions.inc()
                self._metrics.connected.set(1)
                log.info("session with the control plane at %s", address, extra={"store_id": response.store_id})
            self._take(response)

    def _take(self, response: agent_pb2.SessionResponse) -> None:
        if response.heartbeat_interval_s > 0:
            self._interval_s = response.heartbeat_interval_s
        if response.register_again:
            log.info("the control plane asks for a new hello")
            self._say(agent_pb2.SessionRequest(hello=hello_to_proto(self._hello)))
            self._changed.set()
            return
        desired = []
        for message in response.workers:
            try:
                desired.append(desired_from_proto(message))
            except SpringtideError as error:
                log.error("an order cannot be read: %s", error)
        if response.store_id:
            self.store_id = response.store_id
            self._node.apply(response.store_id, desired)
        self._node.take_verbs(response.verbs, self._answer)

    async def _answer(self, result: agent_pb2.VerbResult) -> None:
        """Lost without a session, and with one that takes nothing: the order comes again."""
        self._say(agent_pb2.SessionRequest(verb_result=result))

    async def _send_heartbeats(self, requests: Requests) -> None:
        due = False
        while True:
            if due:
                await self._node.refresh()
            self._changed.clear()
            await requests.put(agent_pb2.SessionRequest(heartbeat=self._heartbeat()))
            self._metrics.heartbeats.inc()
            await asyncio.sleep(min(_MIN_GAP_S, self._interval_s))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
                due = False
            except TimeoutError:
                due = True

    def _heartbeat(self) -> agent_pb2.NodeHeartbeat:
        self._sequence += 1
        left_s = self._stopping()
        return heartbeat_to_proto(
            Heartbeat(
                sequence=self._sequence,
                reports=self._node.reports(),
                stopping=left_s is not None,
                stop_deadline_s=left_s or None,
                stop_reason=self._stop_reason(),
            )
        )

    def _say(self, request: agent_pb2.SessionRequest) -> None:
        if self._requests is not None:
            try:
                self._requests.put_nowait(request)
            except asyncio.QueueFull:
                log.warning("the control plane takes nothing")

    async def goodbye(self, reason: str, bound_s: float = 2.0) -> None:
        """Says the last state of all workers and goodbye, and waits a moment until it is read."""
        requests = self._requests
        if requests is None:
            return
        try:
            async with asyncio.timeout(bound_s):
                await requests.put(agent_pb2.SessionRequest(heartbeat=self._heartbeat()))
                await requests.put(agent_pb2.SessionRequest(goodbye=agent_pb2.NodeGoodbye(reason=reason)))
                await requests.put(None)
                while self._requests is requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("the control plane did not take the goodbye")


async def _drained(requests: Requests) -> AsyncIterator[agent_pb2.SessionRequest]:
    while (request := await requests.get()) is not None:
        yield request
