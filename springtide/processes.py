"""Processes of this host: identity that survives a reused pid, signals that hit nobody else, a look by environment."""

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MARKER = "SPRINGTIDE_NODE"
"""In the environment of all that an agent starts: the mark of its node, so that others find what is left of it."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot. `start_time`: clock ticks since boot, field 22 of /proc/PID/stat."""

    boot_id: str
    pid: int
    start_time: int


def boot_id() -> str:
    """Random per boot of the host's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a live process; None when there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else ProcessIdentity(boot_id(), pid, int(fields[19]))


def lives(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still lives."""
    return identify(identity.pid) == identity


def kill(identity: ProcessIdentity, number: int = signal.SIGKILL) -> bool:
    """Signals exactly this process; False when it is gone. A pidfd keeps a reused pid from being hit."""
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


def reap(pid: int) -> int | None:
    """Collects a dead child of ours; its exit code (negative: signal) the one time that it is collected."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def with_variable(name: str, value: str, argument: str = "") -> Iterator[tuple[ProcessIdentity, Mapping[str, str]]]:
    """Live processes of this user whose environment has NAME=VALUE, and whose command line has `argument` if one is
    given; each with that environment. Reads all of /proc."""
    wanted = f"{name}={value}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            if wanted not in variables:
                continue
            if argument and argument.encode() not in Path(entry.path, "cmdline").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue
        identity = identify(int(entry.name))
        if identity is not None:
            pairs = (item.decode(errors="replace").partition("=") for item in variables if item)
            yield identity, {key: found for key, _, found in pairs}
