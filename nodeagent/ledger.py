"""What the agent remembers of its workers over its own death: one file per worker, written before anything is started.

`<data-dir>/workers/<worker id>/ledger.json`, replaced atomically and synced. A process is identified by boot id, pid
and start time, so that a reused pid is never taken for ours.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from springtide.model.codec import from_plain, to_plain
from springtide.model.desired import EngineLaunch
from springtide.model.enums import Want
from springtide.model.worker import ExitInfo
from springtide.processes import ProcessIdentity

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.json"
_KEPT_FOLDERS = 50


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One worker. `live`: a process of it may exist. `incarnation` 0: never started."""

    worker_id: str
    pool: str
    store_id: str
    generation: int
    want: Want
    launch: EngineLaunch
    incarnation: int = 0
    live: bool = False
    started_generation: int = 0
    gpu_ids: tuple[str, ...] = ()
    control_path: str = ""
    engine_endpoint: str = ""
    max_in_flight: int = 0
    fingerprint: str = ""
    traceparent: str = ""
    memory_before: Mapping[str, int] = field(default_factory=dict)  # bytes in use on each GPU before the start
    shim: ProcessIdentity | None = None
    exit: ExitInfo | None = None
    start_phases: Mapping[str, float] = field(default_factory=dict)  # seconds of the last start that became ready
    released: tuple[str, ...] = ()  # parts of its memory that are released: it sleeps
    sleep_level: int = 0  # of that release
    changing: str = ""  # "release", "restore" or "weights": begun, and not known to be done
    freed_bytes: int | None = None  # by its last sleep
    reoccupied_bytes: int | None = None  # by its last wake
    bytes_asleep: int | None = None  # in use on its GPUs since it sleeps
    weight_version: str = ""  # that the engine serves
    weight_wanted: str = ""  # that a start is to serve, loaded from `weight_source`
    weight_source: str = ""
    engine_paused_at: int | None = None  # generation at which an operator paused the engine itself
    missing_verbs: Mapping[str, str] = field(default_factory=dict)  # what the engine cannot do, and what it lacks
    verbs_known: bool = False
    stopped: bool = True  # how it ended: stopped on order, or failed (see `exit`)


class Ledger:
    """The folder of worker folders."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, worker_id: str) -> Path:
        """The folder of one worker."""
        return self._root / worker_id

    def write(self, entry: LedgerEntry) -> None:
        """Replaces the worker's file; on return it is on the disk. Raises OSError (a full disk, for example)."""
        folder = self.folder(entry.worker_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(folder / LEDGER_FILE, json.dumps(to_plain(entry), indent=1).encode())

    def read_all(self) -> Iterator[LedgerEntry]:
        """Every readable entry. A file that cannot be read is put aside, logged, and never fatal."""
        if not self._root.is_dir():
            return
        for folder in sorted(self._root.iterdir()):
            path = folder / LEDGER_FILE
            if path.is_file():
                entry = self._read(path, folder.name)
                if entry is not None:
                    yield entry

    def _read(self, path: Path, worker_id: str) -> LedgerEntry | None:
        try:
            entry = from_plain(LedgerEntry, json.loads(path.read_bytes()))
            if entry.worker_id != worker_id:
                raise ValueError(f"it is of worker {entry.worker_id!r}")
            return entry
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            aside = path.with_name(f"{LEDGER_FILE}.corrupt")
            log.error(
                "the ledger of worker %s cannot be read; it is put aside as %s, its processes are strays now",
                worker_id,
                aside,
                extra={"worker": worker_id, "reason": "LEDGER_CORRUPT", "detail": str(error)},
            )
            try:
                path.replace(aside)
            except OSError as failure:
                log.error("cannot put %s aside: %s", path, failure)
            return None

    def forget(self, worker_id: str) -> None:
        """Takes the entry out; the folder with its logs stays until newer ones push it out."""
        (self.folder(worker_id) / LEDGER_FILE).unlink(missing_ok=True)
        done = [folder for folder in self._root.iterdir() if folder.is_dir() and not (folder / LEDGER_FILE).exists()]
        done.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in done[_KEPT_FOLDERS:]:
            shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes, syncs, renames, syncs the folder: after a crash there is the old file or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
