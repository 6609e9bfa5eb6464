"""When links write: all frames of one pass of the loop in one write per link, and a busy loop rests between passes.

Tokens of many streams come each at its own time, and each would wake the loop, and with its write the peer's. So a loop
whose last writes are less than `join_s` ago sleeps up to that, looks once at all that has come meanwhile, and writes
then: a bounded number of passes a second, whatever the number of tokens. A loop that has more to do than that never
rests, nor does one with little to do; nor where an answer begins (a head, a first token, a short answer). What comes
over a link (a request, a cancellation) ends the rest at once. Tokens of streams that run wait where they were read
(`Inbox`), and are looked at together when the links are about to write.
"""

import asyncio
import select
import time
from typing import TYPE_CHECKING

from springtide.dataplane.inbox import Inbox

if TYPE_CHECKING:
    from springtide.link.connection import Link

JOIN_S = 0.001


_SELECTABLE = 1024


def _incoming() -> "select.epoll | None":
    """For what comes over links: select() knows microseconds where poll() does not, but only low numbers of files.
    None where that cannot be had: the loop never rests then."""
    if not hasattr(select, "epoll"):
        return None
    inbox = select.epoll()
    if inbox.fileno() < _SELECTABLE:
        return inbox
    inbox.close()
    return None


class Pace(Inbox):
    """Of all links of one server, or of one router. `join_s` 0: never rests. It is also the inbox of the connections
    whose streams go out over these links: what they have read is looked at right before the links write."""

    __slots__ = ("_dirty", "_due", "_incoming", "_join_s", "_written_at", "hurried", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, join_s: float) -> None:
        super().__init__()
        self.loop = loop
        self.hurried = False
        """Something must not wait for others."""
        self._join_s = join_s
        self._dirty: list[Link] = []
        self._due = False  # a pass is ordered
        self._written_at = 0.0
        self._incoming = _incoming() if join_s else None

    def listen(self, transport: asyncio.BaseTransport) -> None:
        """What comes on this connection ends a rest. Its end ends this, too."""
        sock = transport.get_extra_info("socket")
        if self._incoming is not None and sock is not None:
            self._incoming.register(sock.fileno(), select.EPOLLIN)

    def add(self, link: "Link") -> None:
        """A link has something to write."""
        self._dirty.append(link)
        self.wake()

    def wake(self) -> None:
        """There is something to look at or to write."""
        if not self._due:
            self._due = True
            self.loop.call_soon(self._pass)

    def _pass(self) -> None:
        if self._incoming is not None and not self.hurried:
            left_s = self._written_at + self._join_s - time.monotonic()
            if left_s > 0:
                # The loop itself is to rest: anything it waited for itself would include the tokens.
                select.select((self._incoming,), (), (), left_s)
                self.loop.call_soon(self._write)  # after a look at what has come
                return
        self._write()

    def _write(self) -> None:
        self.empty()
        self.hurried = self._due = False
        dirty, self._dirty = self._dirty, []
        for link in dirty:
            link.flush()
        if self._incoming is not None:
            self._written_at = time.monotonic()
