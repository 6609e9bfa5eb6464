"""What the router knows of one worker's incarnation: its own requests there, others' requests, and whether to hold off.

A seat lives as long as the incarnation is in the table or has requests of this router. What a shim said or what broke
(a tombstone or a back-off) belongs to the incarnation too: a new one starts with a clean seat.
"""

from dataclasses import dataclass, field

from springtide.model.routing import RoutedWorker

_PEAK_SPAN_S = 1.0
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0
_REFUSED_S = {"full": 0.05, "paused": 0.5, "starting": 0.5}
_TOMBSTONE_S = 5.0
"""How long draining, gone and another incarnation keep a worker out without a word from the control plane: its table
normally follows within a second; if it insists, the worker is asked again."""
_FLOOR = 0.1
_DOUBTFUL_IN_ROW = 3


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of one worker."""

    worker: RoutedWorker
    first_seen_at: float
    own: int = 0
    others: int = 0
    requests_total: int = 0
    failures_total: int = 0
    blocked_until: float = 0.0
    failures_in_row: int = 0
    spanned: bool = False
    """The span of its first routed token was made."""
    _peaks: list[int] = field(default_factory=lambda: [0, 0, 0])
    _peak_at: float = 0.0

    @property
    def id(self) -> tuple[str, int]:
        return self.worker.worker_id, self.worker.incarnation

    @property
    def load(self) -> int:
        """In-flight as far as known here."""
        return self.own + self.others

    def has_room(self) -> bool:
        """True unless this router alone fills it."""
        limit = self.worker.max_in_flight
        return limit <= 0 or self.own < limit

    def likely_full(self) -> bool:
        """True when, with what others run there, its shim would probably refuse."""
        limit = self.worker.max_in_flight
        return limit > 0 and self.load >= limit

    def score(self, now: float) -> float:
        """Load after one more request, over the weight of slow start: smaller is better."""
        ramp_s = self.worker.ramp_s
        age_s = now - self.first_seen_at
        weight = 1.0 if ramp_s <= 0 or age_s >= ramp_s else _FLOOR + (1 - _FLOOR) * age_s / ramp_s
        return (self.load + 1) / weight

    def enter(self, now: float) -> None:
        """One request goes there."""
        self.own += 1
        self.requests_total += 1
        self._roll(now)
        self._peaks[0] = max(self._peaks[0], self.own)

    def leave(self, now: float) -> None:
        """One request ended there."""
        self._roll(now)
        self.own -= 1

    def reported(self, in_flight: int, now: float) -> None:
        """The shim's count, seconds old. What we ourselves had there lately is taken off: the rest is others'."""
        self._roll(now)
        self.others = max(0, in_flight - max(self._peaks))

    def succeeded(self) -> None:
        """An answer came: whatever failed before is over."""
        self.failures_in_row = 0

    def failed(self, now: float, doubtful: bool = False) -> None:
        """A transport error or a 5xx: back off, longer each time. What may be the request's fault must come thrice."""
        self.failures_total += 1
        self.failures_in_row += 1
        if doubtful and self.failures_in_row < _DOUBTFUL_IN_ROW:
            return
        backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(10, self.failures_in_row - 1))
        self.blocked_until = max(self.blocked_until, now + backoff_s)

    def refused(self, reason: str, now: float) -> None:
        """The shim refused: briefly when it is full, until the table changes when it is going."""
        self.blocked_until = max(self.blocked_until, now + _REFUSED_S.get(reason, _TOMBSTONE_S))

    def _roll(self, now: float) -> None:
        """Moves the window over which the own peak is kept: three spans, the current one first."""
        spans = int((now - self._peak_at) / _PEAK_SPAN_S)
        if spans > 0:
            self._peaks = ([self.own] * min(spans, 3) + self._peaks)[:3]
            self._peak_at = now
