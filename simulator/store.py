"""The modelled store: the real comparisons on the real image; commits may be slow, fail, or succeed unseen."""

import dataclasses
import random
from collections.abc import Sequence

from controlplane.store.image import Image
from controlplane.store.store import Change, Compare, Records, Write
from springtide.errors import Unavailable
from springtide.model.record import Decision, Event


class ModelStore:
    """One store. `slow_s` is the longest time that a commit takes; `fail` and `unseen` are probabilities."""

    def __init__(self, store_id: str, rng: random.Random) -> None:
        self.rng = rng
        self.slow_s = 0.0
        self.fail = 0.0
        self.unseen = 0.0
        self.decisions: dict[int, Decision] = {}
        self.events: list[Event] = []
        self._image = Image(Records(store_id=store_id), changes_kept=1)

    @property
    def records(self) -> Records:
        return self._image.records

    def delay_s(self) -> float:
        """How long the next commit takes."""
        return self.rng.random() * self.slow_s if self.slow_s else 0.0

    def commit(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write],
        decisions: Sequence[Decision],
        events: Sequence[Event],
    ) -> tuple[Decision, ...]:
        """The decisions as kept. Raises Conflict, and Unavailable when it failed or when nobody can say."""
        if self.fail and self.rng.random() < self.fail:
            raise Unavailable("the store does not answer.", reason="STORE_UNAVAILABLE")
        self._image.compare(compares)
        revision = self.records.revision + 1
        numbered = tuple(
            dataclasses.replace(event, event_id=len(self.events) + at + 1, revision=revision)
            for at, event in enumerate(events)
        )
        self.events.extend(numbered)
        kept = tuple(self._keep(decision, revision) for decision in decisions)
        self._image.apply(Change(revision, self._image.stamped(writes, revision), numbered))
        if self.unseen and self.rng.random() < self.unseen:
            raise Unavailable("the store did not answer in time.", reason="STORE_UNAVAILABLE")
        return kept

    def last_decision(self, pool: str) -> Decision | None:
        return next((self.decisions[key] for key in reversed(self.decisions) if self.decisions[key].pool == pool), None)

    def _keep(self, decision: Decision, revision: int) -> Decision:
        number = decision.decision_id or len(self.decisions) + 1
        kept = dataclasses.replace(decision, decision_id=number, revision=revision)
        self.decisions[number] = kept
        return kept
