"""A worker's circuit breaker: opened by transport errors and 5xx, tried again with one request at a time.

CLOSED -> OPEN after a fault of the transport, or after three in a row that may have been the requests' own; OPEN ->
HALF_OPEN when its time is over: one request probes, everybody else goes elsewhere. The probe's first byte closes it,
its fault opens it again for longer.
"""

from dataclasses import dataclass
from enum import Enum

_FIRST_S = 0.25
_LONGEST_S = 10.0
_DOUBTFUL_IN_ROW = 3


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """Belongs to one incarnation: a new one starts closed. Times are the caller's clock, seconds."""

    open_until: float = 0.0
    failures_in_row: int = 0
    trips_in_row: int = 0
    probing: bool = False
    """A request is under way that will tell."""

    def state(self, now: float) -> BreakerState:
        if not self.trips_in_row:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether one more request may go there."""
        return not self.trips_in_row or (now >= self.open_until and not self.probing)

    def entered(self) -> bool:
        """A request goes there. True: it is the probe."""
        if not self.trips_in_row:
            return False
        self.probing = True
        return True

    def succeeded(self) -> None:
        """An answer, or its first byte, came: whatever failed before is over."""
        self.open_until = 0.0
        self.failures_in_row = self.trips_in_row = 0
        self.probing = False

    def failed(self, now: float, doubtful: bool) -> bool:
        """True: this one opened it. Many that fail together, or after it is open, are one fault."""
        self.failures_in_row += 1
        if self.state(now) is BreakerState.OPEN:
            return False
        if not self.trips_in_row and doubtful and self.failures_in_row < _DOUBTFUL_IN_ROW:
            return False
        self.trips_in_row += 1
        self.open_until = now + min(_LONGEST_S, _FIRST_S * 2 ** min(10, self.trips_in_row - 1))
        return True

    def probe_over(self) -> None:
        """The probe ended, whatever came of it."""
        self.probing = False
