"""W3C trace context as text: `00-<32 hex trace id>-<16 hex span id>-<2 hex flags>`."""

import random
import re
from typing import NamedTuple, Protocol

_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_system_random = random.SystemRandom()


class RandomBits(Protocol):
    """What `random.Random` offers of it."""

    def getrandbits(self, k: int, /) -> int: ...


class TraceContext(NamedTuple):
    """Ids as lower-case hex. `flags` 1: sampled."""

    trace_id: str
    span_id: str
    flags: int = 1

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse_traceparent(text: str | None) -> TraceContext | None:
    """None for what is absent, malformed, of version ff, or has an all-zero id: the caller starts a new trace then."""
    match = _PATTERN.fullmatch((text or "").strip().lower())
    if match is None:
        return None
    version, trace_id, span_id, flags = match.groups()
    if version == "ff" or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))


def new_traceparent(rng: RandomBits | None = None) -> str:
    """A sampled context with fresh ids: the root of a trace. Pure when `rng` is given."""
    rng = rng or _system_random
    return str(TraceContext(_hex(rng, 128), _hex(rng, 64)))


def child_traceparent(parent: str | None, rng: RandomBits | None = None) -> str:
    """The parent's trace with a fresh span id; a new trace when there is no usable parent."""
    context = parse_traceparent(parent)
    if context is None:
        return new_traceparent(rng)
    return str(context._replace(span_id=_hex(rng or _system_random, 64)))


def trace_id_of(traceparent: str | None) -> str:
    """The trace id, or "" when there is none."""
    context = parse_traceparent(traceparent)
    return context.trace_id if context else ""


def _hex(rng: RandomBits, bits: int) -> str:
    value = 0
    while value == 0:  # all-zero ids are invalid
        value = rng.getrandbits(bits)
    return f"{value:0{bits // 4}x}"
