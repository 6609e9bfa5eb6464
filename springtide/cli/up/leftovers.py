"""Processes that belong to one stack, found by the mark that its agent gives them; nobody else's are ever touched."""

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from springtide.processes import MARKER, identify


def markers(agent_dir: Path) -> set[str]:
    """The marks that the agent of this data folder gave, as it and its workers' launch files say."""
    found = set()
    for launch in (agent_dir / "nodeagent.json", *agent_dir.glob("workers/*/launch.json")):
        try:
            mark = json.loads(launch.read_bytes()).get("marker")
        except (OSError, ValueError, AttributeError):
            continue
        if mark:
            found.add(str(mark))
    return found


def left(marks: Iterable[str]) -> list[tuple[int, str]]:
    """(pid, command line) of live processes that carry one of the marks."""
    wanted = {f"{MARKER}={mark}".encode() for mark in marks}
    return [(pid, _command(pid)) for pid in _pids() if wanted & _environment(pid) and identify(pid) is not None]


def with_argument(paths: Iterable[Path]) -> list[int]:
    """Live processes that were started with one of these paths as an argument."""
    wanted = {os.fsencode(path) for path in paths}
    return [pid for pid in _pids() if wanted & set(_arguments(pid)) and identify(pid) is not None]


def kill(marks: Iterable[str], timeout_s: float = 5.0) -> list[tuple[int, str]]:
    """SIGKILLs them until none is left or the time is over; returns what is left."""
    deadline = time.monotonic() + timeout_s
    marks = set(marks)
    while (remaining := left(marks)) and time.monotonic() < deadline:
        for pid, _ in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    return remaining


def _pids() -> Iterator[int]:
    own = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != own:
            yield int(entry.name)


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _command(pid: int) -> str:
    return b" ".join(_arguments(pid)).decode(errors="replace").strip()


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
