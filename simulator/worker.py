"""A modelled agent's view of one worker: the ledger's entry, the shim when there is one, and the report.

It follows nodeagent.worker: an order bumps the entry's generation, a start happens once per generation, an end that
nobody asked for is the failure of everything that was wanted until then.
"""

from typing import Protocol

from nodeagent.core.converge import KnownWorker
from nodeagent.core.fingerprint import fingerprint
from simulator.shim import DRAINING, GONE, OPEN, PAUSED, Shim
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import ExitInfo, WorkerReport

_CHANGES = {
    "sleep": ReportedPhase.DRAINING,
    "wake": ReportedPhase.LOADING,
    "weights": ReportedPhase.SYNCING_WEIGHTS,
}
_PHASES = {OPEN: ReportedPhase.READY, PAUSED: ReportedPhase.PAUSED, DRAINING: ReportedPhase.DRAINING}


class Host(Protocol):
    """What a worker asks of its node."""

    def spawn(self, worker: "ModelWorker") -> None: ...

    def stop(self, worker: "ModelWorker", *, kill: bool) -> None: ...

    def changed(self, worker: "ModelWorker") -> None: ...

    def drain_began(self, worker: "ModelWorker") -> None: ...

    def sleep(self, worker: "ModelWorker") -> None: ...

    def wake(self, worker: "ModelWorker") -> None: ...

    def load_weights(self, worker: "ModelWorker", version: str) -> None: ...


class ModelWorker:
    """One worker id on one node. The ledger's part survives the agent, the rest does not."""

    def __init__(self, host: Host, store_id: str, desired: DesiredWorker) -> None:
        self.host = host
        # the ledger
        self.worker_id = desired.worker_id
        self.pool = desired.pool
        self.store_id = store_id
        self.generation = 0
        self.started_generation = 0
        self.want = desired.want or Want.RUN
        self.launch: EngineLaunch = desired.launch
        self.gpu_ids: tuple[str, ...] = ()
        self.incarnation = 0
        self.stopped = False
        self.exit: ExitInfo | None = None
        self.shim: Shim | None = None
        self.asleep = False
        self.weight_version = ""
        # the agent's memory
        self.changing = ""  # "sleep", "wake" or "weights"
        self.target: DesiredWorker | None = None
        self.adopting = False
        self.stopping = False
        self.warm = False
        self.start_phase = ReportedPhase.BOOTING
        self.refused: ExitInfo | None = None
        self.aborted_generation = 0
        self.end_was_reported = False
        self.probe_failures = 0
        self._fingerprint_of: EngineLaunch | None = None
        self._fingerprint_is = ""
        self._facts: tuple[object, ...] = ()
        self._last: WorkerReport | None = None
        self.idle_seen = True  # False: idle or not, the next check of its drain has not been made

    # ------------------------------------------------------------ orders

    def follow(self, store_id: str, desired: DesiredWorker) -> None:
        self.target = desired
        self.refused = None
        news = (self.store_id, self.generation, self.want) != (store_id, desired.generation, desired.want)
        if news and desired.want is not None:
            if self.shim is None:
                self.pool = desired.pool
                self.launch = desired.launch if _starts(desired) else self.launch
                self.started_generation = self.started_generation if self.store_id == store_id else 0
                self.stopped = self.stopped or not _starts(desired)
            self.store_id, self.generation, self.want = store_id, desired.generation, desired.want
        self.act()

    def refuse(self, store_id: str, desired: DesiredWorker, reason: str, message: str) -> None:
        """A start that cannot be: FAILED at this generation, until another is wanted."""
        self.target = None
        self.store_id, self.want, self.launch = store_id, Want.RUN, desired.launch
        self.generation = self.started_generation = desired.generation
        self.stopped = False
        self.exit = self.refused = ExitInfo(reason="LAUNCH_REFUSED", message=f"{reason}: {message}")
        self.host.changed(self)

    def act(self) -> None:
        """One step from what is to what is wanted."""
        if self.shim is None:
            if self.should_start():
                self.exit = None
                self.end_was_reported = False
                if self.target is not None:
                    self.incarnation = max(self.incarnation, self.target.after_incarnation)
                self.host.spawn(self)
            return
        target = self.target
        if target is None or self.adopting:
            return
        if target.want is Want.STOP:
            if not self.stopping or target.kill:
                self.host.stop(self, kill=target.kill)
        elif self.stopping or self.changing:
            return
        elif target.want is Want.SLEEP:
            self._sleep(self.shim, target)
        elif target.want is Want.RUN and self.asleep:
            self.host.wake(self)
        elif target.want is Want.RUN and self.warm and self._is_behind(target):
            self._load_weights(self.shim, target)
        else:
            self._admit(self.shim, target)

    def _sleep(self, shim: Shim, target: DesiredWorker) -> None:
        if self.asleep or not self.warm:
            return
        if shim.admission != DRAINING:
            shim.set_admission(DRAINING)
            self.host.changed(self)
        if shim.in_flight == 0 and shim.engine.idle:
            self.host.sleep(self)

    def _is_behind(self, target: DesiredWorker) -> bool:
        return bool(target.weight_source) and target.weight_version != self.weight_version

    def _load_weights(self, shim: Shim, target: DesiredWorker) -> None:
        if shim.admission != PAUSED:
            shim.set_admission(PAUSED)
            self.host.changed(self)
        if target.abort_in_flight and self.aborted_generation < target.generation:
            self.aborted_generation = target.generation
            shim.abort_all()
        if shim.in_flight == 0:
            self.host.load_weights(self, target.weight_version)

    def _admit(self, shim: Shim, target: DesiredWorker) -> None:
        before = (shim.admission, self.generation)
        if target.want is Want.DRAIN:
            if shim.admission != DRAINING:
                shim.set_admission(DRAINING)
                self.host.drain_began(self)
            if target.abort_in_flight and self.aborted_generation < target.generation:
                self.aborted_generation = target.generation
                shim.abort_all()
        elif self.warm:
            shim.set_admission(PAUSED if target.paused else OPEN)
        if before != (shim.admission, self.generation):
            self.host.changed(self)

    def should_start(self) -> bool:
        return (
            self.target is not None
            and _starts(self.target)
            and self.shim is None
            and self.generation > self.started_generation
        )

    # ------------------------------------------------------------ facts

    @property
    def live(self) -> bool:
        return self.shim is not None or self.should_start()

    def ended(self, info: ExitInfo | None) -> None:
        """The engine's process group is gone and its memory free. `info` is why, unless it was told to stop."""
        self.shim = None
        self.gpu_ids = ()
        self.stopped = self.stopping and info is None
        self.exit = None if self.stopped else info
        if not self.stopped:
            self.started_generation = self.generation
        elif self.target is not None and _starts(self.target):
            self.launch = self.target.launch
        self.stopping = self.warm = self.adopting = self.asleep = False
        self.changing = ""
        self.host.changed(self)
        self.act()

    def forget_memory(self) -> None:
        """The agent has died."""
        self.target = None
        self.adopting = self.shim is not None
        self.stopping = False
        self.changing = ""
        self.end_was_reported = False

    def known(self) -> KnownWorker:
        return KnownWorker(
            worker_id=self.worker_id,
            store_id=self.store_id,
            generation=self.generation,
            want=self.want,
            live=self.live,
            gpu_ids=(self.gpu_ids or self.launch.gpu_ids) if self.live else (),
            launch_fingerprint=self._fingerprint() if self.live else "",
            asleep=self.asleep and not self.changing,
        )

    def _fingerprint(self) -> str:
        if self._fingerprint_of is not self.launch:
            self._fingerprint_of, self._fingerprint_is = self.launch, fingerprint(self.launch)
        return self._fingerprint_is

    @property
    def phase(self) -> ReportedPhase:
        shim = self.shim
        if shim is None or shim.admission == GONE:
            if self.should_start():
                return ReportedPhase.BOOTING
            return ReportedPhase.STOPPED if self.stopped else ReportedPhase.FAILED
        if self.adopting:
            return ReportedPhase.ADOPTING
        if self.stopping:
            return ReportedPhase.STOPPING
        if self.changing:
            return _CHANGES[self.changing]
        if self.asleep:
            return ReportedPhase.SLEEPING
        if self.target is not None and self.target.want is Want.DRAIN and not self.warm:
            return ReportedPhase.DRAINING
        return _PHASES.get(shim.admission, self.start_phase)

    def report(self) -> WorkerReport:
        """Everything known of it."""
        shim, phase = self.shim, self.phase
        told = shim is not None and not self.adopting
        in_flight, served = (shim.in_flight, shim.total_served) if shim is not None and told else (None, None)
        figures = shim.engine.figures() if shim is not None and told else (None, None, None, None)
        running, waiting, tokens, _ = figures
        idle = in_flight == running == waiting == 0 and self.idle_seen
        entry = (self.store_id, self.generation, self.incarnation, self.launch, self.gpu_ids, self.weight_version)
        facts = (figures, in_flight, served, idle, phase, shim, told, self.probe_failures, self.warm, self.exit, entry)
        if facts == self._facts and self._last is not None:
            return self._last  # most engines are idle for long
        self._facts = facts
        self._last = WorkerReport(
            worker_id=self.worker_id,
            pool=self.pool,
            store_id=self.store_id,
            generation=self.generation,
            incarnation=self.incarnation,
            phase=phase,
            endpoint=shim.endpoint if shim is not None else "",
            gpu_ids=self.gpu_ids,
            in_flight=in_flight,
            engine_running=running,
            engine_waiting=waiting,
            kv_use=shim.engine.kv_use() if shim is not None and told else None,
            total_served=served,
            max_in_flight=shim.max_in_flight if shim is not None else 0,
            exit=self.exit if phase is ReportedPhase.FAILED else None,
            weight_version=self.weight_version,
            generation_tokens_total=tokens,
            probe_failures=self.probe_failures if self.warm else None,
            engine_idle=idle,
        )
        return self._last


def _starts(desired: DesiredWorker) -> bool:
    return desired.want is Want.RUN or (desired.want is Want.SLEEP and desired.start_asleep)
