"""What the router knows of one worker's incarnation: its own requests there, others' requests, and whether to hold off.

A seat lives as long as the incarnation is in the table or has requests of this router. What a shim said or what broke
(a tombstone or a breaker) belongs to the incarnation too: a new one starts with a clean seat.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from router.core.board import ALONE, Cell
from router.core.breaker import Breaker
from springtide.model.routing import RoutedWorker

_PEAK_SPAN_S = 1.0
_REFUSED_S = {"full": 0.05, "paused": 0.5, "starting": 0.5}
_TOMBSTONE_S = 5.0
"""How long draining, gone and another incarnation keep a worker out without a word from the control plane: its table
normally follows within a second; if it insists, the worker is asked again."""
_FLOOR = 0.1


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of one worker."""

    worker: RoutedWorker
    first_seen_at: float
    KV_MAX_AGE_S: ClassVar[float] = 5.0

    cell: Cell = ALONE
    own: int = 0
    others: int = 0
    """Of other routers."""
    echo: float = 0.0
    """Requests that other routers, who see what we see and choose as we do, are thought to have sent there for each of
    ours since the last report. Without it all of them run to the worker that looked empty then."""
    own_tokens: int = 0
    """Of our requests there, prompts and expected answers; counted where the pool's policy asks for it."""
    own_prefill: int = 0
    """Of these, prompts whose first token has not come."""
    kv_use: float | None = None
    kv_at: float = float("-inf")
    kv_in_flight: int = 0
    """In-flight when `kv_use` was reported."""
    requests_total: int = 0
    failures_total: int = 0
    blocked_until: float = 0.0
    """By a refusal; a breaker has its own time."""
    breaker: Breaker = field(default_factory=Breaker)
    spanned: bool = False
    """The span of its first routed token was made."""
    without_kv: bool = False
    """It was said that it tells nobody where its KV is."""
    _peaks: list[int] = field(default_factory=lambda: [0, 0, 0])
    _peak_at: float = 0.0
    _sent_at_kv: int = 0
    _ours_at_report: int = 0

    @property
    def id(self) -> tuple[str, int]:
        return self.worker.worker_id, self.worker.incarnation

    @property
    def load(self) -> int:
        """In-flight as far as known here."""
        return self.own + self.others + self.cell.siblings()

    def free_at(self) -> float:
        """When it may be asked again, as far as time alone decides."""
        return max(self.blocked_until, self.breaker.open_until)

    def load_if_admits(self, now: float) -> int | None:
        """Its load; None where it refuses, is broken, or is full by this router alone. For every seat of every pick."""
        if self.blocked_until > now or (self.breaker.trips_in_row and not self.breaker.admits(now)):
            return None
        ours, limit = self.own, self.worker.max_in_flight
        if self.cell is not ALONE:
            ours += self.cell.siblings()
        return None if 0 < limit <= ours else ours + self.others

    def admits(self, now: float) -> bool:
        """Neither refusing, broken nor full."""
        return self.load_if_admits(now) is not None

    def ramp(self, now: float) -> float:
        """The weight of slow start, 0.1 to 1."""
        ramp_s = self.worker.ramp_s
        age_s = now - self.first_seen_at
        return 1.0 if ramp_s <= 0 or age_s >= ramp_s else _FLOOR + (1 - _FLOOR) * max(0.0, age_s) / ramp_s

    def score(self, now: float) -> float:
        """Expected load after one more request, over the weight of slow start: smaller is better."""
        ours = self.own if self.cell is ALONE else self.own + self.cell.siblings()
        load = ours + self.others + 1 + self.echo * (ours - self._ours_at_report)
        if load < 0:
            return 0.0
        return load / self.ramp(now) if self.worker.ramp_s > 0 else load

    def sent_since_kv(self) -> int:
        """Requests that we have sent there since the last report of its KV cache, as far as they still run."""
        return max(0, min(self.requests_total - self._sent_at_kv, self.own))

    def enter(self, now: float) -> bool:
        """One request goes there. True: it probes a worker whose breaker was open."""
        self.own = own = self.own + 1
        self.requests_total += 1
        if self.cell is not ALONE:
            self.cell.put(own)
            own += self.cell.siblings()
        if now - self._peak_at >= _PEAK_SPAN_S:
            self._roll(now)
        if own > self._peaks[0]:
            self._peaks[0] = own
        return self.breaker.trips_in_row > 0 and self.breaker.entered()

    def leave(self, now: float) -> None:
        """One request ended there."""
        if now - self._peak_at >= _PEAK_SPAN_S:
            self._roll(now)
        self.own -= 1
        if self.cell is not ALONE:
            self.cell.put(self.own)

    def reported(self, in_flight: int, now: float, kv_use: float | None = None) -> None:
        """The shim's count, seconds old. What we ourselves had there lately is taken off: the rest is others'."""
        self._roll(now)
        self.others = max(0, in_flight - max(self._peaks))
        self._ours_at_report = self.own + self.cell.siblings()
        if kv_use is not None:
            self.kv_use, self.kv_at, self.kv_in_flight = kv_use, now, in_flight
            self._sent_at_kv = self.requests_total

    def succeeded(self) -> None:
        """An answer came: whatever failed before is over."""
        if self.breaker.failures_in_row:
            self.breaker.succeeded()

    def failed(self, now: float, doubtful: bool = False) -> bool:
        """A transport error or a 5xx: back off, longer each time. What may be the request's fault must come thrice.
        True: this one opened the breaker."""
        self.failures_total += 1
        return self.breaker.failed(now, doubtful)

    def refused(self, reason: str, now: float) -> None:
        """The shim refused: briefly when it is full, until the table changes when it is going."""
        self.blocked_until = max(self.blocked_until, now + _REFUSED_S.get(reason, _TOMBSTONE_S))

    def _roll(self, now: float) -> None:
        """Moves the window over which the own peak is kept: three spans, the current one first."""
        if now - self._peak_at >= _PEAK_SPAN_S:
            spans = int((now - self._peak_at) / _PEAK_SPAN_S)
            self._peaks = ([self.own + self.cell.siblings()] * min(spans, 3) + self._peaks)[:3]
            self._peak_at = now
