"""The shim of one engine as the agent sees it: what it said last, whether it lives, and its end."""

import asyncio
import logging
import signal
from collections.abc import Callable

from nodeagent.deaths import shim_death
from nodeagent.kept_entry import KeptEntry
from nodeagent.shim.launch import EXIT_NO_PORT
from nodeagent.shim_client import ShimClient
from springtide import processes
from springtide.clock import Clock
from springtide.errors import SpringtideError
from springtide.model.worker import ExitInfo
from springtide.v1 import shim_pb2

log = logging.getLogger("nodeagent.incarnation")  # one name for all that is told of a worker's life

ENDED = shim_pb2.ENGINE_PROCESS_ENDED
_LONG_POLL_S = 20.0
_FIRST_POLL_S = 0.05
_AGAIN_S = 0.2
_QUIT_S = 5.0
_STALE_S = 5.0

Status = shim_pb2.ShimStatus


class WatchedShim:
    """`status`: as last told; None: it never answered. `lost`: it is gone, or it is not the one that was meant."""

    def __init__(
        self,
        kept: KeptEntry,
        clock: Clock,
        noted: Callable[[Status | None, Status], None],
        wake: Callable[[], None],
    ) -> None:
        """`noted` is told of every status, with the one before. `wake` is called when the watched shim is lost."""
        self._kept = kept
        self._clock = clock
        self._noted = noted
        self._wake = wake
        self._noted_at = 0.0
        self._engine_ended = False
        self._ports_exhausted = False
        self.status: Status | None = None
        self.lost = False

    @property
    def ended(self) -> bool:
        """It is lost, or its engine has ended."""
        return self.lost or self._engine_ended

    @property
    def counts(self) -> Status | None:
        """The status while it is fresh: what nobody has confirmed for a while is unknown."""
        fresh = self._clock.now() - self._noted_at < _STALE_S
        return self.status if fresh and not self.ended else None

    # ------------------------------------------------------------ what it says

    async def first_status(self, bound_s: float) -> Status | None:
        """Its first answer, not noted. None: it died, or did not answer within the bound, and is lost."""
        client = self._client()
        end = self._clock.now() + bound_s
        while True:
            try:
                return await client.status()
            except SpringtideError as error:
                if not self._lives():
                    break
                if self._clock.now() > end:
                    name = self._kept.entry.worker_id
                    log.error("worker %s: its shim is silent: %s", name, error, extra=self._kept.fields())
                    break
            await asyncio.sleep(_FIRST_POLL_S)
        self.lost = True
        return None

    async def watch(self) -> None:
        """It tells of every change at once; its own end shows as a broken connection. Returns at either's end."""
        client = self._client()
        while not self.ended:
            try:
                self.note(await client.status(self.status.version if self.status else 0, _LONG_POLL_S))
            except SpringtideError:
                if not self._lives():
                    self.lost = True
                    self._wake()
                    return
                await asyncio.sleep(_AGAIN_S)

    def note(self, status: Status) -> None:
        """Takes a status over."""
        old, self.status = self.status, status
        self._noted_at = self._clock.now()
        if status.process == ENDED:
            self._engine_ended = True
        self._noted(old, status)

    async def silence(self) -> str:
        """Why it counts as silent; nothing while it answers."""
        try:
            self.note(await self._client().status())
        except SpringtideError as error:
            return f"its shim does not answer: {error}"
        return ""

    async def refresh(self) -> None:
        """Reads its counts for a heartbeat; old ones stay if it does not answer."""
        if self.status is not None and not self.ended:
            try:
                self.note(await self._client().status())
            except SpringtideError as error:
                log.debug("worker %s: %s", self._kept.entry.worker_id, error)

    # ------------------------------------------------------------ what it is told

    async def admit(
        self, admission: "shim_pb2.ShimAdmission.ValueType", generation: int, max_in_flight: int, abort: bool
    ) -> None:
        """Sets its admission. Raises SpringtideError when it does not answer."""
        self.note(await self._client().admission(admission, generation, max_in_flight, abort))

    async def stop(self, grace_s: float) -> None:
        """Begins its engine's stop. One that never answered and takes no stop is killed."""
        try:
            await self._client().stop(grace_s)
        except SpringtideError as error:
            name = self._kept.entry.worker_id
            log.warning("shim of worker %s takes no stop: %s", name, error, extra=self._kept.fields())
            if self.status is None:
                self.kill()

    async def dismiss(self) -> None:
        """Its engine has ended: it goes, too."""
        try:
            await self._client().quit()
        except SpringtideError:
            pass
        end = self._clock.now() + _QUIT_S
        while self._lives():
            if self.lost or self._clock.now() > end:
                self.kill()
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------ its process

    def kill(self) -> None:
        """Its guard then kills the engine."""
        if self._kept.entry.shim is not None:
            processes.kill(self._kept.entry.shim, signal.SIGKILL)
        if not self._lives():
            self.lost = True

    def death(self) -> ExitInfo:
        """Why it is gone."""
        return shim_death(self._kept.entry.shim, self._ports_exhausted, self._kept.shim_log_path)

    def _lives(self) -> bool:
        identity = self._kept.entry.shim
        if identity is None:
            return False
        code = processes.reap(identity.pid)
        if code == EXIT_NO_PORT:
            self._ports_exhausted = True
        return processes.lives(identity)

    def _client(self) -> ShimClient:
        return ShimClient(self._kept.entry.control_path)
