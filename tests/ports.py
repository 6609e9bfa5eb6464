"""Free ports for servers that tests start."""

import itertools
import os
import socket

# Below the range that the kernel takes for outgoing connections: a port that was free is not taken by one of those
# before the server listens. Each process walks from a place of its own, so that suites side by side do not meet.
_FIRST, _LAST = 20_000, 31_999
_OFFSETS = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """A port that nothing listens on now, and that this process has not given before (within the range)."""
    for _ in range(_LAST - _FIRST):
        port = _FIRST + next(_OFFSETS) % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port is free between {_FIRST} and {_LAST}")
