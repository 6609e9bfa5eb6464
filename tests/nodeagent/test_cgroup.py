"""An engine in a control group of its own where one can be made, and the guard alone where not (NA8, F30, F34)."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.shim import cgroup
from tests.nodeagent.processes import RunningShim, alive, eventually, marked

Start = Callable[..., RunningShim]


def _can_make_one() -> bool:
    probe = cgroup.create("probe", os.getpid())
    if probe is not None:
        cgroup.remove(probe)
    return probe is not None


def _groups(marker: str) -> list[Path]:
    own = cgroup.own_group()
    return list(own.glob(f"{cgroup.PREFIX}{marker[:12]}-*")) if own is not None else []


async def test_the_status_says_what_ends_the_engine(start_shim: Start, marker: str) -> None:
    """One group where this host lets us, gone with the engine; orphans that fled their session included."""
    shim = await start_shim("--fault", "orphans").serving()
    await eventually(lambda: len(marked(marker)) >= 5)
    status = await shim.status()
    assert status["confinement"] == ("cgroup" if _can_make_one() else "guard")
    family = set(marked(marker)) - {shim.process.pid, int(status["guardPid"])}
    groups = _groups(marker)
    held = {int(pid) for group in groups for pid in (group / "cgroup.procs").read_text().split()}
    assert family <= held or status["confinement"] == "guard"
    os.kill(int(status["guardPid"]), signal.SIGKILL)  # the shim does what the guard cannot any more
    await shim.ended()
    assert not any(map(alive, family))
    assert not [group for group in groups if group.exists()]


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is no control group, one that is not there, and a kernel without cgroup.kill."""
    assert cgroup.create("w-1", 7, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert cgroup.create("w-1", 7, tmp_path / "absent") is None
    monkeypatch.setattr(cgroup, "own_group", lambda: None)
    assert cgroup.create("w-1", 7) is None
    cgroup.kill(tmp_path / "absent")
    cgroup.remove(tmp_path / "absent")
    assert not cgroup.holds(tmp_path / "absent", os.getpid())
