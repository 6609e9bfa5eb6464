"""A data folder belongs to one process at a time."""

import contextlib
import fcntl
import os
from pathlib import Path

from springtide.errors import AlreadyExists


def lock_data_dir(data_dir: Path, lock_name: str, who: str) -> int:
    """Takes the folder for this process, with a lock file `lock_name` that names it; the lock ends with the process.
    `who`: what the process is, for people. Raises AlreadyExists, OSError."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(data_dir / lock_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 64).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyExists(
            f"data_dir = {str(data_dir)!r}: another {who} (process {owner}) uses it.",
            reason="DATA_DIR_IN_USE",
            field="data_dir",
            value=str(data_dir),
            remedy=f"Stop that {who}, or give this one a data_dir of its own.",
        ) from None
    os.truncate(fd, 0)
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only whose it is stays unknown
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
