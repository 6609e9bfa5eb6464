"""Processes of this host as the agent sees them: identity, environment, and the end of those that are ours."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from nodeagent.ledger import ProcessIdentity

MARKER = "SPRINGTIDE_NODE"
WORKER = "SPRINGTIDE_WORKER"
INCARNATION = "SPRINGTIDE_INCARNATION"


def boot_id() -> str:
    """Random per boot of the host's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a live process; None when there is none (a zombie is none)."""
    fields = _stat(pid)
    if fields is None or fields[0] in (b"Z", b"X"):
        return None
    return ProcessIdentity(boot_id(), pid, int(fields[19]))


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


def is_own(identity: ProcessIdentity) -> bool:
    """This process itself."""
    return identity.pid == os.getpid()


def reap(pid: int) -> int | None:
    """Collects a dead child of ours; its exit code (negative: signal) the one time that it is collected."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def marked(marker: str) -> list[tuple[ProcessIdentity, Mapping[str, str]]]:
    """Live processes of this user that carry our marker, with their SPRINGTIDE_* variables. Reads all of /proc."""
    wanted = f"{MARKER}={marker}".encode()
    found: list[tuple[ProcessIdentity, Mapping[str, str]]] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environ = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        variables = environ.split(b"\0")
        if wanted not in variables:
            continue
        identity = identify(int(entry.name))
        if identity is not None:
            ours = (item.decode(errors="replace") for item in variables if item.startswith(b"SPRINGTIDE_"))
            found.append((identity, {key: value for key, _, value in (item.partition("=") for item in ours)}))
    return found


def _stat(pid: int) -> list[bytes] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
