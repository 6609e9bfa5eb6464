"""The discovery file of a process: which ports it really bound, for others on the host."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def write_discovery(path: Path, content: Mapping[str, object]) -> None:
    """Whole or not at all: a reader never sees half of it. A full disk is logged: those who know the address are
    served all the same."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(path)
    except OSError as error:
        log.error("%s cannot be written: %s", path, error)
        try:
            partial.unlink(missing_ok=True)
        except OSError:
            pass  # the folder itself cannot be written
