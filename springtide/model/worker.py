"""A worker: one engine instance on one node. The unit of scaling and of routing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import Admission, Condition, Phase, ReportedPhase, State


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """Why an engine ended. `reason` is UPPER_SNAKE."""

    code: int | None = None
    signal: int | None = None
    reason: str = ""
    message: str = ""
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class WorkerIntent:
    """Written by the leader only."""

    state: State = State.INACTIVE
    phase: Phase | None = Phase.STOPPED
    condition: Condition = Condition.HEALTHY
    admission: Admission = Admission.OPEN
    reason: str = ""
    message: str = ""
    state_since: float = 0.0
    phase_since: float = 0.0
    deadline: float | None = None  # of the start or of the drain
    generation: int = 0
    node_id: str = ""
    gpu_ids: tuple[str, ...] = ()
    attempts: int = 0  # failed starts in a row
    next_attempt_at: float | None = None
    held: bool = False  # an operator drained or cancelled it: the loop does not start it again
    abort_in_flight: bool = False  # the drain's deadline has passed and its action is ABORT
    kill: bool = False  # stop without grace
    unrouted_revision: int | None = None  # routers that acknowledged this revision no longer route to it
    traceparent: str = ""
    weight_version: str = ""
    paused_until: float | None = None
    paused_reason: str = ""
    suspect_since: float | None = None
    crashes: int = 0  # in a row, each soon after it had become ACTIVE
    suspect_reason: str = ""  # of SUSPECT: NODE_SILENT or PROBES_FAIL
    sleep_level: int = 0  # above 0: its drain, or its start, ends asleep
    waking: bool = False  # of STARTING: it was asleep
    spare: bool = False  # of STARTING: it is put to sleep instead of serving
    lent_to: str = ""  # of SLEEPING: the job outside that has its GPUs
    weight_source: str = ""


@dataclass(frozen=True, slots=True)
class WorkerObserved:
    """Last facts of the agent that were worth a commit; load is never among them."""

    incarnation: int = 0
    generation: int = 0
    phase: ReportedPhase | None = None
    endpoint: str = ""
    max_in_flight: int = 0
    exit: ExitInfo | None = None
    log_path: str = ""
    weight_version: str = ""
    launch_fingerprint: str = ""
    freed_bytes: int | None = None
    reoccupied_bytes: int | None = None
    missing_verbs: Mapping[str, str] = field(default_factory=dict)
    verbs_known: bool = False
    start_phases_s: Mapping[str, float] = field(default_factory=dict)  # of the last start; what nobody tells is absent
    confinement: str = ""  # what ends all of its engine's processes: cgroup or guard


@dataclass(frozen=True, slots=True)
class Worker:
    worker_id: str
    pool: str
    intent: WorkerIntent = field(default_factory=WorkerIntent)
    observed: WorkerObserved = field(default_factory=WorkerObserved)
    revision: int = 0

    @property
    def state(self) -> State:
        return self.intent.state

    @property
    def routable(self) -> bool:
        """Only ACTIVE with admission OPEN is routable."""
        return self.intent.state is State.ACTIVE and self.intent.admission is Admission.OPEN

    @property
    def failing(self) -> bool:
        """Its engine fails its probes: others get the requests where there are others."""
        return self.intent.condition is Condition.SUSPECT and self.intent.suspect_reason == "PROBES_FAIL"

    @property
    def asleep(self) -> bool:
        """Its memory is released and its process kept."""
        return self.intent.state is State.INACTIVE and self.intent.phase is Phase.SLEEPING


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker as its node reports it in a heartbeat. None is unknown, never zero."""

    worker_id: str
    pool: str
    store_id: str
    generation: int
    incarnation: int
    phase: ReportedPhase
    endpoint: str = ""
    gpu_ids: tuple[str, ...] = ()
    in_flight: int | None = None
    engine_running: int | None = None
    engine_waiting: int | None = None
    kv_use: float | None = None
    total_served: int | None = None
    max_in_flight: int = 0
    exit: ExitInfo | None = None
    log_path: str = ""
    weight_version: str = ""
    launch_fingerprint: str = ""
    generation_tokens_total: int | None = None
    probe_failures: int | None = None
    traceparent: str = ""
    engine_idle: bool = False
    freed_bytes: int | None = None
    reoccupied_bytes: int | None = None
    missing_verbs: Mapping[str, str] = field(default_factory=dict)
    verbs_known: bool = False
    start_phases_s: Mapping[str, float] = field(default_factory=dict)  # of the last start; what nobody tells is absent
    confinement: str = ""  # what ends all of its engine's processes: cgroup or guard
    slot_wait_s: float = 0.0  # this start has waited, or still waits, for others of its node
