"""When links write: all frames of one pass of the loop in one write per link, and a busy loop rests between passes.

Tokens of many streams come each at its own time, and each would wake the loop, and with its write the peer's. So a loop
whose last writes are less than `join_s` ago sleeps up to that, looks once at all that has come meanwhile, and writes
then: a thousand passes a second at most, whatever the number of tokens. A loop that has more to do than that never
rests, nor does one with little to do; nor where an answer begins (a head, a first token, a short answer).
"""

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.link.connection import Link

JOIN_S = 0.001


class Pace:
    """Of all links of one server, or of one router. `join_s` 0: never rests."""

    __slots__ = ("_dirty", "_join_s", "_written_at", "hurried", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, join_s: float) -> None:
        self.loop = loop
        self.hurried = False
        """Something must not wait for others."""
        self._join_s = join_s
        self._dirty: list[Link] = []
        self._written_at = 0.0

    def add(self, link: "Link") -> None:
        """A link has something to write."""
        self._dirty.append(link)
        if len(self._dirty) == 1:
            self.loop.call_soon(self._pass)

    def _pass(self) -> None:
        if self._join_s and not self.hurried:
            left_s = self._written_at + self._join_s - time.monotonic()
            if left_s > 0:
                # The loop itself is to rest: anything else it waited for would wake it for each token. Bounded by
                # join_s, it delays a new request or a cancellation by no more than it delays a token.
                time.sleep(left_s)
                self.loop.call_soon(self._write)  # after a look at what has come
                return
        self._write()

    def _write(self) -> None:
        self.hurried = False
        dirty, self._dirty = self._dirty, []
        for link in dirty:
            link.flush()
        if self._join_s:
            self._written_at = time.monotonic()
