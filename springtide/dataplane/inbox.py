"""Reads of several connections, looked at together.

A relay that reads, looks and writes one token after the other lets the kernel drive the interpreter out of the
processor's caches twice for each. With many tokens in one pass of the loop it is cheaper to read them all, then to look
at them all, then to do what that came to. An inbox holds at most what one pass has read: reads that are large go past
it, so that a client that takes nothing still stops the reading.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.dataplane.server import RelayServer
    from springtide.dataplane.upstream import Sink, Upstream

    Read = tuple[Upstream, Sink | None, bytes]
    """What came, on which connection, and whose it was then."""

log = logging.getLogger(__name__)

LARGE_BYTES = 16 * 1024
"""A read of so many bytes is no token's. A loop may read on from a connection that filled its buffer, without end."""
_FEW = 24
"""Reads in a pass that are not worth the call from the loop. With 6, 400 streams whose tokens come each at its own time
took 4 % more CPU than without an inbox; with 24 they take no more, and engine steps are as cheap."""
_SKIPPED = 256
"""Reads that go straight on before it is looked again whether passes bring many."""


class Inbox:
    """Keeps reads until `empty`; those who derive from it say when that is."""

    __slots__ = ("reads", "skip")

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.skip = 0
        """So many reads go straight on."""

    def wake(self) -> None:
        """`reads` is about to be filled: `empty` must follow."""
        raise NotImplementedError

    def empty(self) -> None:
        """Gives out what is there. Never raises."""
        reads, self.reads = self.reads, []
        hand_out(reads)


class PassInbox(Inbox):
    """The reads of one pass of the loop. Where passes bring few, nearly all reads go straight on."""

    __slots__ = ("_server",)

    def __init__(self, server: "RelayServer") -> None:
        super().__init__()
        self._server = server

    def wake(self) -> None:
        """For the end of this pass."""
        self._server.loop.call_soon(self._pass)

    def _pass(self) -> None:
        if 0 < len(self.reads) < _FEW:
            self.skip = _SKIPPED
        self.empty()


def hand_out(reads: "list[Read]") -> None:
    """Gives reads to those whose they are: looks at all, then does what that came to, in their order. Never raises:
    whoever fails ends alone."""
    jobs: list[tuple[Upstream, Sink, Callable[[bytes], None], bytes]] = []
    failed: set[Sink] = set()
    for conn, sink, data in reads:
        if sink is None or conn.sink is not sink:
            conn.out_of_step()
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
        try:
            if conn.sink is sink:
                do(rest)
            else:  # its answer ended with what came before
                conn.out_of_step()
        except Exception:
            log.exception("a connection to %s failed", conn.address)
            _end(conn)


def _end(conn: "Upstream") -> None:
    try:
        conn.give_up()
    except Exception:
        log.exception("a connection to %s could not be ended well", conn.address)
        conn.transport.abort()
