"""The default store: one sqlite file in WAL mode with full synchronisation, written by one thread of one process.

Records are mirrored in memory (`Image`), so that a snapshot costs nothing; a commit is durable before the mirror shows
it.
"""

import asyncio
import dataclasses
import json
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from controlplane.core.snapshot import Delete
from controlplane.store.image import Image
from controlplane.store.lock import DataDirLock
from controlplane.store.schema import migrate
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
    key_of,
    kind_and_key,
)
from springtide.errors import FailedPrecondition, Internal, SpringtideError, Unavailable
from springtide.model.codec import from_plain, to_plain
from springtide.model.enums import DecisionResult
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.record import Decision, Event
from springtide.model.worker import Worker

T = TypeVar("T")
_TYPES: dict[str, type[Pool] | type[Node] | type[Worker]] = {"pool": Pool, "node": Node, "worker": Worker}
_PRUNE_EVERY = 256  # commits between two looks at the length of the history


class SqliteStore:
    """Implements Store on `<data_dir>/controlplane.sqlite`."""

    def __init__(
        self,
        data_dir: Path,
        decisions_kept: int = DECISIONS_KEPT,
        events_kept: int = EVENTS_KEPT,
        changes_kept: int = CHANGES_KEPT,
    ) -> None:
        self.path = data_dir / "controlplane.sqlite"
        self._lock = DataDirLock(data_dir)
        self._kept = {"decision": decisions_kept, "event": events_kept}
        self._changes_kept = changes_kept
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._turn = asyncio.Lock()
        self._connection: sqlite3.Connection | None = None
        self._image: Image | None = None
        self._running: set[asyncio.Task[Committed]] = set()

    async def open(self) -> str:
        """Raises FailedPrecondition when another control plane has the folder, Internal when the file is damaged."""
        self._lock.acquire()
        try:
            records = await self._in_thread(self._load)
        except BaseException:
            self._lock.release()
            raise
        self._image = Image(records, self._changes_kept)
        return records.store_id

    async def close(self) -> None:
        """Waits for commits under way."""
        if self._running:
            await asyncio.wait(self._running)
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._in_thread(connection.close)
        self._writer.shutdown(wait=True)
        self._lock.release()

    async def snapshot(self) -> Records:
        return self._opened.records

    def watch(self, after_revision: int) -> AsyncIterator[Change]:
        return self._opened.watch(after_revision)

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        writes: Sequence[Write] = (),
        decisions: Sequence[Decision] = (),
        events: Sequence[Event] = (),
    ) -> Committed:
        check_size(compares, writes, decisions, events)
        # A task of its own: a caller that is cancelled must not leave the mirror behind the file.
        task = asyncio.create_task(self._commit(compares, writes, decisions, events))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def decisions(self, pool: str = "", limit: int = 100, skip_holds: bool = False) -> tuple[Decision, ...]:
        where = "(? = '' OR pool = ?) AND NOT (? AND hold)"
        query = f"SELECT value FROM decision WHERE {where} ORDER BY id DESC LIMIT ?"
        return tuple(await self._in_thread(self._read, Decision, query, (pool, pool, int(skip_holds), limit)))

    async def events(self, pool: str = "", limit: int = 1000, after_event_id: int = 0) -> tuple[Event, ...]:
        query = "SELECT value FROM event WHERE id > ? AND (? = '' OR pool = ?) ORDER BY id DESC LIMIT ?"
        return tuple(reversed(await self._in_thread(self._read, Event, query, (after_event_id, pool, pool, limit))))

    # ------------------------------------------------------------------ on the loop

    @property
    def _opened(self) -> Image:
        if self._image is None:
            raise FailedPrecondition("the store is not open.", reason="STORE_NOT_OPEN")
        return self._image

    async def _commit(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write],
        decisions: Sequence[Decision],
        events: Sequence[Event],
    ) -> Committed:
        image = self._opened
        async with self._turn:
            image.compare(compares)
            revision = image.records.revision + 1
            stamped = image.stamped(writes, revision)
            committed = await self._in_thread(self._write, revision, stamped, decisions, events)
            image.apply(Change(revision, stamped, committed.events))
            return committed

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)
        except sqlite3.Error as error:
            raise explain(error, str(self.path)) from error

    # ------------------------------------------------------------------ in the writer's thread

    def _load(self) -> Records:
        connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(f"malformed: {damage}")
            migrate(connection, str(self.path))
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('store_id', ?)", (secrets.token_hex(8),))
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('revision', '0')")
            connection.execute("COMMIT")
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            found: dict[str, dict[str, Any]] = {kind: {} for kind in _TYPES}
            for kind, value in connection.execute("SELECT kind, value FROM record ORDER BY kind, key"):
                record = from_plain(_TYPES[kind], json.loads(value))
                found[kind][key_of(record)] = record
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return Records(meta["store_id"], int(meta["revision"]), found["pool"], found["node"], found["worker"])

    def _read(self, cls: type[T], query: str, arguments: tuple[Any, ...]) -> list[T]:
        """Rows of one column as records. Thousands of them are decoded here, not on the loop."""
        assert self._connection is not None
        return [from_plain(cls, json.loads(value)) for (value,) in self._connection.execute(query, arguments)]

    def _write(
        self, revision: int, writes: Sequence[Write], decisions: Sequence[Decision], events: Sequence[Event]
    ) -> Committed:
        connection = self._connection
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'revision'", (str(revision),))
            for write in writes:
                _write_record(connection, write, revision)
            kept = tuple(_write_decision(connection, decision, revision) for decision in decisions)
            numbered = tuple(_write_event(connection, event, revision) for event in events)
            if revision % _PRUNE_EVERY == 0:
                self._prune(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.rollback()
            raise
        return Committed(revision, kept, numbered)

    def _prune(self, connection: sqlite3.Connection) -> None:
        for table, kept in self._kept.items():
            oldest = connection.execute(f"SELECT id FROM {table} ORDER BY id DESC LIMIT 1 OFFSET ?", (kept,))
            row = oldest.fetchone()
            if row is not None:
                connection.execute(f"DELETE FROM {table} WHERE id <= ?", row)


def explain(error: sqlite3.Error, path: str) -> SpringtideError:
    """What went wrong with the file, and what to do."""
    text = str(error).lower()
    if "full" in text:
        return Unavailable(
            f"{path}: the disk is full; nothing of the commit was written.",
            reason="STORE_FULL",
            remedy="Free space; the control plane retries by itself.",
            retry_after_s=5.0,
        )
    if "locked" in text or "busy" in text:
        return Unavailable(
            f"{path} is locked by another process.",
            reason="STORE_LOCKED",
            remedy="Close other programs that have it open (fuser shows them).",
            retry_after_s=5.0,
        )
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return Internal(
            f"{path} is damaged: {error}.",
            reason="STORE_DAMAGED",
            remedy="Restore it from a backup, or move it away: a new store stops no running engine.",
        )
    return Unavailable(
        f"{path}: {error}; nothing of the commit was written.",
        reason="STORE_IO",
        remedy="Check the disk and the folder's permissions.",
        retry_after_s=5.0,
    )


def _write_record(connection: sqlite3.Connection, write: Write, revision: int) -> None:
    kind, key = kind_and_key(write)
    if isinstance(write, Delete):
        connection.execute("DELETE FROM record WHERE kind = ? AND key = ?", (kind, key))
        return
    value = json.dumps(to_plain(write.record), separators=(",", ":"))
    connection.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)", (kind, key, revision, value))


def _write_decision(connection: sqlite3.Connection, decision: Decision, revision: int) -> Decision:
    decision = dataclasses.replace(decision, revision=revision)
    hold = int(decision.result is DecisionResult.HOLD)
    if decision.decision_id == 0:
        cursor = connection.execute("INSERT INTO decision (pool, hold, value) VALUES (?, ?, '')", (decision.pool, hold))
        decision = dataclasses.replace(decision, decision_id=cursor.lastrowid or 0)
    value = json.dumps(to_plain(decision), separators=(",", ":"))
    row = (decision.decision_id, decision.pool, hold, value)
    connection.execute("INSERT OR REPLACE INTO decision (id, pool, hold, value) VALUES (?, ?, ?, ?)", row)
    return decision


def _write_event(connection: sqlite3.Connection, event: Event, revision: int) -> Event:
    event = dataclasses.replace(event, revision=revision)
    cursor = connection.execute("INSERT INTO event (pool, value) VALUES (?, '')", (event.pool,))
    event = dataclasses.replace(event, event_id=cursor.lastrowid or 0)
    value = json.dumps(to_plain(event), separators=(",", ":"))
    connection.execute("UPDATE event SET value = ? WHERE id = ?", (value, event.event_id))
    return event
