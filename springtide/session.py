"""A session with the control plane: a stream with a hello, reports and answers, begun again and again, for ever.

What is said, and what becomes of the answers, is the matter of its speaker.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar, cast

import grpc
import grpc.aio
from prometheus_client import Counter, Gauge

from springtide import rpc
from springtide.backoff import Rng, backoff_s
from springtide.errors import SpringtideError

_SILENCE_S = 10.0
"""A control plane that answers nothing for this long, or for five reports, is treated as gone."""
_MIN_GAP_S = 0.02
_FIRST_BACKOFF_S = 0.2
_REDIRECT_S = 0.1
_QUEUED = 4


class Answer(Protocol):
    """What the control plane's answers have in common, whoever they are for."""

    store_id: str
    heartbeat_interval_s: float
    register_again: bool


class Metrics(Protocol):
    """What is counted."""

    sessions: Counter
    connected: Gauge


Request = TypeVar("Request")
Response = TypeVar("Response", bound=Answer)
Say = Callable[[Request], None]
"""Says something between the reports. It is lost without a session, and with one that takes nothing."""


class Speaker(Protocol[Request, Response]):
    """One side's part of the conversation. `log`: under whose name the session tells of itself."""

    log: logging.Logger

    @property
    def metrics(self) -> Metrics: ...

    def open(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[Request]
    ) -> "grpc.aio.StreamStreamCall[Request, Response]":
        """Calls the control plane's method."""

    def hello(self) -> Request:
        """The first words, and those after `register_again`."""

    async def refresh(self) -> None:
        """Looks at what changes without telling, before a report that only time makes due."""

    def report(self) -> Request | None:
        """All that is known now; None as long as nothing can be said."""

    def take(self, response: Response, say: "Say[Request]") -> None:
        """Follows an answer."""

    def goodbye(self, reason: str) -> Sequence[Request]:
        """The last words."""

    def on_change(self, call: Callable[[], None]) -> None:
        """Sets who is told that there is something new to report."""


class Session(Generic[Request, Response]):
    """Keeps one session up. `run` ends only when cancelled; do so after `goodbye`, else it connects again."""

    def __init__(
        self,
        speaker: Speaker[Request, Response],
        addresses: Sequence[str],
        *,
        interval_s: float,
        reconnect_max_s: float,
        rng: Rng,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`interval_s`: between reports while nothing changes, until the control plane names another. `sleep` waits
        before a reconnection."""
        self._speaker = speaker
        self._log = speaker.log
        self._metrics = speaker.metrics
        self._addresses = list(addresses)
        self._interval_s = interval_s
        self._reconnect_max_s = reconnect_max_s
        self._rng = rng
        self._sleep = sleep
        self._changed = asyncio.Event()
        self._leader = ""
        self._requests: asyncio.Queue[Request | None] | None = None
        self._last_error = ""
        self.connected = False
        self.store_id = ""  # of the control plane that answered last
        speaker.on_change(self._changed.set)

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
            except Exception:  # noqa: BLE001 - logged whole; one bad answer must not end all sessions
                self._log.exception("the session with %s failed; it is begun again", address)
            finally:
                self.connected = False
                self._metrics.connected.set(0)
                self._requests = None
            attempt = 1 if worked else attempt + 1
            pause_s = backoff_s(attempt, _FIRST_BACKOFF_S, self._reconnect_max_s, self._rng)
            await self._sleep(_REDIRECT_S if self._leader else pause_s)

    def _lost(self, address: str, error: SpringtideError) -> None:
        leader = error.metadata.get("leader", "")
        if leader and leader != address:
            self._leader = leader
            self._log.info("%s is not the leader; going to %s", address, leader)
        elif str(error) != self._last_error:
            self._last_error = str(error)
            self._log.warning("no session with the control plane: %s", error, extra={"reason": error.reason})

    async def _serve(self, address: str) -> bool:
        """One session. Returns whether the control plane answered at all."""
        async with rpc.channel(address) as channel:
            requests: asyncio.Queue[Request | None] = asyncio.Queue(maxsize=_QUEUED)
            call = self._speaker.open(channel, _drained(requests))
            await requests.put(self._speaker.hello())
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

    async def _receive(self, call: "grpc.aio.StreamStreamCall[Request, Response]", address: str) -> None:
        while True:
            try:
                async with asyncio.timeout(max(_SILENCE_S, 5 * self._interval_s)):
                    read = await call.read()
            except TimeoutError:
                self._log.warning("the control plane at %s is silent; connecting again", address)
                return
            if read is grpc.aio.EOF:
                return
            response = cast("Response", read)
            if not self.connected:
                self.connected = True
                self._last_error = ""
                self._metrics.sessions.inc()
                self._metrics.connected.set(1)
                extra = {"store_id": response.store_id}
                self._log.info("session with the control plane at %s", address, extra=extra)
            self._take(response)

    def _take(self, response: Response) -> None:
        if response.heartbeat_interval_s > 0:
            self._interval_s = response.heartbeat_interval_s
        if response.register_again:
            self._log.info("the control plane asks for a new hello")
            self._say(self._speaker.hello())
            self._changed.set()
            return
        if response.store_id:
            self.store_id = response.store_id
        self._speaker.take(response, self._say)

    async def _send_reports(self, requests: "asyncio.Queue[Request | None]") -> None:
        due = False
        while True:
            if due:
                await self._speaker.refresh()
            self._changed.clear()
            report = self._speaker.report()
            if report is not None:
                await requests.put(report)
            await asyncio.sleep(min(_MIN_GAP_S, self._interval_s))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
                due = False
            except TimeoutError:
                due = True

    def _say(self, request: Request) -> None:
        if self._requests is not None:
            try:
                self._requests.put_nowait(request)
            except asyncio.QueueFull:
                self._log.warning("the control plane takes nothing")

    async def goodbye(self, reason: str, bound_s: float = 2.0) -> None:
        """Says the last words, and waits a moment until they are read."""
        requests = self._requests
        if requests is None:
            return
        try:
            async with asyncio.timeout(bound_s):
                for request in self._speaker.goodbye(reason):
                    await requests.put(request)
                await requests.put(None)
                while self._requests is requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self._log.warning("the control plane did not take the goodbye")


async def _drained(requests: "asyncio.Queue[Request | None]") -> AsyncIterator[Request]:
    while (request := await requests.get()) is not None:
        yield request
