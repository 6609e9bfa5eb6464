"""A request on its way through admission, and what becomes of a held one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from router.core.seat import Seat
from router.core.want import NOTHING, Want
from springtide.errors import SpringtideError

NOBODY: Mapping[tuple[str, int], float] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. Priority, then `number`, is its place in line. `seat` is set while a worker has it."""

    pool: str
    number: int
    arrived_at: float
    deadline: float | None = None
    """The client's own for its wait; None: only the pool's waiting time-out."""
    want: Want = NOTHING
    attempts: int = 0
    excluded: Mapping[tuple[str, int], float] = field(default_factory=lambda: NOBODY)
    """Incarnations that failed it, and until when they are not tried again by it."""
    seat: Seat | None = None
    waiting_since: float | None = None
    waited_s: float = 0.0
    hopeless_at: float | None = None
    """With a doubtful fault and no other worker: when to give up if the failed incarnation is still there."""

    call_deadline: float | None = None
    """The client's own for the whole call; what is left of `deadline` once a worker has had the request."""
    had_seat: bool = False
    """A worker had it before: the queue's bound is for new ones, nothing is dropped on its way to another worker."""
    tokens: int = 0
    """Counted at its seat, where the policy counts tokens."""
    prefill: int = 0
    """Of these, what is counted as not computed yet."""
    weight_version: str | None = None
    """Of the worker that gave the first tokens: its stream goes on with the same weights only."""
    probe: bool = False
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
