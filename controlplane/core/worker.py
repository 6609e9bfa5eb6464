"""The worker machine: where a worker can be, which causes move it, and when what is wanted of it has changed.

Theory of operation. A worker is at a *place*: a state and a phase of that state. A *cause* moves it; `EDGES` lists
for each cause the places that it may move from and where to. There is no other way to change a place: `step` looks
the edge up and raises `IllegalEdge` when there is none.

What the node is told to do follows from the place and a few intent fields (`order_of`). The generation grows exactly
when that order changes, so that an agent can refuse an order which is older than one it has acted on. Two exceptions,
both about LOST: entering it never bumps (the node cannot be told anything, and what it reports when it comes back
must not look outdated), and leaving it always does (nobody knows what the node was last told).

A slice is reserved while `intent.gpu_ids` is not empty: through every state, INACTIVE included, until the node says
that the process is gone and its memory is free.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from springtide.errors import Internal
from springtide.model.enums import Admission, Condition, Phase, State, Want
from springtide.model.worker import Worker, WorkerIntent

Place = tuple[State, Phase | None]

PHASES: Mapping[State, frozenset[Phase | None]] = {
    State.STARTING: frozenset(
        {
            Phase.REQUESTED,
            Phase.BOOTING,
            Phase.LOADING,
            Phase.SYNCING_WEIGHTS,
            Phase.WARMING,
            Phase.ADOPTING,
        }
    ),
    State.ACTIVE: frozenset({None}),
    State.DRAINING: frozenset({Phase.UNROUTING, Phase.FINISHING, Phase.RELEASING}),
    State.INACTIVE: frozenset({Phase.SLEEPING, Phase.STOPPED, Phase.FAILED, Phase.LOST}),
}

# The edges between states that the glossary allows; EDGES below may use no other.
STATE_EDGES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.INACTIVE, State.STARTING),
        (State.STARTING, State.ACTIVE),
        (State.STARTING, State.INACTIVE),
        (State.ACTIVE, State.DRAINING),
        (State.ACTIVE, State.INACTIVE),
        (State.DRAINING, State.ACTIVE),
        (State.DRAINING, State.INACTIVE),
    }
)


class Cause(StrEnum):
    """Why a worker moves. The first word of the docs of each line is who says so."""

    START = "START"  # loop or operator: start it on the given slice
    BOOTED = "BOOTED"  # node: the process was spawned
    LOADING = "LOADING"  # node: the process is up
    SYNCING = "SYNCING"  # node: weights are fetched
    WARMING = "WARMING"  # node: healthy, one generation runs
    READY = "READY"  # node: the shim admits, at the current generation
    CANCEL = "CANCEL"  # loop or operator: the start is no longer wanted
    FAIL = "FAIL"  # node or clock: ended by itself, or never became ready
    LOSE = "LOSE"  # clock: its node is silent; what it does is unknown
    ADOPT = "ADOPT"  # loop: a lost one is back and wanted
    REST = "REST"  # node: a lost one is back, and asleep
    DISMISS = "DISMISS"  # loop: a lost one is back and not wanted, or gone
    FREE = "FREE"  # node: nothing is left of it, its slice is free
    DRAIN = "DRAIN"  # loop or operator: take it out
    UNROUTED = "UNROUTED"  # routers and node: nothing new reaches it
    ABORT = "ABORT"  # clock: the drain's deadline; cut what is left
    OVERDUE = "OVERDUE"  # clock: the drain's deadline; only say so
    RELEASE = "RELEASE"  # node or clock: idle, or cut; stop the engine, or put it to sleep
    SLEPT = "SLEPT"  # node: the memory is released, the process kept
    WAKE = "WAKE"  # loop or operator: a sleeper is to serve again, on the slice that it kept
    DOZE = "DOZE"  # loop: a start that was a wake, or ends asleep, is no longer wanted awake
    RETIRE = "RETIRE"  # loop or clock: a sleeper is to be stopped
    PROMOTE = "PROMOTE"  # loop: a start that was to end asleep serves instead
    ESCALATE = "ESCALATE"  # clock: stopping takes too long; no grace any more
    STOP = "STOP"  # node: the process is gone, as wanted
    UNDRAIN = "UNDRAIN"  # loop or operator: keep it after all
    SUSPECT = "SUSPECT"  # clock or node: quiet, or probes fail
    RECOVER = "RECOVER"  # node: heard and healthy again
    PAUSE = "PAUSE"  # operator or trainer: admission closed for a while
    OPEN = "OPEN"  # operator or clock: admission open again
    REWEIGH = "REWEIGH"  # loop: it shall serve another weight version
    SETTLE = "SETTLE"  # clock: active for so long that earlier failures no longer count


_STARTING: tuple[Place, ...] = tuple(
    (State.STARTING, phase)
    for phase in (
        Phase.REQUESTED,
        Phase.BOOTING,
        Phase.LOADING,
        Phase.SYNCING_WEIGHTS,
        Phase.WARMING,
        Phase.ADOPTING,
    )
)
_ACTIVE: Place = (State.ACTIVE, None)
_UNROUTING: Place = (State.DRAINING, Phase.UNROUTING)
_FINISHING: Place = (State.DRAINING, Phase.FINISHING)
_RELEASING: Place = (State.DRAINING, Phase.RELEASING)
_STOPPED: Place = (State.INACTIVE, Phase.STOPPED)
_FAILED: Place = (State.INACTIVE, Phase.FAILED)
_LOST: Place = (State.INACTIVE, Phase.LOST)
_SLEEPING: Place = (State.INACTIVE, Phase.SLEEPING)
_LIVE: tuple[Place, ...] = (*_STARTING, _ACTIVE, _UNROUTING, _FINISHING, _RELEASING)


def _progress(upto: int, target: Phase) -> Mapping[Place, Place]:
    """Start phases only move forward; ADOPTING (the last) leaves by READY, FAIL, CANCEL or LOSE alone."""
    return dict.fromkeys(_STARTING[:upto], (State.STARTING, target))


EDGES: Mapping[Cause, Mapping[Place, Place]] = {
    Cause.START: dict.fromkeys((_STOPPED, _FAILED), _STARTING[0]),
    Cause.BOOTED: _progress(1, Phase.BOOTING),
    Cause.LOADING: _progress(2, Phase.LOADING),
    Cause.SYNCING: _progress(3, Phase.SYNCING_WEIGHTS),
    Cause.WARMING: _progress(4, Phase.WARMING),
    Cause.READY: dict.fromkeys(_STARTING, _ACTIVE),
    Cause.CANCEL: dict.fromkeys(_STARTING, _STOPPED),
    Cause.FAIL: dict.fromkeys((*_LIVE, _SLEEPING), _FAILED),
    Cause.LOSE: dict.fromkeys((*_LIVE, _SLEEPING), _LOST),
    Cause.ADOPT: {_LOST: (State.STARTING, Phase.ADOPTING)},
    Cause.REST: {_LOST: _SLEEPING},
    Cause.DISMISS: {_LOST: _STOPPED},
    Cause.FREE: {_STOPPED: _STOPPED, _FAILED: _FAILED},
    Cause.DRAIN: {_ACTIVE: _UNROUTING},
    Cause.UNROUTED: {_UNROUTING: _FINISHING},
    Cause.ABORT: {_FINISHING: _FINISHING},
    Cause.OVERDUE: {_FINISHING: _FINISHING},
    Cause.RELEASE: {_FINISHING: _RELEASING},
    Cause.SLEPT: {_RELEASING: _SLEEPING, **dict.fromkeys(_STARTING, _SLEEPING)},
    Cause.WAKE: {_SLEEPING: _STARTING[0]},
    Cause.DOZE: dict.fromkeys(_STARTING, _SLEEPING),
    Cause.RETIRE: {_SLEEPING: _STOPPED},
    Cause.PROMOTE: {place: place for place in _STARTING},
    Cause.ESCALATE: {_RELEASING: _RELEASING},
    Cause.STOP: dict.fromkeys((_UNROUTING, _FINISHING, _RELEASING), _STOPPED),
    Cause.UNDRAIN: dict.fromkeys((_UNROUTING, _FINISHING), _ACTIVE),
    Cause.SUSPECT: {_ACTIVE: _ACTIVE},
    Cause.RECOVER: {_ACTIVE: _ACTIVE},
    Cause.PAUSE: {_ACTIVE: _ACTIVE},
    Cause.OPEN: {_ACTIVE: _ACTIVE},
    Cause.REWEIGH: {_ACTIVE: _ACTIVE, **{place: place for place in _STARTING}},
    Cause.SETTLE: {_ACTIVE: _ACTIVE},
}

# Intent fields that a cause always sets; `step` arguments come on top.
_SETS: Mapping[Cause, Mapping[str, Any]] = {
    Cause.START: {
        "condition": Condition.HEALTHY,
        "admission": Admission.OPEN,
        "abort_in_flight": False,
        "kill": False,
        "held": False,
        "unrouted_revision": None,
        "next_attempt_at": None,
        "paused_until": None,
        "paused_reason": "",
        "sleep_level": 0,
        "waking": False,
        "spare": False,
        "lent_to": "",
    },
    Cause.READY: {"deadline": None, "condition": Condition.HEALTHY, "suspect_since": None, "waking": False},
    Cause.CANCEL: {"deadline": None, "waking": False, "spare": False, "sleep_level": 0},
    Cause.FAIL: {
        "deadline": None,
        "unrouted_revision": None,
        "abort_in_flight": False,
        "waking": False,
        "spare": False,
        "sleep_level": 0,
    },
    Cause.LOSE: {
        "deadline": None,
        "unrouted_revision": None,
        "abort_in_flight": False,
        "kill": False,
        "sleep_level": 0,
        "waking": False,
        "spare": False,
    },
    Cause.ADOPT: {"condition": Condition.HEALTHY, "held": False, "sleep_level": 0},
    Cause.REST: {"condition": Condition.HEALTHY, "attempts": 0, "next_attempt_at": None},
    Cause.DISMISS: {"sleep_level": 0},
    Cause.FREE: {"gpu_ids": ()},
    Cause.DRAIN: {"unrouted_revision": None, "abort_in_flight": False, "kill": False, "sleep_level": 0},
    Cause.ABORT: {"abort_in_flight": True},
    Cause.OVERDUE: {"deadline": None},
    Cause.SLEPT: {
        "deadline": None,
        "unrouted_revision": None,
        "abort_in_flight": False,
        "kill": False,
        "spare": False,
        "waking": False,
        "attempts": 0,
        "next_attempt_at": None,
    },
    Cause.WAKE: {
        "condition": Condition.HEALTHY,
        "admission": Admission.OPEN,
        "kill": False,
        "held": False,
        "waking": True,
        "suspect_since": None,
        "paused_until": None,
        "paused_reason": "",
    },
    Cause.DOZE: {"deadline": None, "spare": False, "waking": False, "attempts": 0, "next_attempt_at": None},
    Cause.RETIRE: {"sleep_level": 0},
    Cause.PROMOTE: {"spare": False, "sleep_level": 0},
    Cause.ESCALATE: {"kill": True, "deadline": None, "sleep_level": 0},
    Cause.STOP: {
        "deadline": None,
        "unrouted_revision": None,
        "abort_in_flight": False,
        "kill": False,
        "gpu_ids": (),
        "sleep_level": 0,
    },
    Cause.UNDRAIN: {
        "deadline": None,
        "unrouted_revision": None,
        "abort_in_flight": False,
        "held": False,
        "sleep_level": 0,
    },
    Cause.SUSPECT: {"condition": Condition.SUSPECT},
    Cause.RECOVER: {"condition": Condition.HEALTHY, "suspect_since": None},
    Cause.PAUSE: {"admission": Admission.PAUSED},
    Cause.OPEN: {
        "admission": Admission.OPEN,
        "paused_until": None,
        "paused_reason": "",
        "abort_in_flight": False,
        "deadline": None,
    },
    Cause.SETTLE: {"attempts": 0},
}

# Causes that leave the reason of the state as it is, because they say something else than why it is in that state.
_KEEPS_REASON = frozenset(
    {Cause.SUSPECT, Cause.RECOVER, Cause.PAUSE, Cause.OPEN, Cause.SETTLE, Cause.FREE, Cause.REWEIGH, Cause.PROMOTE}
)


class IllegalEdge(Internal):
    """A cause was applied at a place that it does not move from. A fault of the caller's."""

    def __init__(self, worker: Worker, cause: Cause, problem: str = "") -> None:
        super().__init__(
            f"worker {worker.worker_id} is {describe(worker)}: {cause} does not apply{problem and ': ' + problem}.",
            reason="ILLEGAL_EDGE",
            field="state",
            value=describe(worker),
        )
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Order:
    """What the node is told to do with a worker. `want` None: nothing is said, and the node leaves it as it is."""

    want: Want | None
    paused: bool = False
    abort_in_flight: bool = False
    kill: bool = False
    node_id: str = ""
    sleep_level: int = 0
    start_asleep: bool = False
    weight_version: str = ""


def order_of(intent: WorkerIntent) -> Order:
    """The order that follows from an intent. INACTIVE is STOP also after its slice is free: that is not a new wish."""
    if intent.state is State.STARTING and intent.spare:
        return Order(Want.SLEEP, node_id=intent.node_id, sleep_level=intent.sleep_level or 1, start_asleep=True)
    if intent.state in (State.STARTING, State.ACTIVE):
        return Order(
            Want.RUN,
            paused=intent.admission is Admission.PAUSED,
            abort_in_flight=intent.admission is Admission.PAUSED and intent.abort_in_flight,
            node_id=intent.node_id,
            weight_version=intent.weight_version,
        )
    if intent.phase is Phase.SLEEPING or (intent.phase is Phase.RELEASING and intent.sleep_level and not intent.kill):
        return Order(Want.SLEEP, node_id=intent.node_id, sleep_level=intent.sleep_level or 1)
    if intent.state is State.DRAINING:
        if intent.phase is Phase.RELEASING:
            return Order(Want.STOP, kill=intent.kill, node_id=intent.node_id)
        return Order(Want.DRAIN, abort_in_flight=intent.abort_in_flight, node_id=intent.node_id)
    if intent.phase is Phase.LOST:
        return Order(None, node_id=intent.node_id)
    return Order(Want.STOP, kill=intent.kill, node_id=intent.node_id)


def _is_to_sleep(intent: WorkerIntent) -> bool:
    """Its order is SLEEP: a node's word that it sleeps is the end of it, and not an old word about one that wakes."""
    return order_of(intent).want is Want.SLEEP


def place_of(worker: Worker) -> Place:
    return worker.intent.state, worker.intent.phase


def describe(worker: Worker) -> str:
    """STATE or STATE/PHASE, for messages."""
    state, phase = place_of(worker)
    return f"{state}/{phase}" if phase else str(state)


def can(worker: Worker, cause: Cause) -> bool:
    """Whether `cause` applies to the worker's place (a START also needs the old slice to be free)."""
    if cause is Cause.START and worker.intent.gpu_ids:
        return False
    if cause is Cause.SLEPT and not _is_to_sleep(worker.intent):
        return False
    return place_of(worker) in EDGES[cause]


def step(worker: Worker, cause: Cause, now: float, *, reason: str = "", message: str = "", **intent: Any) -> Worker:
    """The worker after `cause`. `intent` are further intent fields to set. Raises IllegalEdge."""
    here = place_of(worker)
    if here not in EDGES[cause]:
        raise IllegalEdge(worker, cause)
    if cause is Cause.START and worker.intent.gpu_ids:
        raise IllegalEdge(worker, cause, "its slice is not free yet")
    if cause is Cause.SLEPT and not _is_to_sleep(worker.intent):
        raise IllegalEdge(worker, cause, "it is not to sleep")
    state, phase = EDGES[cause][here]
    old = worker.intent
    keeps = cause in _KEEPS_REASON
    fields: dict[str, Any] = {
        **_SETS.get(cause, {}),
        "state": state,
        "phase": phase,
        "reason": old.reason if keeps else reason or cause.value,
        "message": old.message if keeps else message,
        "state_since": now if state is not old.state else old.state_since,
        "phase_since": now if (state, phase) != here else old.phase_since,
        **intent,
    }
    new = dataclasses.replace(old, **fields)
    if _bumps(old, new):
        new = dataclasses.replace(new, generation=old.generation + 1)
    observed = worker.observed
    if cause is Cause.START:  # the facts of the last engine are no facts of this one; its incarnation still fences
        observed = dataclasses.replace(observed, phase=None, exit=None, endpoint="", log_path="")
    return dataclasses.replace(worker, intent=new, observed=observed)


def _bumps(old: WorkerIntent, new: WorkerIntent) -> bool:
    if new.phase is Phase.LOST:
        return False
    return old.phase is Phase.LOST or order_of(old) != order_of(new)


def holds_slice(worker: Worker) -> bool:
    """Its GPUs are not to be given to another worker."""
    return bool(worker.intent.gpu_ids)


def id_order(worker_id: str) -> tuple[str, int, str]:
    """Sorts demo-2 before demo-10."""
    head, _, tail = worker_id.rpartition("-")
    return (head, int(tail), "") if tail.isdigit() else (worker_id, -1, tail)
