"""The session with the control plane: hello, reports, orders; again and again, for ever.

While no control plane answers, the last orders go on: what was asked for is still brought, nothing else is touched.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from provisioner.core.backoff import backoff_s
from provisioner.metrics import ProvisionerMetrics
from provisioner.runner import Runner
from springtide import rpc
from springtide.errors import SpringtideError
from springtide.v1 import provisioner_pb2 as pb
from springtide.v1 import provisioner_pb2_grpc as pb_grpc
from springtide.wire.provisioner import ProvisionerHello, hello_to_proto, orders_from_proto, report_to_proto

log = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""A control plane that answers nothing for this long, or for five reports, is treated as gone."""
_MIN_GAP_S = 0.02
_FIRST_BACKOFF_S = 0.2
_REDIRECT_S = 0.1

Request: TypeAlias = pb.ProvisionerServiceSessionRequest
Response: TypeAlias = pb.ProvisionerServiceSessionResponse
Requests: TypeAlias = "asyncio.Queue[Request | None]"
Call: TypeAlias = "grpc.aio.StreamStreamCall[Request, Response]"


class Session:
    """Keeps one session up. `run` ends only when cancelled; do so after `goodbye`, else it connects again."""

    def __init__(
        self,
        runner: Runner,
        hello: ProvisionerHello,
        addresses: Sequence[str],
        metrics: ProvisionerMetrics,
        *,
        report_interval_s: float,
        reconnect_max_s: float,
        rng: random.Random,
    ) -> None:
        self._runner = runner
        self._hello = hello
        self._addresses = list(addresses)
        self._metrics = metrics
        self._interval_s = report_interval_s
        self._reconnect_max_s = reconnect_max_s
        self._rng = rng
        self._changed = asyncio.Event()
        self._leader = ""
        self._requests: Requests | None = None
        self._last_error = ""
        self.connected = False
        runner.on_change(self._changed.set)

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
            call = pb_grpc.ProvisionerServiceStub(channel).Session(_drained(requests))
            await requests.put(Request(hello=hello_to_proto(self._hello)))
            self._requests = requests
            self._changed.set()
            tasks = [
                asyncio.create_task(self._receive(call, address)),
                asyncio.create_task(self._send_reports(requests)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # none outlives its channel
        return self.connected

    async def _receive(self, call: Call, address: str) -> None:
        while True:
            try:
                async with asyncio.timeout(max(_SILENCE_S, 5 * self._interval_s)):
                    response = await call.read()
            except TimeoutError:
                log.warning("the control plane at %s is silent; connecting again", address)
                return
            if not isinstance(response, Response):
                return  # the end of the stream
            if not self.connected:
                self.connected = True
                self._last_error = ""
                self._metrics.sessions.inc()
                self._metrics.connected.set(1)
                log.info("session with the control plane at %s", address, extra={"store_id": response.store_id})
            self._take(response)

    def _take(self, response: Response) -> None:
        if response.heartbeat_interval_s > 0:
            self._interval_s = response.heartbeat_interval_s
        if response.register_again:
            log.info("the control plane asks for a new hello")
            self._say(Request(hello=hello_to_proto(self._hello)))
            self._changed.set()
            return
        if response.store_id:
            self._runner.apply(orders_from_proto(response))

    async def _send_reports(self, requests: Requests) -> None:
        """Nothing is reported before the provider has been looked at: an empty report would say that nothing is
        there."""
        while True:
            self._changed.clear()
            if self._runner.ready:
                await requests.put(Request(report=report_to_proto(self._runner.report())))
            await asyncio.sleep(min(_MIN_GAP_S, self._interval_s))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _say(self, request: Request) -> None:
        if self._requests is not None:
            try:
                self._requests.put_nowait(request)
            except asyncio.QueueFull:
                log.warning("the control plane takes nothing")

    async def goodbye(self, reason: str, bound_s: float = 2.0) -> None:
        """Says goodbye, and waits a moment until it is read."""
        requests = self._requests
        if requests is None:
            return
        try:
            async with asyncio.timeout(bound_s):
                await requests.put(Request(goodbye=pb.ProvisionerGoodbye(reason=reason)))
                await requests.put(None)
                while self._requests is requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("the control plane did not take the goodbye")


async def _drained(requests: Requests) -> AsyncIterator[Request]:
    while (request := await requests.get()) is not None:
        yield request
