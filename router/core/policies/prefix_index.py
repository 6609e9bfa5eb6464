"""Which worker saw which beginning of a prompt: chains of chunk hashes with the workers that hold them, bounded.

One entry per chunk, found by a hash over it and all that is before it, so that a lookup walks as far as the prompt is
known. The least recently used chunks are forgotten; an engine's cache does the same. A worker that is gone, or came
back with another incarnation, is simply never asked for again, and its entries age out.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

SeatId = tuple[str, int]
_MOST_HOLDERS = 8


class PrefixIndex:
    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._holders: OrderedDict[int, tuple[SeatId, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def known(self, chunks: Sequence[int], seats: Iterable[SeatId]) -> dict[SeatId, int]:
        """How many leading chunks each of the seats holds; those that hold none are left out."""
        found: dict[SeatId, int] = {}
        alive = set(seats)
        for depth, chunk in enumerate(chunks, 1):
            alive.intersection_update(self._holders.get(chunk, ()))
            if not alive:
                break
            for seat in alive:
                found[seat] = depth
        return found

    def sent(self, chunks: Sequence[int], seat: SeatId) -> None:
        """The seat has, or will soon have, all these chunks."""
        holders = self._holders
        for chunk in reversed(chunks):  # the beginning last: it is the last to be forgotten
            had = holders.get(chunk, ())
            if not had or had[0] != seat:
                holders[chunk] = (seat, *(other for other in had if other != seat))[:_MOST_HOLDERS]
            holders.move_to_end(chunk)
        while len(holders) > self._max_chunks:
            holders.popitem(last=False)
