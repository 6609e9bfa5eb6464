"""Logs that a process writes into a file that it keeps open: bounded by whoever looks after it. Standard library only:
the keeper of a Ray node carries it along."""

import os
from pathlib import Path

MAX_LOG_BYTES = 64 * 1024 * 1024  # of an engine, or of an agent that a provisioner started


def bound_log(path: Path, max_bytes: int) -> bool:
    """Keeps the last half of a log that has grown above `max_bytes`, in place: its writer appends and keeps it open."""
    if path.stat().st_size <= max_bytes:
        return False
    with path.open("rb+") as file:
        file.seek(-max_bytes // 2, os.SEEK_END)
        tail = file.read()
        file.truncate(0)
        file.seek(0)
        file.write(b"[older lines were dropped]\n" + tail.partition(b"\n")[2])
    return True
