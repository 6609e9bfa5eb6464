"""The least prefill still to do, known prefixes taken off, plus what is being decoded.

A re-implementation of Dynamo's KV cost: a x max(active prefill + new - overlap, 0) + decode, all in tokens here. What
a worker's cache holds is known from what this router sent there.
"""

from collections.abc import Sequence

from router.core.policies.policy import Policy, Rng
from router.core.policies.prefix_index import PrefixIndex
from router.core.policies.request_cost import answer_tokens, mean_tokens
from router.core.seat import Seat
from router.core.want import Want

_BYTES_PER_TOKEN = 4


class KvCost(Policy):
    def __init__(self, chunk_bytes: int, max_chunks: int, overlap_weight: float, output_tokens: float) -> None:
        self.index = PrefixIndex(max_chunks)
        self._chunk_bytes = chunk_bytes
        self._overlap_weight = overlap_weight
        self._output_tokens = output_tokens

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        known = self.index.known(want.chunks(self._chunk_bytes), (seat.id for seat in seats))
        mean = mean_tokens(seats)

        def rank(seat: Seat) -> tuple[float, float, int, str]:
            overlap = known.get(seat.id, 0) * self._chunk_bytes / _BYTES_PER_TOKEN
            prefill = max(seat.own_prefill + want.prompt_tokens - overlap, 0.0)
            decode = seat.own_tokens - seat.own_prefill + seat.others * mean
            cost = (self._overlap_weight * prefill + decode + 1) / seat.ramp(now)
            return cost, seat.score(now), seat.requests_total, seat.worker.worker_id

        return min(seats, key=rank)

    def sent(self, seat: Seat, want: Want) -> None:
        self.index.sent(want.chunks(self._chunk_bytes), seat.id)

    def cost(self, want: Want) -> tuple[int, int]:
        answer = answer_tokens(want, self.expected_output_tokens, self._output_tokens)
        return want.prompt_tokens + answer, want.prompt_tokens
