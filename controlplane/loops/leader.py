"""The leader: looks, plans, commits, publishes. The only committer of intents.

It looks when it is kicked with a key, and at the latest when its last plan said that time alone changes the answer.
A fault in a look is logged, counted and retried with back-off: the last committed state stays published, nothing dies.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controlplane.core.plan import only_samples, plan
from controlplane.core.snapshot import NodeRules, Plan, Snapshot, Timing
from controlplane.live import Live
from controlplane.loops.hub import Hub
from controlplane.store.store import Committed, Compare, Records, Store, Write, kind_and_key
from springtide.clock import Clock
from springtide.errors import Conflict, SpringtideError

log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 5.0
_BUSY_LOOKS = 100  # looks in a row that wrote something: from then on each waits a little
_BUSY_WAIT_S = 0.05
_ORDER_ATTEMPTS = 10
_UNHEALTHY_AFTER = 3  # looks in a row that failed


@dataclass(frozen=True, slots=True)
class Step:
    """One commit of the leader, for those who watch it: metrics and traces."""

    before: Records
    plan: Plan
    committed: Committed
    now: float


@dataclass(slots=True)
class LeaderStats:
    """Counters since the start. `store_error` is the last commit's, None when it succeeded."""

    looks: int = 0
    commits: int = 0
    conflicts: int = 0
    errors: int = 0
    failures: int = 0  # looks in a row that failed
    plan_seconds: float = 0.0
    last_look_at: float | None = None
    store_error: SpringtideError | None = None


class Leader:
    """Run `run()` in one task. `kick` may be called from anywhere on its loop."""

    def __init__(
        self,
        store: Store,
        live: Live,
        hub: Hub,
        clock: Clock,
        timing: Timing,
        on_step: Callable[[Step], None] = lambda step: None,
        rules: NodeRules | None = None,
    ) -> None:
        self.stats = LeaderStats()
        self.grace_until = clock.now() + timing.grace_s
        self._store = store
        self._live = live
        self._hub = hub
        self._clock = clock
        self._timing = timing
        self._rules = rules or NodeRules()
        self._on_step = on_step
        self._kicked = asyncio.Event()
        self._keys: set[str] = set()
        self._stopping = False
        self._awake_at = clock.now()
        self._quiet: tuple[str, int, Plan] | None = None  # store_id and revision last planned on, with nothing to write

    def kick(self, keys: str | Iterable[str]) -> None:
        """Something happened to these records; no keys, no look. Kicks during a look lead to one more."""
        wanted = {keys} if isinstance(keys, str) else set(keys)
        if wanted:
            self._keys |= wanted
            self._kicked.set()

    def stop(self) -> None:
        """`run` returns after the look under way."""
        self._stopping = True
        self._kicked.set()

    @property
    def healthy(self) -> bool:
        """Orders are taken and acted on: the store writes, and looks succeed."""
        return self.stats.store_error is None and self.stats.failures < _UNHEALTHY_AFTER

    def makes_progress(self) -> bool:
        """For the watchdog: looks still end, be it with an error."""
        last = self.stats.last_look_at
        return last is not None and self._clock.now() - last < 3 * self._timing.monitoring_interval_s + _BACKOFF_MAX_S

    async def run(self) -> None:
        """Until `stop`."""
        pulse = asyncio.create_task(self._pulse())
        try:
            await self._lead()
        finally:
            pulse.cancel()

    async def _lead(self) -> None:
        await self._recall_decisions()
        failures = busy = 0
        while not self._stopping:
            self._kicked.clear()
            news = bool(self._keys)
            if news:
                log.debug("looks because of %s", ", ".join(sorted(self._keys)))
            self._keys.clear()
            wake_at = self._clock.now()
            try:
                plan_made = (None if news else await self._glance()) or await self.look()
            except Conflict:
                self.stats.conflicts += 1
                busy += 1
            except Exception as error:  # noqa: BLE001 - the leader outlives any fault of one look
                failures += 1
                self.stats.failures = failures
                self._note_failure(error, failures)
                await self._keep_in_force()
                await self._pause(min(_BACKOFF_FIRST_S * 2 ** (failures - 1), _BACKOFF_MAX_S))
            else:
                self.stats.failures = failures = 0
                busy = busy + 1 if plan_made.writes else 0
                if not plan_made.writes:
                    wake_at = self._next_look(plan_made)
            self.stats.last_look_at = self._clock.now()
            if busy > _BUSY_LOOKS:
                await self._pause(_BUSY_WAIT_S)
            await self._sleep_until(wake_at)

    async def _pulse(self) -> None:
        """Notes that this process runs, often enough to tell its own standstill from the silence of others."""
        while True:
            self._note_awake()
            await asyncio.sleep(self._timing.suspect_after_s / 4)

    def _note_awake(self) -> None:
        """After a standstill (a paused machine, a stopped process) nobody has been heard because nobody was listening:
        no lease expires for one grace period, as after a start."""
        now = self._clock.now()
        if now - self._awake_at > self._timing.suspect_after_s:
            log.warning("this process stood still for %.1f s; no lease expires for now", now - self._awake_at)
            self.grace_until = max(self.grace_until, now + self._timing.grace_s)
        self._awake_at = now

    async def _recall_decisions(self) -> None:
        """A decision that stood before the start still stands: it is counted on, not written again. Signals are not
        recalled: they start unknown."""
        for pool in (await self._store.snapshot()).pools:
            try:
                self._live.decided(await self._store.decisions(pool, 1))
            except Exception as error:  # noqa: BLE001 - worth a second row, not the leader
                log.warning("the last decision of %s is not known: %s", pool, error)

    async def _glance(self) -> Plan | None:
        """A look that only samples loads, where nothing else can have come up since the last one; else None."""
        records = await self._store.snapshot()
        if self._quiet is None or self._quiet[:2] != (records.store_id, records.revision):
            return None
        self._note_awake()
        now, snapshot = self._clock.now(), self._snapshot(records)
        made = only_samples(snapshot, now, self._quiet[2])
        if made is None:
            return None
        self.stats.looks += 1
        self._live.sampled(made.samples)
        self._hub.publish(snapshot)
        return made

    async def look(self) -> Plan:
        """One look: plan, commit, publish. Raises Conflict when another writer was first, and what the store raises."""
        self._quiet = None
        records = await self._store.snapshot()
        self._note_awake()
        now = self._clock.now()
        started = time.perf_counter()
        made = plan(self._snapshot(records), now)
        self.stats.plan_seconds += time.perf_counter() - started
        self.stats.looks += 1
        self._live.sampled(made.samples)
        for text in made.notes:
            log.debug("%s", text)
        after = records
        probing = self.stats.store_error is not None  # an empty commit tells whether the store writes again
        if made.writes or made.decisions or made.events or probing:
            committed = await self._commit(records, made)
            after = await self._store.snapshot()
            self._live.decided(committed.decisions)
            self._on_step(Step(records, made, committed, now))
        self._live.evaluated(made.evaluated, now)
        self._live.started(made.start_ups_s)
        self._live.forget(after.pools, after.nodes)
        owners = {node.provided.provisioner_id for node in after.nodes.values() if node.provided is not None}
        self._live.provisioners.forget(owners, now)
        self._hub.publish(self._snapshot(after))
        if not made.writes and self.stats.store_error is None:
            self._quiet = (after.store_id, after.revision, made)
        return made

    async def _keep_in_force(self) -> None:
        """A look that fails does not leave agents and routers without an answer: what is recorded is published."""
        try:
            self._hub.publish(await self.snapshot())
        except Exception:
            log.exception("what is recorded cannot be published")

    async def execute(self, order: Callable[[Snapshot, float], Plan]) -> tuple[Plan, Snapshot]:
        """Commits an operator's order (a pure function of controlplane.core.orders) and returns it with what is
        recorded after it. Planned again when another writer was first. Raises what the order and the store raise.
        """
        for attempt in range(_ORDER_ATTEMPTS):
            records = await self._store.snapshot()
            now = self._clock.now()
            made = order(self._snapshot(records), now)
            if not (made.writes or made.decisions or made.events):
                return made, self._snapshot(records)
            try:
                committed = await self._commit(records, made)
            except Conflict:
                if attempt + 1 == _ORDER_ATTEMPTS:
                    raise
                continue
            self._on_step(Step(records, made, committed, now))
            self.kick({"/".join(kind_and_key(write)) for write in made.writes} or {"order"})
            return made, self._snapshot(await self._store.snapshot())
        raise AssertionError("unreachable")

    async def snapshot(self) -> Snapshot:
        """What is recorded and heard now."""
        return self._snapshot(await self._store.snapshot())

    async def _commit(self, records: Records, made: Plan) -> Committed:
        try:
            committed = await self._store.commit(
                compares_of(records, made.writes), made.writes, made.decisions, made.events
            )
        except Conflict:
            raise
        except SpringtideError as error:
            self.stats.store_error = error
            self.kick("store")
            raise
        self.stats.store_error = None
        self.stats.commits += 1
        return committed

    def _snapshot(self, records: Records) -> Snapshot:
        return Snapshot(
            store_id=records.store_id,
            revision=records.revision,
            pools=records.pools,
            nodes=records.nodes,
            workers=records.workers,
            live=self._live.view(),
            timing=self._timing,
            grace_until=self.grace_until,
            rules=self._rules,
        )

    def _next_look(self, made: Plan) -> float:
        latest = self._clock.now() + self._timing.monitoring_interval_s
        return latest if made.wake_at is None else min(made.wake_at, latest)

    def _note_failure(self, error: Exception, failures: int) -> None:
        self.stats.errors += 1
        expected = isinstance(error, SpringtideError) and error is self.stats.store_error
        if failures == 1 or failures % 20 == 0:
            log.error(
                "a look failed (%d in a row): %s; the last committed state stays in force",
                failures,
                error,
                exc_info=None if expected else error,
            )

    async def _pause(self, seconds: float) -> None:
        """Not shortened by kicks, only by `stop`."""
        deadline = self._clock.now() + seconds
        while not self._stopping and (left := deadline - self._clock.now()) > 0:
            await asyncio.sleep(min(left, 0.1))

    async def _sleep_until(self, wake_at: float) -> None:
        left = wake_at - self._clock.now()
        if left <= 0 or self._kicked.is_set():
            await asyncio.sleep(0)  # let sessions take what was published
            return
        try:
            async with asyncio.timeout(left):
                await self._kicked.wait()
        except TimeoutError:
            pass


def compares_of(records: Records, writes: Iterable[Write]) -> list[Compare]:
    """What a commit of `writes` planned on `records` must find unmoved."""
    found = []
    for write in writes:
        kind, key = kind_and_key(write)
        found.append(Compare(kind, key, records.revision_of(kind, key)))
    return found
