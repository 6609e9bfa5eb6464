"""One stack per data folder: its lock, and the undertaker that ends the stack if the supervisor is killed."""

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from springtide.cli.processes import module_command
from springtide.cli.up import undertaker
from springtide.cli.up.child import child_environment
from springtide.errors import InvalidArgument

EARLIER_RUN_TIMEOUT_S = 60.0
POLL_S = 0.25


@contextlib.contextmanager
def owned(data_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Holds the folder. Raises InvalidArgument when another stack has it, or when it cannot be written.

    `tell` gets what is waited for; "" when the wait is over.
    """
    try:
        for part in ("config", "logs", "controlplane", "nodeagent", "router"):
            (data_dir / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(data_dir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _wrong_folder(data_dir, error.strerror or str(error), "Name a folder to write to.") from None
    try:
        _lock(data_dir, descriptor, tell)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        with _undertaker(data_dir, descriptor):
            yield
    finally:
        os.close(descriptor)


def _lock(data_dir: Path, descriptor: int, tell: Callable[[str], None]) -> None:
    """A stack whose supervisor was killed is still being ended by its undertaker: that is waited for."""
    deadline = time.monotonic() + EARLIER_RUN_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tell("")
            return
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            if Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
                remedy = "Stop it, or give this stack a folder (and ports) of its own."
                raise _wrong_folder(data_dir, f"is in use by another stack (process {holder})", remedy) from None
        tell("  waiting for an earlier run to end")
        time.sleep(POLL_S)


@contextlib.contextmanager
def _undertaker(data_dir: Path, lock: int) -> Iterator[None]:
    """Ends the stack if this process is killed; told at the end that there is nothing to do."""
    command = [*module_command("springtide.cli.up.undertaker"), str(data_dir)]
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=child_environment(),
        cwd=data_dir,
        start_new_session=True,
        pass_fds=(lock,),
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            started.communicate(undertaker.DONE, timeout=10)


def _wrong_folder(folder: Path, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        field="--data-dir", value=str(folder), problem=problem, remedy=remedy, reason="DATA_DIR_UNUSABLE"
    )
