"""Ends a stack whose supervisor was killed: `python -m springtide.cli.up.undertaker DATA_DIR`, supervisor at its stdin.

It sleeps until stdin ends. After the word `done` there is nothing to do; without it, it stops the stack as the
supervisor would have: router and agent first, each told once, then the control plane, then whatever is left. It holds
the data folder's lock meanwhile (inherited), so that a new stack waits for it.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from springtide.cli.up import leftovers

DONE = b"done"
STOP_TIMEOUT_S = 40.0
CONTROLPLANE_TIMEOUT_S = 10.0
POLL_S = 0.1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if DONE not in sys.stdin.buffer.read():
        end(Path(sys.argv[1]))


def end(data_dir: Path) -> None:
    """Stops the processes of the stack in `data_dir`; nothing of it is left afterwards."""
    marks = leftovers.markers(data_dir / "nodeagent")
    _end(data_dir, ("router", "nodeagent", "provisioner"), STOP_TIMEOUT_S)
    _end(data_dir, ("controlplane",), CONTROLPLANE_TIMEOUT_S)
    leftovers.kill(marks | leftovers.markers(data_dir / "nodeagent"))


def _end(data_dir: Path, modules: Iterable[str], timeout_s: float) -> None:
    configs = [data_dir / "config" / f"{module}.toml" for module in modules]
    _signal(leftovers.with_argument(configs), signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while (running := leftovers.with_argument(configs)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(running, signal.SIGKILL)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
