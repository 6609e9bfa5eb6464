"""What a routing policy is: it chooses one of the seats that may take a request, and hears what was sent where."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from router.core.seat import Seat
from router.core.want import Want


class Rng(Protocol):
    """As random.Random."""

    def random(self) -> float: ...


class Policy:
    """One pool's. State, where there is any, is bounded. `expected_output_tokens`: of an answer, as far as known."""

    expected_output_tokens: float | None = None

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        """One of `seats`, which are all eligible and at least one."""
        raise NotImplementedError

    def sent(self, seat: Seat, want: Want) -> None:
        """The request went there: the chosen seat."""

    def cost(self, want: Want) -> tuple[int, int]:
        """Tokens that the request will hold in all, and those of its prompt that must be computed."""
        return 0, 0


def least(seats: Iterable[Seat], now: float) -> Seat:
    """The least in-flight, slow start considered. Ties go to the one that served least, then by id."""
    best: Seat | None = None
    best_score = 0.0
    for seat in seats:
        score = seat.score(now)
        if best is None or score < best_score or (score == best_score and _served(seat) < _served(best)):
            best, best_score = seat, score
    if best is None:
        raise ValueError("there is no seat")
    return best


def _served(seat: Seat) -> tuple[int, str]:
    return seat.requests_total, seat.worker.worker_id


def balanced(seat: Seat, seats: Iterable[Seat], now: float, most_extra: float, most_ratio: float) -> bool:
    """Whether a preferred seat is not much more loaded than the least loaded one: by count, and by ratio."""
    lowest = min(other.score(now) for other in seats)
    own = seat.score(now)
    return own - lowest <= most_extra or own <= most_ratio * lowest
