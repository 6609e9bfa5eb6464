"""Ids of requests that came without one."""

import os
from itertools import count

_process = os.urandom(8).hex().encode()
_numbers = count(int.from_bytes(os.urandom(4), "big"))


def new_request_id() -> bytes:
    """32 digits: half of them are this process's, the others count. A uuid costs a call into the kernel each time."""
    return _process + b"%016d" % next(_numbers)
