"""What some faults do to the process itself: it crashes, hangs, or leaves children behind."""

import os
import subprocess
import sys
import time

from nodeagent.engines.sim.faults import Fault

ORPHAN_MARK = "springtide-sim-orphan"
_ORPHAN_LIFE_S = 900
_ORPHAN_CODE = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    f"time.sleep({_ORPHAN_LIFE_S})"
)


def crash(fault: Fault) -> None:
    """End at once, by exit code or by a signal to itself."""
    print("sim: injected crash", file=sys.stderr, flush=True)
    if number := fault.whole("signal"):
        os.kill(os.getpid(), number)
        time.sleep(5)  # a signal that does not kill at once
    os._exit(fault.whole("exit_code"))


def hang(fault: Fault) -> None:
    """Block the loop: nothing is answered and no signal handled, until the fault's duration is over."""
    print("sim: injected hang", file=sys.stderr, flush=True)
    duration_s = fault.number("duration_s")
    ends_at = time.monotonic() + duration_s if duration_s > 0 else float("inf")
    while (left := ends_at - time.monotonic()) > 0:
        time.sleep(min(left, 60.0))


def spawn_orphans() -> list[int]:
    """Two children that ignore SIGTERM and outlive this process: one in its group, one in a session of its own."""
    pids = []
    for own_session in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _ORPHAN_CODE, ORPHAN_MARK],
            stdin=subprocess.DEVNULL,
            start_new_session=own_session,
        )
        child.returncode = 0  # never waited for
        pids.append(child.pid)
    return pids
