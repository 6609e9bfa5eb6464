"""Bounds of HTTP/2 connections, and what a peer may make us do for nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Sizes in bytes, times in seconds. What exceeds one ends the stream or the connection with an error code."""

    max_connections: int = 20_000
    max_streams: int = 1024
    """Concurrent ones of one connection."""
    max_header_bytes: int = 16 * 1024
    """Of one header block, both as it is sent and decoded (RFC 9113 §6.5.2: 32 bytes more for each field)."""
    max_continuations: int = 8
    stream_window_bytes: int = 1024 * 1024
    connection_window_bytes: int = 4 * 1024 * 1024
    stream_high_water_bytes: int = 16 * 1024
    """More than this waiting for a peer's window holds back whoever writes to the stream."""
    write_high_water_bytes: int = 128 * 1024
    max_unread_bytes: int = 1024 * 1024
    """Of frames other than DATA, for a peer that does not read."""
    preface_timeout_s: float = 10.0
    header_timeout_s: float = 10.0
    stall_timeout_s: float = 300.0
    """A stream whose peer takes nothing of what waits for it for this long is cut."""
    keepalive_s: float = 10.0
    """A connection that was silent for this long is asked (PING), and given up when it does not answer in time."""
    keepalive_timeout_s: float = 5.0
    linger_s: float = 2.0
    calm_burst: int = 10_000
    """Frames that carry nothing (PING, SETTINGS, WINDOW_UPDATE, PRIORITY, empty DATA) which a peer may send at once."""
    calm_per_s: float = 5_000.0
    reset_cost: int = 10
    """A stream that its peer opens and resets counts as this many such frames."""
    fields_per_cost: int = 16
    """So many header fields count as one: an indexed field is one byte to send and some microseconds to read."""


class Calm:
    """A token bucket for frames that carry nothing. `spend` is cheap; the clock is read only when it runs dry."""

    __slots__ = ("_burst", "_last", "_left", "_per_s")

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._burst = limits.calm_burst
        self._per_s = limits.calm_per_s
        self._left = float(limits.calm_burst)
        self._last = now

    @property
    def dry(self) -> bool:
        """True where `refill` must be asked."""
        return self._left < 0

    def spend(self, cost: int) -> bool:
        """False once the bucket is empty."""
        self._left -= cost
        return self._left >= 0

    def earn(self, amount: int) -> None:
        """Traffic that carries something earns some."""
        self._left = min(self._burst, self._left + amount)

    def refill(self, now: float) -> bool:
        """Adds what time has earned. False while the bucket is still empty."""
        self._left = min(self._burst, self._left + (now - self._last) * self._per_s)
        self._last = now
        return self._left >= 0
