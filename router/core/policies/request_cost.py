"""The least work ahead, counted in tokens and not in requests.

A re-implementation of SMG's least_load: (queued + in-flight tokens) / throughput + 0.15 x k / (1 - k), k being the use
of the KV cache. Tokens of this router's requests are known (prompt by size, answer by its limit and by what answers
of the pool have had so far); requests of other routers are taken as the mean of ours.
"""

from collections.abc import Sequence

from router.core.policies.least_kv import estimated_kv
from router.core.policies.policy import Policy, Rng
from router.core.seat import Seat
from router.core.want import Want

_FULLEST = 0.99
_USUAL_TOKENS = 1024


class RequestCost(Policy):
    def __init__(self, tokens_per_s: float, kv_weight: float, output_tokens: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._kv_weight = kv_weight
        self._output_tokens = output_tokens

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        uses = estimated_kv(seats, now) or [0.0] * len(seats)  # unknown of all: no term for any
        mean = mean_tokens(seats)
        new = self.cost(want)[0]

        def rank(at: int) -> tuple[float, int, str]:
            seat, k = seats[at], min(uses[at], _FULLEST)
            tokens = seat.own_tokens + seat.others * mean + new
            seconds = tokens / self._tokens_per_s + self._kv_weight * k / (1 - k)
            return seconds / seat.ramp(now), seat.requests_total, seat.worker.worker_id

        return seats[min(range(len(seats)), key=rank)]

    def cost(self, want: Want) -> tuple[int, int]:
        return want.prompt_tokens + answer_tokens(want, self.expected_output_tokens, self._output_tokens), 0


def answer_tokens(want: Want, seen: float | None, usual: float) -> int:
    """Expected tokens of an answer: what answers had so far, never more than the request's own limit."""
    expected = int(usual if seen is None else seen)
    if want.output_tokens is None:
        return expected
    return want.output_tokens if seen is None else min(want.output_tokens, expected)


def mean_tokens(seats: Sequence[Seat]) -> float:
    """Of one running request of ours."""
    running = sum(seat.own for seat in seats)
    return sum(seat.own_tokens for seat in seats) / running if running else _USUAL_TOKENS
