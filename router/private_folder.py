"""A folder for a private socket, which ends with its process: where that was killed, the next one removes it."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "springtide-router-"
_LONGEST = 64
"""A unix socket's path has 107 bytes at most."""
_YOUNG_S = 60.0
"""Younger ones may not be locked yet."""


class PrivateFolder:
    """Mode 0700, locked while its process lives."""

    def __init__(self, parent: Path | None = None) -> None:
        where = parent or Path(tempfile.gettempdir())
        if len(str(where)) >= _LONGEST:
            where = Path("/tmp")
        _remove_left(where)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Removes it. May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_left(where: Path) -> None:
    """Folders of processes of this user that were killed."""
    for folder in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
