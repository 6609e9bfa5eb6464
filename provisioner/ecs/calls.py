"""Calls that block, in a few threads of their own. One that is given up goes on in its thread until its own time-outs
end it; its answer goes to nobody."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from provisioner.core.provider import OutcomeUnknown

MAX_THREADS = 4  # one that is waited for, and some that were given up


class BlockingCalls:
    """No call ever waits for a thread: what would begin late, when nobody waits for it, does not begin."""

    def __init__(self, most: int = MAX_THREADS) -> None:
        self._most = most
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="ecs")
        self._calls: set[Future[Any]] = set()

    @property
    def running(self) -> int:
        """Calls that have not ended, also those that were given up."""
        self._calls = {call for call in self._calls if not call.done()}
        return len(self._calls)

    async def run(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """What it returns or raises. Raises OutcomeUnknown when all threads are held by calls that were given up."""
        if self.running >= self._most:
            raise OutcomeUnknown(f"{self._most} earlier calls of ECS have not ended: none is begun until one has.")
        call = self._threads.submit(partial(method, **arguments))
        self._calls.add(call)
        return await asyncio.wrap_future(call)

    def close(self) -> None:
        """What runs ends by its own time-outs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
