"""Folders of an agent: one agent per data folder, a private runtime folder with short paths, the discovery file."""

import hashlib
import os
import stat
from pathlib import Path

from springtide.errors import FailedPrecondition

DISCOVERY_FILE = "nodeagent.json"


def marker_of(data_dir: Path) -> str:
    """What marks every process that an agent on this folder starts: a new agent on it knows its predecessor's."""
    return hashlib.sha256(f"{os.getuid()}:{data_dir.resolve()}".encode()).hexdigest()[:24]


def runtime_dir(configured: str, marker: str) -> Path:
    """A private folder for unix sockets. Raises FailedPrecondition if somebody else owns it, OSError."""
    if configured:
        folder = Path(configured)
    else:
        root = Path(f"/tmp/springtide-{os.getuid()}")
        _make_private(root)
        folder = root / marker[:12]
    _make_private(folder)
    return folder.resolve()


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FailedPrecondition(
            f"runtime_dir = {str(folder)!r}: it belongs to another user or is no folder.",
            reason="RUNTIME_DIR_UNSAFE",
            field="runtime_dir",
            value=str(folder),
            remedy="Set runtime_dir to a folder of this user.",
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def remove_discovery(data_dir: Path) -> None:
    """At an orderly end: what it names is gone."""
    (data_dir / DISCOVERY_FILE).unlink(missing_ok=True)
