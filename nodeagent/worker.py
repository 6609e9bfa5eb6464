"""One worker of this node: a serial task that brings what is there to what is wanted, and its report."""

import asyncio
import dataclasses
import logging
from typing import Any

from nodeagent.core.converge import KnownWorker
from nodeagent.incarnation import Incarnation
from nodeagent.ledger import LedgerEntry
from nodeagent.setup import NodeSetup
from springtide.errors import Conflict, FailedPrecondition, SpringtideError
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import ExitInfo, WorkerReport
from springtide.v1 import agent_pb2, shim_pb2

log = logging.getLogger(__name__)

STARTING = shim_pb2.SHIM_ADMISSION_STARTING
OPEN = shim_pb2.SHIM_ADMISSION_OPEN
PAUSED = shim_pb2.SHIM_ADMISSION_PAUSED
DRAINING = shim_pb2.SHIM_ADMISSION_DRAINING
_RETRY_S = 0.5
_FAULT_PAUSE_S = 1.0


class Worker:
    """`follow` and `refuse` note what is wanted; `run` acts. Nothing else changes a worker."""

    def __init__(self, setup: NodeSetup, entry: LedgerEntry) -> None:
        self._setup = setup
        self._entry = entry
        self._target: DesiredWorker | None = None
        self._refused: ExitInfo | None = None
        self._life: Incarnation | None = None
        self._event = asyncio.Event()
        self._reported: tuple[ReportedPhase, int, bool, bool] | None = None
        self._drain_since: float | None = None
        self._aborted_generation = 0
        self._kill = False
        self.end_was_reported = False

    # ------------------------------------------------------------ what is wanted

    def follow(self, store_id: str, desired: DesiredWorker) -> None:
        """Notes what is wanted. `core.converge` has judged it before."""
        entry = self.entry
        news = (entry.store_id, entry.generation, entry.want) != (store_id, desired.generation, desired.want)
        self._target = desired
        self._refused = None
        if not news or desired.want is None:
            self._wake()
            return
        if self._life is not None:
            self._life.follow(store_id, desired.generation, desired.want, desired.traceparent)
        else:
            self._entry = dataclasses.replace(
                entry,
                store_id=store_id,
                generation=desired.generation,
                want=desired.want,
                pool=desired.pool,
                launch=desired.launch if _starts(desired) else entry.launch,
                traceparent=desired.traceparent or entry.traceparent,
                started_generation=entry.started_generation if entry.store_id == store_id else 0,
                stopped=entry.stopped or not _starts(desired),
            )
        self._wake()

    def refuse(self, store_id: str, desired: DesiredWorker, reason: str, message: str) -> None:
        """A start that cannot be: the worker is FAILED at this generation, until another is wanted."""
        assert self._life is None
        if self._refused is None:
            log.error("worker %s is refused: %s", desired.worker_id, message, extra={"reason": reason})
        self._target = None
        self._refused = ExitInfo(reason="LAUNCH_REFUSED", message=f"{reason}: {message}")
        self._entry = dataclasses.replace(
            self._entry,
            store_id=store_id,
            generation=desired.generation,
            started_generation=desired.generation,
            want=Want.RUN,
            launch=desired.launch,
            stopped=False,
            exit=self._refused,
            traceparent=desired.traceparent,
        )
        self._wake()

    def stop_for_good(self, *, kill: bool) -> None:
        """The agent itself leaves: stop whatever is wanted."""
        self._kill = self._kill or kill
        self._target = self._own_order(Want.STOP)
        self._wake()

    def drain_for_good(self) -> None:
        """The agent itself leaves and nobody tells it to drain: the shim refuses new requests."""
        if self._target is None or self._target.want is not Want.STOP:
            self._target = self._own_order(Want.DRAIN)
            self._wake()

    def _own_order(self, want: Want) -> DesiredWorker:
        entry = self.entry
        return DesiredWorker(entry.worker_id, entry.pool, entry.generation, want, entry.launch, kill=self._kill)

    # ------------------------------------------------------------ what is

    @property
    def entry(self) -> LedgerEntry:
        """The ledger's entry as it is now."""
        return self._life.entry if self._life is not None else self._entry

    @property
    def store_id(self) -> str:
        """The store that asked for it."""
        return self.entry.store_id

    @property
    def live(self) -> bool:
        """A process of it may exist, or is about to: its GPUs are taken."""
        return self._life is not None or self._entry.live or self._should_start()

    @property
    def in_flight(self) -> int | None:
        """Requests in its shim; None: unknown. 0 where no shim can be."""
        life = self._life
        if life is None:
            return None if self._entry.live else 0
        if life.ended or not life.entry.live:
            return 0
        return life.shim.counts.in_flight if life.shim.counts is not None else None

    @property
    def drained(self) -> bool:
        """Its shim admits nothing and nothing runs in it. What is not known to be so is not."""
        return self.in_flight == 0 and self.phase is not ReportedPhase.READY

    def known(self) -> KnownWorker:
        """For `core.converge`."""
        entry = self.entry
        return KnownWorker(
            worker_id=entry.worker_id,
            store_id=entry.store_id,
            generation=entry.generation,
            want=entry.want,
            live=self.live,
            gpu_ids=entry.launch.gpu_ids if self.live and not entry.gpu_ids else entry.gpu_ids,
            launch_fingerprint=entry.fingerprint,
            asleep=self.asleep,
        )

    @property
    def asleep(self) -> bool:
        """Its memory is released and stays so for now."""
        life = self._life
        if life is None:
            return self._entry.live and bool(self._entry.released) and not self._entry.changing
        return life.asleep and not life.ended

    @property
    def phase(self) -> ReportedPhase:
        """How far it is."""
        life = self._life
        if life is None:
            if self._entry.live:
                return ReportedPhase.ADOPTING
            if self._should_start():
                return ReportedPhase.BOOTING
            return ReportedPhase.STOPPED if self._entry.stopped else ReportedPhase.FAILED
        if life.stopping or life.ended or life.failure is not None:
            return ReportedPhase.STOPPING
        status = life.shim.status
        if life.busy:
            return ReportedPhase.DRAINING if life.busy == "sleep" else life.phase
        if life.entry.released:
            return ReportedPhase.SLEEPING
        if not life.warm or status is None:
            return ReportedPhase.DRAINING if self._wants(Want.DRAIN) and status is not None else life.phase
        return {
            OPEN: ReportedPhase.READY,
            PAUSED: ReportedPhase.PAUSED,
            DRAINING: ReportedPhase.DRAINING,
        }.get(status.admission, ReportedPhase.WARMING)

    @property
    def links(self) -> shim_pb2.LinkCounts | None:
        """What its shim's links with routers have carried. None: unknown."""
        counts = self._life.shim.counts if self._life is not None else None
        return counts.links if counts is not None and counts.HasField("links") else None

    def report(self) -> WorkerReport:
        """Everything known of it."""
        entry, life = self.entry, self._life
        status = life.shim.status if life is not None and not life.ended else None
        counts = life.shim.counts if life is not None else None
        load = life.load if life is not None else None
        phase = self.phase
        return WorkerReport(
            worker_id=entry.worker_id,
            pool=entry.pool,
            store_id=entry.store_id,
            generation=entry.generation,
            incarnation=entry.incarnation,
            phase=phase,
            endpoint=_endpoint(self._setup.advertised_host, status.port) if status is not None else "",
            gpu_ids=entry.gpu_ids,
            in_flight=counts.in_flight if counts is not None else None,
            engine_running=load.running if load else None,
            engine_waiting=load.waiting if load else None,
            kv_use=load.kv_use if load else None,
            total_served=counts.total_served if counts is not None else None,
            max_in_flight=status.max_in_flight if status is not None else entry.max_in_flight,
            exit=entry.exit if phase is ReportedPhase.FAILED else None,
            log_path=str(self._setup.ledger.folder(entry.worker_id) / "engine.log") if entry.incarnation else "",
            weight_version=entry.weight_version,
            freed_bytes=entry.freed_bytes,
            reoccupied_bytes=entry.reoccupied_bytes,
            missing_verbs=entry.missing_verbs,
            verbs_known=entry.verbs_known,
            launch_fingerprint=entry.fingerprint,
            generation_tokens_total=load.generation_tokens_total if load else None,
            probe_failures=life.probe_failures if life is not None and life.warm else None,
            traceparent=entry.traceparent,
            engine_idle=life.engine_idle if life is not None else False,
            start_phases_s=entry.start_phases,
            confinement=status.confinement if status is not None else "",
            slot_wait_s=life.slot_wait_s if life is not None else 0.0,
        )

    async def verb(self, order: agent_pb2.VerbOrder) -> dict[str, object]:
        """Does one verb at the engine. Raises FailedPrecondition when another engine, or none, is there."""
        life = self._life
        if life is None or life.ended or (order.incarnation and order.incarnation != life.entry.incarnation):
            raise FailedPrecondition(
                f"worker {order.worker_id} has no engine of incarnation {order.incarnation}.",
                reason="NO_ENGINE",
                field="worker_id",
                value=order.worker_id,
                remedy="Look at its state, and ask again.",
            )
        try:
            return await life.verb(order.verb, dict(order.args), order.timeout_s)
        finally:
            self._wake()

    async def refresh(self) -> None:
        """Reads the shim's counts."""
        if self._life is not None:
            await self._life.shim.refresh()

    # ------------------------------------------------------------ acting

    async def run(self) -> None:
        """For ever. A fault in here is logged and tried again; it never reaches another worker."""
        while True:
            try:
                await self._step()
            except Exception:
                log.exception("worker %s: the agent failed", self._entry.worker_id)
                await asyncio.sleep(_FAULT_PAUSE_S)

    async def _step(self) -> None:
        self._event.clear()
        if self._life is not None or self._entry.live or self._should_start():
            await self._live()
        else:
            await self._event.wait()

    def _should_start(self) -> bool:
        entry, target = self._entry, self._target
        return target is not None and _starts(target) and entry.generation > entry.started_generation

    async def _live(self) -> None:
        """From start or adoption to the end of the engine."""
        life = self._life
        if life is None:
            if not self._entry.live and self._target is not None:  # it may have run on a node whose clock is ahead
                above = max(self._entry.incarnation, self._target.after_incarnation)
                self._entry = dataclasses.replace(self._entry, incarnation=above, **_fresh(self._target))
            life = self._life = Incarnation(self._setup, self._entry, self._wake)
            self._drain_since = None
            self.end_was_reported = False
            if self._entry.live:
                if self._entry.want is Want.STOP:
                    self._target = self._own_order(Want.STOP)  # a stop that the agent's own death interrupted
                life.adopt()
            else:
                life.start()
            self._wake()
        while not life.ended:
            self._event.clear()
            await self._act(life)
            if not life.ended:
                await self._event.wait()
        await life.finish()
        entry = life.entry
        if not entry.stopped:
            # It ended by itself: that is the failure of everything that was wanted of it until now.
            entry = dataclasses.replace(entry, started_generation=entry.generation)
        elif self._target is not None and _starts(self._target):
            entry = dataclasses.replace(entry, launch=self._target.launch)
        self._entry = entry
        self._life = None
        self._wake()

    async def _act(self, life: Incarnation) -> None:
        """One step from what is to what is wanted."""
        target, status = self._target, life.shim.status
        if life.failure is not None:
            if not life.killed:
                await life.stop(0.0)
        elif target is not None and target.want is Want.STOP:
            await self._stop(life, target)
        elif life.busy:
            return  # a change of the engine is under way, and wakes this when it is done
        elif status is None:
            return  # nothing can be asked of it yet; its first word wakes this
        elif target is not None:
            await self._serve(life, target)
        elif life.warm and status.admission == STARTING and _runs(life.entry.want):
            # Adopted while it loaded, and no control plane has spoken yet: what was wanted last still is.
            await self._admit(life, self._own_order(life.entry.want))

    async def _serve(self, life: Incarnation, target: DesiredWorker) -> None:
        if target.want is Want.SLEEP:
            await self._sleep(life, target)
        elif target.want is Want.RUN and life.entry.released:
            life.set_phase(ReportedPhase.LOADING)
            life.change("wake", life.changes().wake(target.weight_version, target.weight_source))
        elif target.want is Want.RUN and life.warm and _other_weights(life, target):
            await self._close(life, target, PAUSED)
            if _is_closed(life, (PAUSED, STARTING, DRAINING)):
                life.set_phase(ReportedPhase.SYNCING_WEIGHTS)
                life.change("weights", life.changes().new_weights(target.weight_version, target.weight_source))
        else:
            paused_at = life.entry.engine_paused_at
            resumes = target.want is Want.RUN and not target.paused and paused_at is not None
            if resumes and target.generation > (paused_at or 0):
                await life.resume_engine()
            await self._admit(life, target)

    async def _sleep(self, life: Incarnation, target: DesiredWorker) -> None:
        """Nothing new, nothing running, and then the engine's memory. A start goes to its end first."""
        if life.entry.released or not life.warm:
            return
        await self._close(life, target, DRAINING)
        if _is_closed(life, (DRAINING,)):
            life.set_phase(ReportedPhase.DRAINING)
            life.change("sleep", life.changes().sleep(target.sleep_level or 1))

    async def _close(
        self, life: Incarnation, target: DesiredWorker, admission: "shim_pb2.ShimAdmission.ValueType"
    ) -> None:
        """The shim refuses new requests; with `abort_in_flight` it cuts those that run."""
        status = life.shim.status
        closed = status is not None and status.admission in (STARTING if admission == PAUSED else admission, admission)
        want = Want.DRAIN if admission == DRAINING else Want.RUN
        if not closed or target.abort_in_flight:
            await self._admit(life, dataclasses.replace(target, want=want, paused=True))

    async def _stop(self, life: Incarnation, target: DesiredWorker) -> None:
        kill = target.kill or self._kill
        if life.stopping and not (kill and not life.killed):
            return
        if self._drain_since is not None:
            life.span("springtide.worker.drain", self._drain_since)
            self._drain_since = None
        await life.stop(0.0 if kill else (life.entry.launch.stop_grace_s or 30.0))

    async def _admit(self, life: Incarnation, target: DesiredWorker) -> None:
        status = life.shim.status
        assert status is not None
        admission = status.admission
        if target.want is Want.DRAIN:
            admission = DRAINING
            if self._drain_since is None:
                self._drain_since = self._setup.clock.now()
        elif life.warm:
            admission = PAUSED if target.paused else OPEN
            self._drain_since = None
        closes = target.want is Want.DRAIN or target.paused
        abort = closes and target.abort_in_flight and self._aborted_generation < target.generation
        bound = target.launch.max_in_flight if target.launch.max_in_flight != status.max_in_flight else 0
        if admission == status.admission and target.generation <= status.generation and not abort and not bound:
            return
        try:
            await life.shim.admit(admission, max(target.generation, status.generation), bound, abort)
        except Conflict as error:
            log.warning("worker %s: its shim refuses: %s", target.worker_id, error)
        except SpringtideError as error:
            log.warning("worker %s: its shim does not answer: %s", target.worker_id, error)
            asyncio.get_running_loop().call_later(_RETRY_S, self._wake)
        else:
            if abort:
                self._aborted_generation = target.generation
            self._wake()

    def _wants(self, want: Want) -> bool:
        return self._target is not None and self._target.want is want

    def _wake(self) -> None:
        self._event.set()
        phase, life = self.phase, self._life
        drained = phase is ReportedPhase.DRAINING and self.in_flight == 0
        idle = drained and life is not None and life.engine_idle
        news = (phase, self.entry.generation, drained, idle)
        if news != self._reported:
            self._reported = news
            self._setup.changed()


def _starts(desired: DesiredWorker) -> bool:
    """The order makes an engine start where there is none."""
    return desired.want is Want.RUN or (desired.want is Want.SLEEP and desired.start_asleep)


def _runs(want: Want) -> bool:
    return want is not Want.SLEEP


def _fresh(target: DesiredWorker) -> dict[str, Any]:
    """What the ledger knows of the engine that is about to be started. Weights without a source are its own."""
    return {
        "released": (),
        "sleep_level": 0,
        "changing": "",
        "freed_bytes": None,
        "reoccupied_bytes": None,
        "bytes_asleep": None,
        "weight_version": "" if target.weight_source else target.launch.weight_version,
        "weight_wanted": target.weight_version,
        "weight_source": target.weight_source,
        "engine_paused_at": None,
        "missing_verbs": {},
        "verbs_known": False,
    }


def _other_weights(life: Incarnation, target: DesiredWorker) -> bool:
    """It shall serve others than it has, and there is a place to load them from."""
    return bool(target.weight_source) and target.weight_version != life.entry.weight_version


def _is_closed(life: Incarnation, admissions: "tuple[shim_pb2.ShimAdmission.ValueType, ...]") -> bool:
    """The shim admits nothing and nothing runs in it."""
    status = life.shim.status
    return status is not None and status.admission in admissions and status.in_flight == 0


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
