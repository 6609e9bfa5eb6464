"""The worker that saw the longest part of the prompt before, while that one is not much more loaded than others."""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng, balanced, least
from router.core.policies.prefix_index import PrefixIndex
from router.core.seat import Seat
from router.core.want import Want


class PrefixAware(Policy):
    """F8: memory is bounded by max_chunks. A share of the prompt below `least_share` is no reason to prefer anybody."""

    def __init__(
        self, chunk_bytes: int, max_chunks: int, most_extra: float, most_ratio: float, least_share: float
    ) -> None:
        self.index = PrefixIndex(max_chunks)
        self._chunk_bytes = chunk_bytes
        self._most_extra = most_extra
        self._most_ratio = most_ratio
        self._least_share = least_share

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        chunks = want.chunks(self._chunk_bytes)
        known = self.index.known(chunks, (seat.id for seat in seats))
        longest = max(known.values(), default=0)
        if longest == 0 or longest < self._least_share * len(chunks):
            return least(seats, now)
        best = least([seat for seat in seats if known.get(seat.id) == longest], now)
        return best if balanced(best, seats, now, self._most_extra, self._most_ratio) else least(seats, now)

    def sent(self, seat: Seat, want: Want) -> None:
        self.index.sent(want.chunks(self._chunk_bytes), seat.id)
