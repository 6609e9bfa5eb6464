"""One engine's life under one shim: start or adopt, open, watch, probe, stop, and the proof that nothing is left.

Tasks of one incarnation: the starter (until the engine is warm), the watcher (long poll at the shim), the prober (once
a second). They only note facts and wake `Worker`, which is the one that acts.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from nodeagent.changes import ChangeFailed, Changes
from nodeagent.core.health import Health
from nodeagent.core.progress import Facts
from nodeagent.core.start_phases import start_phases
from nodeagent.deaths import engine_death
from nodeagent.engines.adapter import EngineAdapter, EngineLoad, ReadyReason
from nodeagent.engines.http import EngineHttp
from nodeagent.engines.verbs import perform
from nodeagent.kept_entry import KeptEntry
from nodeagent.ledger import LedgerEntry
from nodeagent.logtail import log_from, log_size, log_tail
from nodeagent.release import kill_leftovers, memory_free
from nodeagent.setup import NodeSetup
from nodeagent.spawn import spawn
from nodeagent.watched_shim import ENDED, WatchedShim
from springtide import processes
from springtide.errors import FailedPrecondition, SpringtideError
from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import ExitInfo
from springtide.v1 import shim_pb2

log = logging.getLogger(__name__)

STARTING = shim_pb2.SHIM_ADMISSION_STARTING
DRAINING = shim_pb2.SHIM_ADMISSION_DRAINING
_SHIM_LISTENS_S = 30.0
_FIRST_POLL_S = 0.05
_WARM_UP_S = 120.0
_FIRST_ASK_S = 1.0
_LAST_ASK_S = 120.0
_DEATH_SHOWS_S = 2.0
_NO_REFUSALS = ("LEDGER_WRITE_FAILED", "PORTS_EXHAUSTED")  # the trouble is this node's, not the launch's
_PROBE_TIMEOUT_S = 2.0
_STOP_OVERDUE_S = 15.0


class StartFailed(Exception):
    """The engine did not become ready; `exit_info` says why."""

    def __init__(self, exit_info: ExitInfo) -> None:
        super().__init__(exit_info.message)
        self.exit_info = exit_info


class Incarnation:
    """`shim`: its shim. `wake` is called at every change of a fact."""

    def __init__(self, setup: NodeSetup, entry: LedgerEntry, wake: Callable[[], None]) -> None:
        self._setup = setup
        self._wake = wake
        self._kept = KeptEntry(setup, entry)
        self.shim = WatchedShim(self._kept, setup.clock, self._noted, wake)
        self.phase = ReportedPhase.BOOTING
        self._slot_asked_at: float | None = None
        self._slot_given_at: float | None = None
        self._probe_soon = asyncio.Event()
        self.load: EngineLoad | None = None
        self._health = Health(setup.stall_timeout_s)
        self.warm = False
        self._ended = False
        self.failure: ExitInfo | None = None
        self.stopping = False
        self._stop_since: float | None = None
        self.killed = False
        self._watching = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._starter: asyncio.Task[None] | None = None
        self._changer: asyncio.Task[None] | None = None
        self.busy = ""  # "sleep", "wake" or "weights": under way

    @property
    def entry(self) -> LedgerEntry:
        """The ledger's entry as it is now."""
        return self._kept.entry

    @property
    def ended(self) -> bool:
        """The engine is gone, or was never there."""
        return self._ended or self.shim.ended

    # ------------------------------------------------------------ beginning

    def start(self) -> None:
        """Starts the engine, as soon as a start slot is free."""
        self._starter = self._task(self._start())

    def adopt(self) -> None:
        """Takes over what the ledger says is alive."""
        self.phase = ReportedPhase.ADOPTING
        self._starter = self._task(self._adopt())

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """One worker's fault never becomes another's: what goes wrong here ends this incarnation, with a reason."""
        try:
            await work
        except (StartFailed, ChangeFailed) as error:
            self.failure = error.exit_info
        except SpringtideError as error:
            self.failure = ExitInfo(reason=error.reason, message=str(error))
        except Exception as error:
            log.exception("worker %s failed", self.entry.worker_id, extra=self._kept.fields())
            self.failure = ExitInfo(reason="AGENT_ERROR", message=f"{type(error).__name__}: {error}")
        if self.failure is not None and self.shim.status is None and not self.entry.live:
            self._ended = True
        self._wake()

    async def _start(self) -> None:
        asked_at = self._slot_asked_at = self._setup.clock.now()
        async with self._setup.start_slots.one():  # waiting for it is no failure here: the timeout begins after it
            started_at = self._slot_given_at = self._setup.clock.now()
            log_begins = log_size(self._kept.log_path)
            try:
                self._kept.entry = spawn(self._setup, self.entry)
            except SpringtideError as error:
                reason = error.reason if error.reason in _NO_REFUSALS else "LAUNCH_REFUSED"
                raise StartFailed(ExitInfo(reason=reason, message=str(error))) from None
            except OSError as error:
                raise StartFailed(ExitInfo(reason="SPAWN_FAILED", message=f"cannot start a shim: {error}")) from None
            self._setup.metrics.starts.labels(self.entry.pool).inc()
            self._kept.save()
            log.info("worker %s started", self.entry.worker_id, extra=self._kept.fields())
            self.shim.note(await self._first_status(_SHIM_LISTENS_S))
            self._watch()
            self.span("springtide.worker.boot", started_at)
            answered_at = self._setup.clock.now()

            async def measure(healthy_at: float) -> None:
                warm_up_s = self._setup.clock.now() - healthy_at
                text = await asyncio.to_thread(log_from, self._kept.log_path, log_begins)
                phases = start_phases(
                    slot_s=started_at - asked_at,
                    process_s=answered_at - started_at,
                    healthy_s=healthy_at - answered_at,
                    warm_up_s=warm_up_s,
                    log=text,
                )
                self.span("springtide.worker.start", asked_at, phases)
                self.remember(start_phases=phases)

            await self._become_ready(measure)

    async def _adopt(self) -> None:
        found = await self._first_status(self._setup.adopt_timeout_s)
        if (found.worker_id, found.incarnation) != (self.entry.worker_id, self.entry.incarnation):
            self.shim.lost = True
            return
        if self.entry.shim is None:
            self.remember(shim=processes.identify(found.shim_pid))
        self.shim.note(found)
        self._watch()
        log.info("worker %s adopted", self.entry.worker_id, extra=self._kept.fields())
        if found.process == ENDED:
            return
        await self.changes().recover()
        if self.entry.released:
            self._wake()
        elif found.admission == STARTING:
            async with self._setup.start_slots.one():
                await self._become_ready()
        else:
            await self._probe()
            self.warm = True
            self._task(self._ask_capabilities())

    async def _first_status(self, bound_s: float) -> shim_pb2.ShimStatus:
        """The shim's first answer. Its death, or no answer within the bound, ends this incarnation."""
        found = await self.shim.first_status(bound_s)
        if found is None:
            raise StartFailed(self.shim.death())
        return found

    async def _become_ready(self, measure: Callable[[float], Awaitable[None]] | None = None) -> None:
        """Healthy, then one generated token. `measure` is told since when it was healthy."""
        launch = self.entry.launch
        timeout_s = launch.start_timeout_s or 900.0
        begun_at = self._setup.clock.now()
        try:
            async with asyncio.timeout(timeout_s):
                self.set_phase(ReportedPhase.LOADING)
                await self._until_healthy()
                loaded_at = self._setup.clock.now()
                self.span("springtide.worker.load", begun_at)
                await self.changes().weights_at_start(self.entry.weight_wanted, self.entry.weight_source)
                self.set_phase(ReportedPhase.WARMING)
                model = launch.served_model_name or self.entry.pool
                await self._warm_up(model, min(timeout_s, _WARM_UP_S))
                self.span("springtide.worker.warm_up", loaded_at)
        except TimeoutError:
            message = f"the engine was not ready within start_timeout_s = {timeout_s:g}"
            raise StartFailed(ExitInfo(reason="START_TIMEOUT", message=message)) from None
        if measure is not None:
            await measure(loaded_at)
        self.warm = True
        self._task(self._ask_capabilities())

    async def _warm_up(self, model: str, timeout_s: float) -> None:
        """One generated token."""
        try:
            await self._adapter().warm_up(self._engine(), model, timeout_s)
        except SpringtideError:
            if not await self._death_shows():
                raise

    # ------------------------------------------------------------ sleep, wake, weights

    @property
    def asleep(self) -> bool:
        """Its memory is released, and nothing is under way."""
        return bool(self.entry.released) and not self.busy and not self.entry.changing

    def changes(self) -> Changes:
        """What can be done to the engine as a whole."""
        return Changes(self._setup, self, self._adapter(), self._engine())

    def change(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Begins a change; `busy` until it is done. One that fails ends this incarnation, with its reason."""
        self.busy = name
        self._changer = self._task(self._change(work))
        self._wake()

    async def _change(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (ChangeFailed, SpringtideError):
            if not await self._death_shows():
                raise
        finally:
            self.busy = ""
            self._probe_soon.set()

    async def _death_shows(self) -> bool:
        """Where something fails because the engine has died, its death is the reason that counts."""
        end = self._setup.clock.now() + _DEATH_SHOWS_S
        while not self.ended and self._setup.clock.now() < end:
            await asyncio.sleep(_FIRST_POLL_S)
        return self.ended

    async def _ask_capabilities(self) -> None:
        pause_s = _FIRST_ASK_S
        while not self.entry.verbs_known and not self.ended and pause_s < _LAST_ASK_S:
            try:
                if not self.busy and not self.entry.released:
                    await self.changes().ask_capabilities()
            except Exception as error:  # noqa: BLE001 - a plug-in may know nothing of it; asked again before a sleep
                log.info(
                    "worker %s: its verbs are not known: %s", self.entry.worker_id, error, extra=self._kept.fields()
                )
            if not self.entry.verbs_known:
                await asyncio.sleep(pause_s)
                pause_s *= 2
        self._wake()

    async def verb(self, verb: str, args: Mapping[str, str], timeout_s: float) -> dict[str, object]:
        """One verb of an operator. Raises what the engine raises, FailedPrecondition while it sleeps or changes."""
        if self.entry.released or self.busy or not self.warm:
            state = self.busy or ("asleep" if self.entry.released else "starting")
            if verb == "ready":
                return {"ready": False, "reason": "SLEEPING" if self.entry.released else "BUSY", "detail": state}
            raise FailedPrecondition(
                f"the engine of worker {self.entry.worker_id} is {state}.",
                reason="ENGINE_NOT_SERVING",
                field="worker_id",
                value=self.entry.worker_id,
                remedy="Wait until it is ACTIVE, or activate it.",
            )
        if verb == "pause":
            self.remember(engine_paused_at=self.entry.generation)
        try:
            if verb == "warm_up" and not args.get("model"):
                args = {"model": self.entry.launch.served_model_name}
            answer = await perform(self._adapter(), self._engine(), verb, args, timeout_s)
        except SpringtideError:
            if verb == "pause":
                self.remember(engine_paused_at=None)
            raise
        if verb == "resume":
            self.remember(engine_paused_at=None)
        return answer

    async def resume_engine(self) -> None:
        """Ends an operator's pause of the engine itself."""
        await self._adapter().resume(self._engine())
        self.remember(engine_paused_at=None)

    def remember(self, **fields: Any) -> None:
        """Changes the ledger's entry, on the disk."""
        self._kept.remember(**fields)

    async def _until_healthy(self) -> None:
        pause_s = _FIRST_POLL_S
        while not (await self._adapter().ready(self._engine())).ready:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, self._setup.probe_interval_s)

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._task(self.shim.watch())
            self._task(self._prober())

    def _noted(self, old: shim_pb2.ShimStatus | None, status: shim_pb2.ShimStatus) -> None:
        if status.in_flight == 0 and status.admission == DRAINING and (old is None or old.in_flight):
            # A drain ends when the engine itself says that it is idle, and what it said before this does not count.
            self.load = None
            self._probe_soon.set()
        if old is None or old.version != status.version:
            self._wake()

    async def _prober(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._setup.probe_interval_s):
                    await self._probe_soon.wait()
            except TimeoutError:
                pass
            self._probe_soon.clear()
            if self.warm and not self.stopping and not self.ended and not self.busy:
                await self._probe()
            elif self.entry.released and not self.stopping and not self.ended:
                await self.shim.silence()  # of a sleeping engine its process counts; a probe could wake or end it

    async def _probe(self) -> None:
        """Health of shim and engine, and load; nothing is generated. An engine that sleeps or is paused counts as
        failing, and so does one behind a shim that does not answer: no request reaches it."""
        engine = EngineHttp(self.entry.engine_endpoint, max(_PROBE_TIMEOUT_S, 2 * self._setup.probe_interval_s))
        readiness, silence = await asyncio.gather(self._adapter().ready(engine), self.shim.silence())
        before = (self.probe_failures, self.engine_idle)
        if self.busy or self.entry.released:
            return  # it was asked before it fell asleep
        expected = readiness.reason is ReadyReason.PAUSED and self.entry.engine_paused_at is not None
        if readiness.reason in (ReadyReason.READY, ReadyReason.PAUSED):
            try:
                self.load = await self._adapter().load(engine)
            except SpringtideError:
                self.load = None
        else:
            self.load = None
        self._judge("" if readiness.ready or expected else readiness.detail or readiness.reason, silence)
        if (self.probe_failures, self.engine_idle) != before:
            self._wake()

    def _judge(self, trouble: str, silence: str) -> None:
        """Counts a probe."""
        status, load = self.shim.status, self.load or EngineLoad()
        facts = Facts(
            in_flight=status.in_flight if status is not None else 0,
            streams=status.streams if status is not None else 0,
            relayed_bytes=status.relayed_bytes if status is not None else 0,
            total_served=status.total_served if status is not None else 0,
            generation_tokens=load.generation_tokens_total,
            prompt_tokens=load.prompt_tokens_total,
            kv_use=load.kv_use,
            counts_live=getattr(self._adapter(), "counts_tokens_live", False),
        )
        held = self.entry.engine_paused_at is not None
        failure = self._health.judge(self._setup.clock.now(), facts, trouble, silence, held=held)
        if failure:
            self._setup.metrics.probe_failures.labels(self.entry.pool).inc()
            log.warning("worker %s: %s", self.entry.worker_id, failure, extra=self._kept.fields())

    @property
    def probe_failures(self) -> int:
        """In a row."""
        return self._health.failures

    @property
    def slot_wait_s(self) -> float:
        """How long this start has waited, or still waits, for other starts of the node."""
        if self._slot_asked_at is None:
            return 0.0
        return (self._slot_given_at or self._setup.clock.now()) - self._slot_asked_at

    @property
    def engine_idle(self) -> bool:
        """The engine itself says that nothing runs or waits in it."""
        return self.load is not None and self.load.idle is True

    # ------------------------------------------------------------ orders

    async def stop(self, grace_s: float) -> None:
        """Begins the engine's stop. May be called again with less grace. `ended` follows."""
        for task in (self._starter, self._changer):
            if task is not None:
                task.cancel()
        first, self.stopping = not self.stopping, True
        self._stop_since = self._stop_since or self._setup.clock.now()
        self.killed = self.killed or grace_s == 0.0
        if not self.entry.live:
            self._ended = True
            return
        self._watch()
        if first or grace_s == 0.0:
            self._task(self._escalate(grace_s + _STOP_OVERDUE_S))
        await self.shim.stop(grace_s)

    async def _escalate(self, after_s: float) -> None:
        """A shim that hangs is killed; its guard then kills the engine."""
        await asyncio.sleep(after_s)
        if not self.ended:
            log.error("shim of worker %s does not stop; it is killed", self.entry.worker_id, extra=self._kept.fields())
            self.shim.kill()

    # ------------------------------------------------------------ end

    async def finish(self) -> ExitInfo:
        """After `ended`: every process gone, GPU memory free, the ledger says so. Returns how the engine ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        begun_at = self._stop_since or self._setup.clock.now()
        exit_info = self.failure or (
            self.shim.death() if self.shim.lost else engine_death(self.shim.status, self.stopping)
        )
        if self.entry.live:
            await self.shim.dismiss()
            await kill_leftovers(self._setup.marker, self.entry.worker_id, self._kept.fields())
            await memory_free(self._setup.memory, self.entry, self._kept.fields(), self._setup.used_by_others)
            self.span("springtide.worker.release", begun_at)
        tail = log_tail(self._kept.log_path) or log_tail(self._kept.shim_log_path)
        exit_info = dataclasses.replace(exit_info, log_tail=exit_info.log_tail or tail)
        stopped = (self.stopping and self.failure is None) or self.entry.want is Want.STOP
        if not stopped:
            self._setup.metrics.ends.labels(self.entry.pool, exit_info.reason).inc()
        self.remember(
            live=False,
            shim=None,
            stopped=stopped,
            exit=None if stopped else exit_info,
            released=(),
            changing="",
            engine_paused_at=None,
        )
        fields = {**self._kept.fields(), "reason": exit_info.reason}
        log.info("worker %s ended: %s", self.entry.worker_id, exit_info.message, extra=fields)
        return exit_info

    # ------------------------------------------------------------ small parts

    def _engine(self) -> EngineHttp:
        return EngineHttp(self.entry.engine_endpoint)

    def _adapter(self) -> EngineAdapter:
        return self._setup.adapter(self.entry.launch.engine)

    def set_phase(self, phase: ReportedPhase) -> None:
        self.phase = phase
        self._wake()

    def follow(self, store_id: str, generation: int, want: Want, traceparent: str) -> None:
        """Notes what is wanted now, so that a later agent knows it."""
        self.remember(
            store_id=store_id,
            generation=generation,
            want=want,
            traceparent=traceparent or self.entry.traceparent,
        )

    def span(self, name: str, start_s: float, phases: Mapping[str, float] | None = None) -> None:
        """A part of the worker's trace that ends now."""
        self._kept.span(name, start_s, phases)
