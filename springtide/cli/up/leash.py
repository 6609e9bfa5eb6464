"""Becomes a command that gets SIGTERM when its supervisor dies in whatever way: leash.py SUPERVISOR_PID COMMAND...

Standard library only; run with -I -S so that it costs a few milliseconds. The setting survives the exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    supervisor = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the line above
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
