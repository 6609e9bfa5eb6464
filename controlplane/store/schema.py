"""Tables of the sqlite store, one script per schema version; `PRAGMA user_version` says how far a file has come."""

import sqlite3

from springtide.errors import FailedPrecondition

_MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE record (
        kind TEXT NOT NULL, key TEXT NOT NULL, revision INTEGER NOT NULL, value TEXT NOT NULL,
        PRIMARY KEY (kind, key)
    ) WITHOUT ROWID;
    CREATE TABLE decision (
        id INTEGER PRIMARY KEY AUTOINCREMENT, pool TEXT NOT NULL, hold INTEGER NOT NULL, value TEXT NOT NULL
    );
    CREATE INDEX decision_by_pool ON decision (pool, id);
    CREATE TABLE event (id INTEGER PRIMARY KEY AUTOINCREMENT, pool TEXT NOT NULL, value TEXT NOT NULL);
    CREATE INDEX event_by_pool ON event (pool, id);
    """,
)
VERSION = len(_MIGRATIONS)


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Brings the file to VERSION, each step in one transaction. Raises FailedPrecondition for a later one."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise FailedPrecondition(
            f"{path} has schema version {version}; this control plane knows {VERSION}.",
            reason="STORE_TOO_NEW",
            field="data_dir",
            value=path,
            remedy="Run the newer control plane that wrote it, or use another data_dir.",
        )
    for number in range(version, VERSION):
        script = f"BEGIN IMMEDIATE; {_MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
        try:
            connection.executescript(script)
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise
