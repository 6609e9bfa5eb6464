"""A pool's requests by the labels that they ask for: what waits, what was refused and still counts, what runs.

Requests without labels cost nothing here: they are what is left of the pool's totals when a report is made.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from router.core.ticket import Ticket
from springtide.model.routing import MOST_NEEDS, NeedReport

Labels = tuple[tuple[str, str], ...]
_MOST_MISSED = 1024


@dataclass(slots=True)
class Asked:
    """Of one pool."""

    running: dict[Labels, int] = field(default_factory=dict)
    """At workers, those that have left the table included."""
    _missed: deque[tuple[float, Labels]] = field(default_factory=lambda: deque(maxlen=_MOST_MISSED))

    def entered(self, labels: Labels) -> None:
        """A request that asks for labels went to a worker."""
        if labels:
            self.running[labels] = self.running.get(labels, 0) + 1

    def left(self, labels: Labels) -> None:
        """Its attempt ended."""
        count = self.running.get(labels, 0) - 1
        if count > 0:
            self.running[labels] = count
        else:
            self.running.pop(labels, None)

    def missed(self, labels: Labels, until: float) -> None:
        """Refused since no worker has the labels: demand for a worker that has them until it may come back."""
        self._missed.append((until, labels))

    def report(
        self, held: Collection[Ticket], rejected: Iterable[Labels], running: int, now: float
    ) -> tuple[NeedReport, ...]:
        """Everything by labels, the most wanted first; beyond the bound the rest counts as what asks for nothing."""
        while self._missed and self._missed[0][0] <= now:
            self._missed.popleft()
        waiting: dict[Labels, int] = {}
        for labels in (*(ticket.want.needs.labels for ticket in held), *rejected, *(miss for _, miss in self._missed)):
            waiting[labels] = waiting.get(labels, 0) + 1
        at_workers = {**self.running, (): max(0, running - sum(self.running.values()))}
        found = [
            NeedReport(labels, waiting.get(labels, 0), at_workers.get(labels, 0))
            for labels in {**waiting, **at_workers}
            if waiting.get(labels) or at_workers.get(labels)
        ]
        if len(found) <= MOST_NEEDS:
            return tuple(found)
        found.sort(key=lambda need: -need.tasks if need.labels else 1)
        kept, rest = found[: MOST_NEEDS - 1], found[MOST_NEEDS - 1 :]
        joined = NeedReport((), sum(need.waiting for need in rest), sum(need.running for need in rest))
        return (joined, *kept)
