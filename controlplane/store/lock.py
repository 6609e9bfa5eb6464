"""One writer per data folder: a kernel lock that ends with its process."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO

from springtide.errors import FailedPrecondition, InvalidArgument


class DataDirLock:
    """Held from `acquire` to `release` or to the end of the process, however it ends."""

    def __init__(self, data_dir: Path, name: str = "controlplane.lock") -> None:
        self._path = data_dir / name
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises FailedPrecondition (DATA_DIR_IN_USE) naming the process that holds it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = self._path.open("a+", encoding="ascii")
        except OSError as error:
            problem = error.strerror or str(error)
            remedy = "Set data_dir to a folder that this user can write."
            raise InvalidArgument(
                field="data_dir", value=str(self._path.parent), problem=problem, remedy=remedy
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise FailedPrecondition(
                f"data_dir = {str(self._path.parent)!r} is in use by the control plane with pid {holder}.",
                reason="DATA_DIR_IN_USE",
                field="data_dir",
                value=str(self._path.parent),
                remedy="Stop that process, or give this one a data_dir of its own.",
            ) from None
        self._file = file
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only whose it is stays unknown
            os.write(file.fileno(), f"{os.getpid()}\n".encode())

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
