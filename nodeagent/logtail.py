"""The end of a log file, as an exit report carries it."""

import os
from pathlib import Path

MAX_TAIL_BYTES = 4096


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
