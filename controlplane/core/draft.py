"""The working copy of one plan: the records as the plan leaves them, and what it says about them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from controlplane.core.measured import start_ups
from controlplane.core.nodes.slots import Room
from controlplane.core.snapshot import Delete, LiveView, LoadSample, NodeLive, Plan, Put, Snapshot
from controlplane.core.tracing import trace_id_of
from controlplane.core.worker import Cause, id_order, step
from springtide.model.enums import State
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.record import Decision, Event
from springtide.model.worker import Worker, WorkerReport

MAX_OPERATIONS = 100  # of one commit: etcd's default limit is 128, comparisons and the leader's key need their share
_HEADROOM = 12  # no unit of work (one worker, or one start of a pool with its pool, events and decision) takes more


class Draft:
    """Mutable, lives for one call of `plan`. Every change goes through it, so that the batch stays bounded."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self.snapshot = snapshot
        self.now = now
        self.timing = snapshot.timing
        self.pools: dict[str, Pool] = dict(snapshot.pools)
        self.nodes: dict[str, Node] = dict(snapshot.nodes)
        self.workers: dict[str, Worker] = dict(snapshot.workers)
        self.events: list[Event] = []
        self.decisions: list[Decision] = []
        self.samples: dict[str, LoadSample] = {}
        self.evaluated: list[str] = []
        self.notes: list[str] = []
        self.preferences: dict[str, Callable[[Node], int]] = {}  # by pool: which nodes its next start should go to
        self._changed: dict[tuple[str, str], None] = {}  # ordered set
        self.was_full = False  # something was left for the next plan
        self.rooms: list[Room] | None = None  # room on coming nodes, see nodes.acquire
        self.offers: list[Any] | None = None  # what provisioners could give, see nodes.offers
        self.needed: set[str] = set()  # nodes that are kept although nothing is on them
        self.requested = 0  # units of nodes that this plan asks for
        self.awaited: dict[str, int] = {}  # by pool: workers that have a node coming
        self._wakes: list[float] = []
        self._silences_s: dict[str, float] = {}  # by node, see `wake_when_silent`
        self._silent_since: dict[str, float] = {}
        self.sample_at: float | None = None  # the next look at loads, which alone is no reason for a plan
        self._again = False
        self._ids_by_pool: dict[str, list[str]] = {}
        for worker_id in sorted(self.workers, key=id_order):
            self._ids_by_pool.setdefault(self.workers[worker_id].pool, []).append(worker_id)

    # -------------------------------------------------------------- reading

    def workers_of(self, pool: str) -> list[Worker]:
        """In id order."""
        return [self.workers[worker_id] for worker_id in self._ids_by_pool.get(pool, ()) if worker_id in self.workers]

    def live(self, node_id: str) -> NodeLive | None:
        return self.snapshot.live.nodes.get(node_id)

    def report_of(self, worker: Worker) -> WorkerReport | None:
        """What its node last said of it, if that was about our worker."""
        return report_of(self.snapshot, worker)

    def count(self, pool: str, *states: State) -> int:
        """Without starts that are to end asleep: these are no coming capacity."""
        return sum(1 for worker in self.workers_of(pool) if worker.state in states and not worker.intent.spare)

    @property
    def full(self) -> bool:
        """The batch has no room for another unit of work. Asking when it is full makes the plan wake at once."""
        if len(self._changed) + len(self.events) + len(self.decisions) <= MAX_OPERATIONS - _HEADROOM:
            return False  # asked many times in every plan
        return self.lacks_room(_HEADROOM)

    def lacks_room(self, operations: int) -> bool:
        """So many do not fit any more. Asking when they do not makes the plan wake at once."""
        room = MAX_OPERATIONS - len(self._changed) - len(self.events) - len(self.decisions)
        if room < operations:
            self._again = self.was_full = True
        return room < operations

    # -------------------------------------------------------------- changing

    def put(self, record: Pool | Node | Worker) -> None:
        """Replaces a record; one that equals what the store has is no write."""
        if isinstance(record, Worker):
            if record.worker_id not in self.workers:
                self._ids_by_pool.setdefault(record.pool, []).append(record.worker_id)
            self.workers[record.worker_id] = record
            self._mark("worker", record.worker_id, self.snapshot.workers.get(record.worker_id) == record)
        elif isinstance(record, Pool):
            self.pools[record.name] = record
            self._mark("pool", record.name, self.snapshot.pools.get(record.name) == record)
        else:
            self.nodes[record.node_id] = record
            self.offers = None
            self._mark("node", record.node_id, self.snapshot.nodes.get(record.node_id) == record)

    def delete(self, record: Pool | Node | Worker) -> None:
        if isinstance(record, Worker):
            del self.workers[record.worker_id]
            self._mark("worker", record.worker_id, record.worker_id not in self.snapshot.workers)
        elif isinstance(record, Node):
            del self.nodes[record.node_id]
            self._mark("node", record.node_id, record.node_id not in self.snapshot.nodes)
        else:
            del self.pools[record.name]
            self._mark("pool", record.name, record.name not in self.snapshot.pools)

    def step(self, worker: Worker, cause: Cause, *, reason: str = "", message: str = "", **intent: Any) -> Worker:
        """Moves a worker and keeps it."""
        moved = step(worker, cause, self.now, reason=reason, message=message, **intent)
        self.put(moved)
        return moved

    def set_intent(self, worker: Worker, **fields: Any) -> Worker:
        """Changes intent fields that say nothing to the node and move nothing."""
        changed = dataclasses.replace(worker, intent=dataclasses.replace(worker.intent, **fields))
        self.put(changed)
        return changed

    def pool_intent(self, pool: Pool, **fields: Any) -> Pool:
        changed = dataclasses.replace(pool, intent=dataclasses.replace(pool.intent, **fields))
        self.put(changed)
        return changed

    def worker_event(self, worker: Worker, action: str, status: str, reason: str = "", message: str = "") -> None:
        self.events.append(
            Event(
                at=self.now,
                action=action,
                target=worker.worker_id,
                status=status,
                pool=worker.pool,
                node_id=worker.intent.node_id,
                reason=reason or worker.intent.reason,
                message=message or worker.intent.message,
                trace_id=trace_id_of(worker.intent.traceparent),
            )
        )

    def wake(self, at: float | None) -> None:
        """Time alone may change the answer at `at`. What is due already has been done, or waits for news, not for
        time."""
        if at is not None and at > self.now:
            self._wakes.append(at)

    def wake_when_silent(self, node_id: str, seconds: float) -> None:
        """As `wake`, so long after the last word of a node that was heard: a time that moves on with each."""
        live = self.live(node_id)
        if live is not None and live.last_heard_at + seconds > self.now:
            self._silences_s[node_id] = min(seconds, self._silences_s.get(node_id, seconds))

    def wake_when_heard(self, node_id: str) -> None:
        """The next word of a node that is silent now may change the answer, whatever it says."""
        live = self.live(node_id)
        if live is not None:
            self._silent_since[node_id] = live.last_heard_at

    def again(self) -> None:
        """The next step depends on nothing but this plan's commit."""
        self._again = True

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_OPERATIONS:
            self.notes.append(text)

    # -------------------------------------------------------------- the answer

    def plan(self) -> Plan:
        writes = tuple(self._write(kind, key) for kind, key in self._changed)
        quiet_until = min([*self._wakes, self.now + self.timing.monitoring_interval_s])
        soonest = min(quiet_until, silence_at(self._silences_s, self._silent_since, self.snapshot.live))
        soonest = soonest if self.sample_at is None else min(soonest, self.sample_at)
        again = self._again and bool(writes or self.decisions or self.events)
        return Plan(
            writes=writes,
            decisions=tuple(self.decisions),
            events=tuple(self.events),
            samples=dict(self.samples),
            evaluated=tuple(self.evaluated),
            start_ups_s=start_ups(self.snapshot.workers, self.workers, self.now),
            wake_at=self.now if again else soonest,
            quiet_until=self.now if again else quiet_until,
            silences_s=self._silences_s,
            silent_since=self._silent_since,
            notes=tuple(self.notes),
        )

    def _write(self, kind: str, key: str) -> Put | Delete:
        record: Pool | Node | Worker | None
        if kind == "worker":
            record = self.workers.get(key)
        elif kind == "pool":
            record = self.pools.get(key)
        else:
            record = self.nodes.get(key)
        return Delete(kind, key) if record is None else Put(record)

    def _mark(self, kind: str, key: str, unchanged: bool) -> None:
        if unchanged:
            self._changed.pop((kind, key), None)
        else:
            self._changed[(kind, key)] = None


def silence_at(silences_s: Mapping[str, float], silent_since: Mapping[str, float], live: LiveView) -> float:
    """When one of these nodes will have been silent for too long, as it is heard now: for ever ago where one that was
    silent has been heard since."""
    soonest = math.inf
    for node_id, seconds in silences_s.items():
        node = live.nodes.get(node_id)
        soonest = min(soonest, node.last_heard_at + seconds if node is not None else -math.inf)
    for node_id, since in silent_since.items():
        node = live.nodes.get(node_id)
        if node is None or node.last_heard_at > since:
            return -math.inf
    return soonest


def report_of(snapshot: Snapshot, worker: Worker) -> WorkerReport | None:
    """What the worker's node last said of it; None when it said nothing, or spoke of another store's worker."""
    live = snapshot.live.nodes.get(worker.intent.node_id)
    report = live.reports.get(worker.worker_id) if live is not None else None
    return report if report is not None and report.store_id == snapshot.store_id else None
