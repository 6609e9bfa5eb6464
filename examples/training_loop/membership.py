"""Who may be used in the next step. Pure: what is listed in, what changed out.

The set is looked at between steps only, so that a step sees one set from its beginning to its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Member:
    """One engine start. A worker that was replaced under the same id is another member."""

    worker_id: str
    incarnation: int
    node_id: str = ""
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    joined: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()


@dataclass
class Membership:
    """Numbers actors in the order in which they joined; a number is never given twice."""

    actors: dict[Member, int] = field(default_factory=dict)
    ever: int = 0

    def at_step(self, listed: Iterable[Member]) -> Change:
        """Takes over what is there now."""
        now = set(listed)
        left = tuple(sorted((m for m in self.actors if m not in now), key=lambda m: self.actors[m]))
        joined = tuple(sorted(now - self.actors.keys(), key=lambda m: (m.worker_id, m.incarnation)))
        for member in left:
            del self.actors[member]
        for member in joined:
            self.actors[member] = self.ever
            self.ever += 1
        return Change(joined, left)

    def actor_of(self, worker_id: str, incarnation: int) -> int | None:
        """None: it came after the step began, or is gone."""
        found = (n for m, n in self.actors.items() if (m.worker_id, m.incarnation) == (worker_id, incarnation))
        return next(found, None)
