"""A request on its way through admission, and what becomes of a held one."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.core.seat import Seat
from router.core.want import NOTHING, Want
from springtide.errors import SpringtideError

NOBODY: Mapping[tuple[str, int], float] = MappingProxyType({})


class Ticket:  # no dataclass: one is made per request, and most of its fields begin the same
    """One request. Priority, then `number`, is its place in line. `seat` is set while a worker has it."""

    __slots__ = (
        "arrived_at",
        "attempts",
        "call_deadline",
        "deadline",
        "excluded",
        "had_seat",
        "hopeless_at",
        "number",
        "pool",
        "prefill",
        "probe",
        "seat",
        "tokens",
        "waited_s",
        "waiting_since",
        "want",
        "weight_version",
    )

    def __init__(
        self, pool: str, number: int, arrived_at: float, deadline: float | None = None, want: Want = NOTHING
    ) -> None:
        self.pool = pool
        self.number = number
        self.arrived_at = arrived_at
        self.deadline = deadline
        """The client's own for its wait; None: only the pool's waiting time-out."""
        self.want = want
        self.attempts = 0
        self.excluded: Mapping[tuple[str, int], float] = NOBODY
        """Incarnations that failed it, and until when they are not tried again by it."""
        self.seat: Seat | None = None
        self.waiting_since: float | None = None
        self.waited_s = 0.0
        self.hopeless_at: float | None = None
        """With a doubtful fault and no other worker: when to give up if the failed incarnation is still there."""
        self.call_deadline: float | None = None
        """The client's own for the whole call; what is left of `deadline` once a worker has had the request."""
        self.had_seat = False
        """A worker had it before: the queue's bound is for new ones, nothing is dropped on its way to another."""
        self.tokens = 0
        """Counted at its seat, where the policy counts tokens."""
        self.prefill = 0
        """Of these, what is counted as not computed yet."""
        self.weight_version: str | None = None
        """Of the worker that gave the first tokens: its stream goes on with the same weights only."""
        self.probe = False
        """It tells whether a worker that broke is well again."""

    def suits(self, seat: Seat) -> bool:
        """False where the tokens that the client has are of other weights than that worker's."""
        return self.weight_version is None or seat.worker.weight_version == self.weight_version

    def __lt__(self, other: "Ticket") -> bool:
        if self.want.priority != other.want.priority:
            return self.want.priority > other.want.priority
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class Granted:
    """A held ticket has a worker (`ticket.seat`)."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Denied:
    """A held ticket is refused. `error` None: pass on the fault that it had."""

    ticket: Ticket
    error: SpringtideError | None
