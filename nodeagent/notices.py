"""Being told that this node is taken away soon: by a signal of the batch system, or by a file that appears."""

import datetime
import math
import os
from pathlib import Path

MAX_NOTICE_BYTES = 256


def notice_end(path: Path, default_s: float) -> float | None:
    """When the node is taken away by the file `path`, wall clock seconds. None: there is no such file. A time that
    is over was written for an earlier life of this node: the caller is to leave it alone.

    The file holds seconds, counted from when it was written, or an ISO 8601 time (UTC unless it says otherwise). One
    that says neither counts as `default_s` seconds: better too early than not at all.
    """
    try:
        with path.open("rb") as file:
            said = file.read(MAX_NOTICE_BYTES).decode("utf-8", "replace").strip()
            written_at = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    return _end(said, written_at, default_s)


def _end(said: str, written_at: float, default_s: float) -> float:
    try:
        seconds = float(said)
        return written_at + (seconds if math.isfinite(seconds) and seconds >= 0 else default_s)
    except ValueError:
        pass
    try:
        at = datetime.datetime.fromisoformat(said)
    except ValueError:
        return written_at + default_s
    return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()
