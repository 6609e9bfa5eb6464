"""How many engines of a node start at the same time. One that takes very long does not keep the others waiting."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class StartSlots:
    """`count` starts at a time; each holds its slot for at most `patience_s` seconds and then goes on without it."""

    def __init__(self, count: int, patience_s: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._patience_s = patience_s

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Waits for a slot, first come, first served."""
        await self._free.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._patience_s, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()
