"""Processes of this host: identity that survives a reused pid, signals that hit nobody else, and a look by marker."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of one boot. `start_time`: clock ticks since boot, field 22 of /proc/PID/stat."""

    boot_id: str
    pid: int
    start_time: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """The identity of a live process; None when there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else Identity(boot_id(), pid, int(fields[19]))


def lives(identity: Identity) -> bool:
    return identify(identity.pid) == identity


def kill(identity: Identity, number: int = signal.SIGKILL) -> bool:
    """Signals exactly this process; False when it is gone."""
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError:
        return False
    try:
        if not lives(identity):
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def reap(pid: int) -> None:
    """Collects a dead child, if it is one of ours."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def with_variable(name: str, value: str, argument: str = "") -> Iterator[Identity]:
    """Live processes of this user whose environment has NAME=VALUE, and whose command line has `argument` if one is
    given. Reads all of /proc."""
    wanted = f"{name}={value}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if wanted not in Path(entry.path, "environ").read_bytes().split(b"\0"):
                continue
            if argument and argument.encode() not in Path(entry.path, "cmdline").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue
        found = identify(int(entry.name))
        if found is not None:
            yield found
