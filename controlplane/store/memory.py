"""A store that forgets everything when its process ends: for tests and for trying out."""

import dataclasses
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence

from controlplane.store.image import Image
from controlplane.store.store import (
    CHANGES_KEPT,
    DECISIONS_KEPT,
    EVENTS_KEPT,
    Change,
    Committed,
    Compare,
    Records,
    Write,
    check_size,
)
from springtide.model.enums import DecisionResult
from springtide.model.record import Decision, Event


class MemoryStore:
    """Implements Store."""

    def __init__(
        self, decisions_kept: int = DECISIONS_KEPT, events_kept: int = EVENTS_KEPT, changes_kept: int = CHANGES_KEPT
    ) -> None:
        self._image = Image(Records(store_id=secrets.token_hex(8)), changes_kept)
        self._decisions: dict[int, Decision] = {}
        self._decisions_kept = decisions_kept
        self._events: deque[Event] = deque(maxlen=events_kept)
        self._last_decision_id = 0
        self._last_event_id = 0

    async def open(self) -> str:
        return self._image.records.store_id

    async def close(self) -> None:
        return None

    async def snapshot(self) -> Records:
        return self._image.records

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        writes: Sequence[Write] = (),
        decisions: Sequence[Decision] = (),
        events: Sequence[Event] = (),
    ) -> Committed:
        check_size(compares, writes, decisions, events)
        self._image.compare(compares)
        revision = self._image.records.revision + 1
        numbered = tuple(self._number_event(event, revision) for event in events)
        kept = tuple(self._keep_decision(decision, revision) for decision in decisions)
        self._events.extend(numbered)
        self._image.apply(Change(revision, self._image.stamped(writes, revision), numbered))
        return Committed(revision, kept, numbered)

    def watch(self, after_revision: int) -> AsyncIterator[Change]:
        return self._image.watch(after_revision)

    async def decisions(self, pool: str = "", limit: int = 100, skip_holds: bool = False) -> tuple[Decision, ...]:
        found = [
            decision
            for _, decision in sorted(self._decisions.items(), reverse=True)
            if pool in ("", decision.pool) and not (skip_holds and decision.result is DecisionResult.HOLD)
        ]
        return tuple(found[:limit])

    async def events(self, pool: str = "", limit: int = 1000, after_event_id: int = 0) -> tuple[Event, ...]:
        found = [event for event in self._events if pool in ("", event.pool) and event.event_id > after_event_id]
        return tuple(found[-limit:])

    def _number_event(self, event: Event, revision: int) -> Event:
        self._last_event_id += 1
        return dataclasses.replace(event, event_id=self._last_event_id, revision=revision)

    def _keep_decision(self, decision: Decision, revision: int) -> Decision:
        if decision.decision_id == 0:
            self._last_decision_id += 1
            decision = dataclasses.replace(decision, decision_id=self._last_decision_id)
        decision = dataclasses.replace(decision, revision=revision)
        self._decisions[decision.decision_id] = decision
        while len(self._decisions) > self._decisions_kept:
            del self._decisions[next(iter(self._decisions))]
        return decision
