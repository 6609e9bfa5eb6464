"""The records of a store in memory, and the last changes: what stores with one writer share."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from controlplane.core.snapshot import Delete, Put
from controlplane.store.store import CHANGES_KEPT, Change, Compacted, Compare, Record, Records, Write, kind_and_key
from springtide.errors import Conflict


class Image:
    """Immutable records that are replaced as a whole by each commit; readers never see half of one."""

    def __init__(self, records: Records, changes_kept: int = CHANGES_KEPT) -> None:
        self.records = records
        self._changes: deque[Change] = deque(maxlen=changes_kept)
        self._moved = asyncio.Event()

    def compare(self, compares: Sequence[Compare]) -> None:
        """Raises Conflict naming the first record that has moved."""
        for compare in compares:
            found = self.records.revision_of(compare.kind, compare.key)
            if found != compare.revision:
                raise Conflict(
                    f"{compare.kind} {compare.key!r} is at revision {found}, not {compare.revision}: "
                    "another writer was first.",
                    field=f"{compare.kind}.revision",
                    value=compare.revision,
                    remedy="Read it again and retry.",
                )

    def stamped(self, writes: Sequence[Write], revision: int) -> tuple[Write, ...]:
        """The writes with the commit's revision in their records."""
        return tuple(
            write if isinstance(write, Delete) else Put(dataclasses.replace(write.record, revision=revision))
            for write in writes
        )

    def apply(self, change: Change) -> None:
        """Takes a commit over that is durable; its writes are stamped."""
        parts: dict[str, dict[str, Record]] = {}
        for write in change.writes:
            kind, key = kind_and_key(write)
            part = parts.setdefault(kind, dict(self.records.of_kind(kind)))
            if isinstance(write, Delete):
                part.pop(key, None)
            else:
                part[key] = write.record
        replaced: dict[str, Any] = {f"{kind}s": part for kind, part in parts.items()}
        self.records = dataclasses.replace(self.records, revision=change.revision, **replaced)
        self._changes.append(change)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def watch(self, after_revision: int) -> AsyncIterator[Change]:
        """Raises Compacted when a change after `after_revision` is not kept any more, or lies in the future."""
        position = after_revision
        while True:
            moved = self._moved
            pending = self._after(position)
            for change in pending:
                yield change
                position = change.revision
            if not pending:
                await moved.wait()

    def _after(self, revision: int) -> list[Change]:
        current = self.records.revision
        if revision == current:
            return []
        oldest = self._changes[0].revision if self._changes else current + 1
        if revision > current or revision < oldest - 1:
            raise Compacted(f"changes after revision {revision} are not kept; the store is at {current}")
        return [change for change in self._changes if change.revision > revision]
