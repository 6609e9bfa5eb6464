"""Reads of several connections, looked at together.

A relay that reads, looks and writes one token after the other lets the kernel drive the interpreter out of the
processor's caches twice for each. With many tokens in one pass of the loop it is cheaper to read them all, then to look
at them all, then to write them all. Nothing waits for longer than the pass.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from springtide.dataplane.server import RelayServer
    from springtide.dataplane.upstream import Sink, Upstream

    Read = tuple[Upstream, Sink | None, bytes]
    """What came, on which connection, and whose it was then."""

log = logging.getLogger(__name__)

_FEW = 6
"""Reads in a pass that are not worth a call from the loop."""
_SKIPPED = 96
"""Reads that go straight on before it is looked again whether passes bring many."""


class Inbox(Protocol):
    """Keeps reads until there is time for all of them."""

    reads: "list[Read]"
    skip: int
    """So many reads are not for the inbox."""

    def wake(self) -> None:
        """`reads` is about to be filled."""
        ...

    def look(self) -> None:
        """Gives out what is there, now."""
        ...


class PassInbox:
    """The reads of one pass of the loop. Where passes bring few, nearly all reads go straight on."""

    __slots__ = ("_server", "reads", "skip")

    def __init__(self, server: "RelayServer") -> None:
        self._server = server
        self.reads: list[Read] = []
        self.skip = 0

    def wake(self) -> None:
        """See `Inbox`."""
        self._server.loop.call_soon(self._pass)

    def look(self) -> None:
        """See `Inbox`."""
        while self.reads:
            reads, self.reads = self.reads, []
            hand_out(reads)

    def _pass(self) -> None:
        if len(self.reads) < _FEW:
            self.skip = _SKIPPED
        self.look()


def hand_out(reads: "list[Read]") -> None:
    """Gives reads to those whose they are: looks at all, then does what that came to, in their order."""
    jobs: list[tuple[Upstream, Sink, Callable[[bytes], None], bytes]] = []
    failed: set[Sink] = set()
    for conn, sink, data in reads:
        if sink is None or conn.sink is not sink:
            conn.stray()
            continue
        if failed and sink in failed:
            continue
        try:
            do, rest = sink.upstream_read(data)
        except Exception:
            log.exception("a connection to %s failed", conn.address)
            failed.add(sink)
            do, rest = conn.give_up, b""  # in its turn: what came before is the client's
        jobs.append((conn, sink, do, rest))
    for conn, sink, do, rest in jobs:
        if conn.sink is not sink:  # its answer ended with what came before
            conn.stray()
            continue
        try:
            do(rest)
        except Exception:
            log.exception("a connection to %s failed", conn.address)
            conn.give_up()
