"""Parts of a log file: its end, as an exit report carries it, and what a start has written."""

import os
from pathlib import Path

MAX_TAIL_BYTES = 4096
MAX_START_BYTES = 1024 * 1024


def log_tail(path: Path, lines: int = 40) -> str:
    """The last lines, at most 4 KiB; "" when there is nothing to read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_TAIL_BYTES))
            data = file.read()
    except OSError:
        return ""
    if size > MAX_TAIL_BYTES:
        data = data.partition(b"\n")[2] or data
    text = "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])
    return text.encode()[-MAX_TAIL_BYTES:].decode("utf-8", "ignore")


def log_size(path: Path) -> int:
    """Bytes; 0 when there is no log."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_from(path: Path, start: int) -> str:
    """What was written from byte `start` on, at most 1 MiB; everything if the file has become shorter meanwhile."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < start:
                start = 0
            file.seek(start)
            return file.read(MAX_START_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
