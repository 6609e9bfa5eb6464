"""What is done to a running engine as a whole: sleep, wake, other weights. One at a time, while its shim is closed.

Each is noted in the ledger before it begins and when it is done, so that a later agent knows what it may ask of the
engine: memory that was not released must not be restored (it ends some engines), and an engine that cannot say how far
an interrupted change has come is not used any further.

In this order: idle at the engine -> release -> freed bytes seen. Restore weights -> load the wanted
version -> restore the rest -> flush -> resume -> one generated token.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from nodeagent.engines.adapter import EngineAdapter, ReadyReason, Tags
from nodeagent.engines.http import EngineHttp
from nodeagent.footprint import least_freed, used_bytes
from nodeagent.ledger import LedgerEntry
from nodeagent.setup import NodeSetup
from springtide.errors import FailedPrecondition, SpringtideError, Unimplemented
from springtide.model.enums import ReportedPhase
from springtide.model.worker import ExitInfo

log = logging.getLogger(__name__)

_IDLE_S = 30.0
_FREED_S = 20.0  # how long after the engine's answer its memory may take to be free
_POLL_S = 0.1
_LENT_SLACK_BYTES = 1024 * 1024 * 1024
_WARM_UP_S = 120.0


class ChangeFailed(Exception):
    """The engine is in a state that nobody wants; `exit_info` says which."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.exit_info = ExitInfo(reason=reason, message=message)


class Life(Protocol):
    """What a change needs of the incarnation that it changes."""

    warm: bool

    @property
    def entry(self) -> LedgerEntry:
        """The ledger's entry as it is now."""

    def remember(self, **fields: Any) -> None:
        """Changes the ledger's entry, on the disk."""

    def set_phase(self, phase: ReportedPhase) -> None:
        """What is reported."""

    def span(self, name: str, start_s: float) -> None:
        """A part of the trace that ends now."""


class Changes:
    """The changes of one incarnation. Every method raises ChangeFailed, or what the engine's verbs raise."""

    def __init__(self, setup: NodeSetup, life: Life, adapter: EngineAdapter, http: EngineHttp) -> None:
        self._setup = setup
        self._life = life
        self._adapter = adapter
        self._http = http

    # ------------------------------------------------------------ sleep

    async def sleep(self, level: int) -> None:
        """Releases memory, and sees that it is free."""
        begun_at, life = self._setup.clock.now(), self._life
        if not life.entry.verbs_known:
            await self.ask_capabilities()
        lacking = life.entry.missing_verbs.get("release")
        if lacking is not None:
            message = f"its engine cannot release memory: it lacks {lacking}"
            raise ChangeFailed("RELEASE_UNIMPLEMENTED", message)
        await self._adapter.wait_idle(self._http, _IDLE_S)
        before = await asyncio.to_thread(used_bytes, self._setup, life.entry)
        life.remember(changing="release", sleep_level=level)
        try:
            tags = await self._adapter.release(self._http, level)
        except Unimplemented as error:
            raise ChangeFailed("RELEASE_UNIMPLEMENTED", str(error)) from None
        except SpringtideError as error:
            raise ChangeFailed("RELEASE_FAILED", str(error)) from None
        freed, left = await self._until_freed(before)
        life.warm = False
        life.remember(changing="", released=tags, freed_bytes=freed, bytes_asleep=left, engine_paused_at=None)
        life.span("springtide.worker.sleep", begun_at)
        log.info("worker %s sleeps; freed %s bytes", life.entry.worker_id, freed)

    async def _until_freed(self, before: int | None) -> tuple[int | None, int | None]:
        """(freed, still used), bytes; (None, None) where nobody can tell. Raises ChangeFailed when nothing was."""
        if before is None:
            return None, None
        least = least_freed(self._setup, self._life.entry, before)
        end, last = self._setup.clock.now() + _FREED_S, None
        while True:
            used = await asyncio.to_thread(used_bytes, self._setup, self._life.entry)
            if used is None:
                return None, None
            if before - used >= least and (last is None or abs(last - used) <= max(least // 8, 1)):
                return before - used, used
            if self._setup.clock.now() > end:
                if before - used >= least:
                    return before - used, used
                message = f"the engine said that it sleeps, and of {before} bytes {max(0, before - used)} were freed"
                raise ChangeFailed("RELEASE_FREED_NOTHING", message)
            last = used
            await asyncio.sleep(_POLL_S)

    # ------------------------------------------------------------ wake

    async def wake(self, version: str, source: str) -> None:
        """Takes memory again, with the weights that are wanted, and proves it by one token."""
        begun_at, life = self._setup.clock.now(), self._life
        life.set_phase(ReportedPhase.LOADING)
        await self._until_given_back()
        before = await asyncio.to_thread(used_bytes, self._setup, life.entry)
        launch, tags = life.entry.launch, life.entry.released
        other = bool(source) and version != life.entry.weight_version
        reload = other or not self._adapter.keeps_weights(life.entry.sleep_level or 1, launch.engine_args)
        life.remember(changing="restore")
        try:
            if reload and "weights" in tags:
                await self._adapter.restore(self._http, ("weights",))
                life.set_phase(ReportedPhase.SYNCING_WEIGHTS)
                await self._load(version if source else life.entry.weight_version, source)
                rest = tuple(tag for tag in tags if tag != "weights")
                if rest:
                    await self._adapter.restore(self._http, rest)
            else:
                await self._adapter.restore(self._http, tags)
                if other:
                    await self._load(version, source)
            life.remember(changing="", released=())
            await self._serve_again()
        except ChangeFailed:
            raise
        except SpringtideError as error:
            raise ChangeFailed("WAKE_FAILED", str(error)) from None
        after = await asyncio.to_thread(used_bytes, self._setup, life.entry)
        taken = None if before is None or after is None else max(0, after - before)
        life.remember(reoccupied_bytes=taken)
        life.warm = True
        life.span("springtide.worker.wake", begun_at)
        log.info("worker %s is awake; took %s bytes", life.entry.worker_id, taken)

    async def _until_given_back(self) -> None:
        """What was lent is free again. Waits as long as it takes: the control plane's deadline ends it."""
        left = self._life.entry.bytes_asleep
        if self._setup.simulated or left is None:
            return
        told = False
        while True:
            used = await asyncio.to_thread(used_bytes, self._setup, self._life.entry)
            if used is None or used <= left + _LENT_SLACK_BYTES:
                return
            if not told:  # once: the wait may take minutes
                told = True
                name = self._life.entry.worker_id
                log.warning("worker %s cannot wake yet: %s bytes of its GPUs are in use", name, used)
            await asyncio.sleep(1.0)

    # ------------------------------------------------------------ weights

    async def weights_at_start(self, version: str, source: str) -> None:
        """Before anything is served by a new engine."""
        if source:
            self._life.set_phase(ReportedPhase.SYNCING_WEIGHTS)
            await self._load(version, source)

    async def new_weights(self, version: str, source: str) -> None:
        """pause -> release the KV cache where that can be done -> update -> restore -> flush -> resume -> one token."""
        begun_at, life = self._setup.clock.now(), self._life
        life.remember(changing="weights")
        paused = await self._optional(lambda: self._adapter.pause(self._http, "abort"))
        await self._adapter.wait_idle(self._http, _IDLE_S)
        released: Tags = ()
        if "release" not in life.entry.missing_verbs:
            try:
                released = await self._adapter.release(self._http, 1, ("kv_cache",))
            except SpringtideError as error:
                log.info("worker %s keeps its KV cache: %s", life.entry.worker_id, error)
        await self._load(version, source)
        if released:
            await self._adapter.restore(self._http, released)
        await self._serve_again(paused)
        life.remember(changing="")
        life.span("springtide.worker.weights", begun_at)

    async def _load(self, version: str, source: str) -> None:
        """From `source`; without one, from the model that the engine was started with."""
        launch = self._life.entry.launch
        self._life.remember(weight_version="")
        try:
            await self._adapter.update_weights(
                self._http, version, source or launch.model, launch.start_timeout_s or 900.0
            )
        except Unimplemented as error:
            raise ChangeFailed("WEIGHTS_UNIMPLEMENTED", str(error)) from None
        except SpringtideError as error:
            raise ChangeFailed("WEIGHTS_FAILED", str(error)) from None
        self._life.remember(weight_version=version)

    async def _serve_again(self, paused: bool = False) -> None:
        """`paused`: by us. Not every engine says of itself that it is."""
        await self._optional(lambda: self._adapter.flush_cache(self._http))
        if paused or (await self._adapter.ready(self._http)).reason is ReadyReason.PAUSED:
            await self._adapter.resume(self._http)
        found = await self._adapter.ready(self._http)
        if not found.ready:
            raise ChangeFailed("WAKE_FAILED", f"the engine is {found.reason}: {found.detail}")
        entry = self._life.entry
        self._life.set_phase(ReportedPhase.WARMING)
        await self._adapter.warm_up(self._http, entry.launch.served_model_name or entry.pool, _WARM_UP_S)

    @staticmethod
    async def _optional(verb: Callable[[], Awaitable[None]]) -> bool:
        """A verb that not every engine has, or that has nothing to do; whether it was done."""
        try:
            await verb()
        except (Unimplemented, FailedPrecondition) as error:
            log.debug("left out: %s", error)
            return False
        return True

    # ------------------------------------------------------------ what it can do, and how far it came

    async def ask_capabilities(self) -> None:
        """Notes what the engine lacks. One that does not answer is asked again before it matters."""
        found = await self._adapter.capabilities(self._http)
        if found.asked:
            self._life.remember(missing_verbs=dict(found.missing), verbs_known=True)

    async def recover(self) -> None:
        """After the agent's death in the middle of a change: what the engine says counts. Raises ChangeFailed when it
        cannot say."""
        life = self._life
        changing = life.entry.changing
        if not changing:
            return
        released = await self._adapter.released(self._http)
        if released is None:
            what = {"release": "RELEASE", "restore": "WAKE"}.get(changing, "WEIGHTS")
            message = "the agent ended in the middle, and this engine cannot say how far it came"
            raise ChangeFailed(f"{what}_INTERRUPTED", message)
        if changing == "weights":
            life.remember(changing="", weight_version="")
        elif released:
            life.remember(changing="", released=life.entry.released or ("weights", "kv_cache"))
        else:
            life.remember(changing="", released=())
            if changing == "restore":
                await self._serve_again()
