"""What every store does: records at one revision, atomic commits that compare, changes to watch, bounded history.

A revision is one commit. A commit compares the revisions of records (0: there is none) and is refused as a whole with
Conflict when one of them has moved; otherwise all of it is written, or none. Revisions compare within one `store_id`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from controlplane.core.snapshot import Delete, Put
from springtide.errors import Exhausted
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.record import Decision, Event
from springtide.model.worker import Worker

Record = Pool | Node | Worker
Write = Put | Delete

MAX_OPERATIONS = 100  # writes, decisions and events of one commit; as many compares
DECISIONS_KEPT = 20_000
EVENTS_KEPT = 100_000
CHANGES_KEPT = 1_000  # commits that a watch can resume from


@dataclass(frozen=True, slots=True)
class Records:
    """All records at one revision. The mappings are never changed after they were handed out."""

    store_id: str
    revision: int = 0
    pools: Mapping[str, Pool] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    workers: Mapping[str, Worker] = field(default_factory=dict)

    def revision_of(self, kind: str, key: str) -> int:
        """Last commit that changed the record; 0: there is none."""
        found = self.of_kind(kind).get(key)
        return found.revision if found is not None else 0

    def of_kind(self, kind: str) -> Mapping[str, Record]:
        if kind == "pool":
            return self.pools
        return self.nodes if kind == "node" else self.workers


@dataclass(frozen=True, slots=True)
class Compare:
    """The commit holds only if the record is still at `revision`; 0: does not exist."""

    kind: str  # "pool", "node" or "worker"
    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit made: its revision, and the decisions and events with their ids."""

    revision: int
    decisions: tuple[Decision, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """One commit as a watch shows it."""

    revision: int
    writes: tuple[Write, ...] = ()
    events: tuple[Event, ...] = ()


class Compacted(Exception):
    """The changes after that revision are no longer kept: take a new snapshot and watch from its revision."""


class Store(Protocol):
    """All methods may raise Unavailable (full disk, locked file; nothing was written) or Internal (damaged)."""

    async def open(self) -> str:
        """Opens, creating what is not there. Returns the store id, random at creation."""
        ...

    async def close(self) -> None: ...

    async def snapshot(self) -> Records: ...

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        writes: Sequence[Write] = (),
        decisions: Sequence[Decision] = (),
        events: Sequence[Event] = (),
    ) -> Committed:
        """All or nothing. Raises Conflict when a compared record has moved, Exhausted for more than MAX_OPERATIONS.

        A decision with an id replaces that one; ids are given to the others and to events, ascending, never again.
        """
        ...

    def watch(self, after_revision: int) -> AsyncIterator[Change]:
        """Every commit after `after_revision`, in order, for ever. Raises Compacted when the first is not kept."""
        ...

    async def decisions(self, pool: str = "", limit: int = 100, skip_holds: bool = False) -> tuple[Decision, ...]:
        """Newest first."""
        ...

    async def events(self, pool: str = "", limit: int = 1000, after_event_id: int = 0) -> tuple[Event, ...]:
        """The newest `limit`, oldest first."""
        ...


def kind_and_key(write: Write) -> tuple[str, str]:
    """Which record a write is about."""
    if isinstance(write, Delete):
        return write.kind, write.key
    return kind_of(write.record), key_of(write.record)


def kind_of(record: Record) -> str:
    if isinstance(record, Pool):
        return "pool"
    return "node" if isinstance(record, Node) else "worker"


def key_of(record: Record) -> str:
    if isinstance(record, Pool):
        return record.name
    return record.node_id if isinstance(record, Node) else record.worker_id


def check_size(compares: Sequence[object], *written: Sequence[object]) -> None:
    """Raises Exhausted for a commit that is too large for every store."""
    operations = sum(len(part) for part in written)
    if max(operations, len(compares)) > MAX_OPERATIONS:
        raise Exhausted(
            f"a commit of {operations} operations and {len(compares)} compares is more than {MAX_OPERATIONS}.",
            reason="COMMIT_TOO_LARGE",
            remedy="Commit in smaller parts.",
        )
