"""The closed sets of words. Values are the wire names without their prefix."""

from enum import StrEnum


class State(StrEnum):
    STARTING = "STARTING"
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    INACTIVE = "INACTIVE"


class Phase(StrEnum):
    REQUESTED = "REQUESTED"
    BOOTING = "BOOTING"
    LOADING = "LOADING"
    SYNCING_WEIGHTS = "SYNCING_WEIGHTS"
    WARMING = "WARMING"
    ADOPTING = "ADOPTING"
    UNROUTING = "UNROUTING"
    FINISHING = "FINISHING"
    RELEASING = "RELEASING"
    SLEEPING = "SLEEPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    LOST = "LOST"


class Condition(StrEnum):
    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"


class Admission(StrEnum):
    OPEN = "OPEN"
    PAUSED = "PAUSED"


class NodeState(StrEnum):
    REQUESTED = "REQUESTED"
    UP = "UP"
    RELEASING = "RELEASING"
    GONE = "GONE"
    LOST = "LOST"


class Role(StrEnum):
    MIXED = "MIXED"
    PREFILL = "PREFILL"
    DECODE = "DECODE"


class DrainAction(StrEnum):
    ABORT = "ABORT"
    WAIT = "WAIT"
    KILL = "KILL"


class ScaleDown(StrEnum):
    """What becomes of a worker that scaling takes out."""

    STOP = "STOP"
    SLEEP = "SLEEP"
    SLEEP_THEN_STOP = "SLEEP_THEN_STOP"


class DecisionResult(StrEnum):
    HOLD = "HOLD"
    SCALE_UP = "SCALE_UP"
    SCALE_DOWN = "SCALE_DOWN"
    REPLACE = "REPLACE"


class ReportedPhase(StrEnum):
    """How far a worker is on its node: a fact that the agent reports."""

    BOOTING = "BOOTING"
    LOADING = "LOADING"
    SYNCING_WEIGHTS = "SYNCING_WEIGHTS"
    WARMING = "WARMING"
    READY = "READY"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    ADOPTING = "ADOPTING"
    SLEEPING = "SLEEPING"


class Want(StrEnum):
    """What is wanted of one worker on its node."""

    RUN = "RUN"
    DRAIN = "DRAIN"
    STOP = "STOP"
    SLEEP = "SLEEP"
