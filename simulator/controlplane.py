"""The modelled control plane process: the real plan, live view and hub between modelled sessions and a modelled store.

It looks as controlplane.loops.leader does: when something is news, and when its last plan said that time alone changes
the answer. A crash loses everything but the store.
"""

import asyncio
import math
from collections.abc import Callable, Iterable

from controlplane.core.plan import only_samples, plan
from controlplane.core.snapshot import NodeRules, Plan, Snapshot, Timing
from controlplane.live import Live
from controlplane.loops.hub import Hub
from controlplane.store.store import Compare, Records, kind_and_key
from simulator.agenda import Agenda
from simulator.network import Network
from simulator.store import ModelStore
from springtide.errors import Conflict, SpringtideError

_RETRY_S = 0.2
_LIVELOCK = 2000  # plans at one instant


class Livelock(AssertionError):
    """The leader never comes to rest at one instant."""


class Wake(asyncio.Event):
    """What the hub wakes its subscribers with, as a call on the agenda. Several wakes at one instant are one."""

    def __init__(self, agenda: Agenda, call: Callable[[], None]) -> None:
        super().__init__()
        self._agenda = agenda
        self._call = call
        self._due = False

    def set(self) -> None:
        if not self._due:
            self._due = True
            self._agenda.at(self._agenda.now, self._run)

    def _run(self) -> None:
        self._due = False
        self._call()


class ModelControlPlane:
    """One control plane. `on_commit(before, after, plan)` sees every commit that was applied."""

    def __init__(
        self,
        agenda: Agenda,
        network: Network,
        store: ModelStore,
        timing: Timing,
        on_commit: Callable[[Records, Records, Plan], None] = lambda before, after, made: None,
    ) -> None:
        self.agenda = agenda
        self.network = network
        self.store = store
        self.timing = timing
        self.rules = NodeRules()
        self.skew_s = 0.0
        self.up = False
        self.life = 0
        self.plans_total = 0
        self.on_commit = on_commit
        self.live = Live(timing.heartbeat_interval_s)
        self.hub = Hub()
        self.grace_until = 0.0
        self._look_at = math.inf
        self._busy = False
        self._kicked = False
        self._news = True
        self._last: tuple[Records, Plan] | None = None  # planned on, nothing to write
        self._plans_now = (0.0, 0)

    def now(self) -> float:
        """This process's clock."""
        return self.agenda.now + self.skew_s

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self.up = True
        self.life += 1
        self.live = Live(self.timing.heartbeat_interval_s)
        self.hub = Hub()
        self.grace_until = self.now() + self.timing.grace_s
        for pool in self.store.records.pools:
            last = self.store.last_decision(pool)
            self.live.decided([last] if last is not None else [])
        self._busy = False
        self._last = None
        self._look_at = math.inf
        self._look_soon(self.agenda.now)

    def crash(self) -> None:
        """Sessions end without a word; a commit under way may still land."""
        self.up = False
        self.life += 1

    # ------------------------------------------------------------ looks

    def kick(self, keys: str | Iterable[str]) -> None:
        if keys and self.up:
            self._news = True
            self._look_soon(self.agenda.now)

    def _look_soon(self, at: float) -> None:
        if at < self._look_at:
            self._look_at = max(at, self.agenda.now)
            self.agenda.at(self._look_at, self._look, self.life, self._look_at)

    def _look(self, life: int, due: float) -> None:
        if life != self.life or due != self._look_at:
            return
        self._look_at = math.inf
        if self._busy:
            self._kicked = True
            return
        self._kicked = False
        records, now = self.store.records, self.now()
        snapshot = self.snapshot(records)
        if not self._news and self._last is not None and self._last[0] is records:
            sampled = only_samples(snapshot, now, self._last[1])
            if sampled is not None:
                self._glance(snapshot, sampled, now)
                return
        self._news, self._last = False, None
        made = plan(snapshot, now)
        self._count_plan()
        self.live.sampled(made.samples)
        if not (made.writes or made.decisions or made.events):
            self._settle(made, now)
            return
        delay_s = self.store.delay_s()
        if delay_s:
            self._busy = True
            self.agenda.after(delay_s, self._commit_look, life, records, made, now)
        else:
            self._commit_look(life, records, made, now)

    def _glance(self, snapshot: Snapshot, made: Plan, now: float) -> None:
        self.live.sampled(made.samples)
        self.hub.publish(snapshot)
        self._look_soon((made.wake_at or now) - self.skew_s)

    def _commit_look(self, life: int, records: Records, made: Plan, now: float) -> None:
        try:
            self._commit(records, made)
        except Conflict:
            retry_s = 0.0
        except SpringtideError:
            retry_s = _RETRY_S
        else:
            if life == self.life:
                self._busy = False
                self._settle(made, now)
            return
        if life == self.life:
            self._busy = False
            self._look_soon(self.agenda.now + retry_s)

    def _settle(self, made: Plan, now: float) -> None:
        self.live.evaluated(made.evaluated, now)
        self.live.started(made.start_ups_s)
        records = self.store.records
        self.live.forget(records.pools, records.nodes)
        self.hub.publish(self.snapshot(records))
        if not made.writes:
            self._last = (records, made)
        if self._kicked:
            self._look_soon(self.agenda.now)
            return
        latest = now + self.timing.monitoring_interval_s
        wake_at = now if made.writes else min(made.wake_at if made.wake_at is not None else latest, latest)
        self._look_soon(wake_at - self.skew_s)

    def _commit(self, records: Records, made: Plan) -> None:
        compares = []
        for write in made.writes:
            kind, key = kind_and_key(write)
            compares.append(Compare(kind, key, records.revision_of(kind, key)))
        before = self.store.records
        try:
            kept = self.store.commit(compares, made.writes, made.decisions, made.events)
        finally:
            if self.store.records is not before:
                self.on_commit(before, self.store.records, made)
        self.live.decided(kept)

    def _count_plan(self) -> None:
        self.plans_total += 1
        at, count = self._plans_now
        self._plans_now = (self.agenda.now, count + 1 if at == self.agenda.now else 1)
        if self._plans_now[1] > _LIVELOCK:
            raise Livelock(f"{_LIVELOCK} plans at {self.agenda.now:.3f} s, and still not at rest")

    def snapshot(self, records: Records | None = None) -> Snapshot:
        """What is recorded and heard now."""
        found = records if records is not None else self.store.records
        return Snapshot(
            store_id=found.store_id,
            revision=found.revision,
            pools=found.pools,
            nodes=found.nodes,
            workers=found.workers,
            live=self.live.view(),
            timing=self.timing,
            grace_until=self.grace_until,
            rules=self.rules,
        )

    def execute(self, order: Callable[[Snapshot, float], Plan]) -> Plan:
        """An operator's order. Raises what the order and the store raise."""
        records = self.store.records
        made = order(self.snapshot(records), self.now())
        if made.writes or made.decisions or made.events:
            self._commit(records, made)
            self.kick("order")
        return made
