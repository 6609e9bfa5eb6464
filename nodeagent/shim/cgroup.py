"""A control group of its own for one engine, where this process may make one: all of it ends by one write.

Version 2 with `cgroup.kill` (Linux 5.14), below the shim's own group: that is writable for root, and for a systemd unit
with Delegate=yes. Elsewhere the guard alone sees to it that nothing is left.
"""

import contextlib
import logging
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "springtide-"


def own_group() -> Path | None:
    """The folder of this process's group in the version 2 hierarchy; None where there is none."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    points = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    paths = [line.removeprefix("0::") for line in groups if line.startswith("0::")]
    if not points or not paths or ".." in paths[0]:
        return None  # a group outside of what this process may see
    return Path(points[0]) / paths[0].lstrip("/")


def create(worker: str, incarnation: int, parent: Path | None = None) -> Path | None:
    """A new group below `parent` (the own one by default). None where that cannot be done. `worker`: a name that no
    other worker on this host has; what earlier incarnations left empty is removed."""
    parent = parent or own_group()
    if parent is None:
        return None
    group = parent / f"{PREFIX}{worker}-{incarnation}"
    try:
        for old in parent.glob(f"{PREFIX}{worker}-[0-9]*"):
            remove(old)
        group.mkdir()
    except OSError as error:
        log.debug("no control group: %s", error)
        return None
    if not (group / "cgroup.kill").exists():
        remove(group)
        return None
    return group


def holds(group: Path, pid: int) -> bool:
    """Whether a process is in the group."""
    try:
        return str(pid) in (group / "cgroup.procs").read_text().split()
    except OSError:
        return False


def kill(group: Path) -> None:
    """SIGKILL to all that is in it, also to what forks meanwhile."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")


def remove(group: Path) -> None:
    """Once it is empty; what is still in it keeps it."""
    with contextlib.suppress(OSError):
        group.rmdir()
