"""What the links of one side have carried: numbers that each link adds to, and sums for whoever asks, in any thread."""

from collections import Counter
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.link.connection import Link

_TELL_EVERY_S = 1.0


@dataclass(slots=True)
class Carried:
    """Of one link, or of all. Frames and bytes are counted by reads and writes; a frame that is still coming is not."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    opened: int = 0
    """Streams."""
    refused: int = 0
    """Streams that the shim gave up before it answered: too many, or it takes none any more."""

    def add(self, more: "Carried") -> None:
        """Adds each number."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(more, name))


_NAMES = tuple(each.name for each in fields(Carried))


@dataclass(slots=True)
class Seen:
    """What `Counts` had at one moment: links and streams that are open; ended links by reason."""

    links: int = 0
    streams: int = 0
    carried: Carried = field(default_factory=Carried)
    ended: dict[str, int] = field(default_factory=dict)


class Counts:
    """Of all links of one side. Links that have ended stay in the sums."""

    def __init__(self) -> None:
        self._lock = Lock()  # only for beginnings, ends and sums: a sum never goes back
        self._open: dict[Link, Carried] = {}
        self._past = Carried()
        self._ended: Counter[str] = Counter()
        self._told_at = float("-inf")
        self._untold = 0

    def begin(self, link: "Link") -> Carried:
        """A link is made: what it adds to."""
        carried = Carried()
        with self._lock:
            self._open[link] = carried
        return carried

    def end(self, link: "Link", reason: str) -> None:
        """It is no more."""
        with self._lock:
            carried = self._open.pop(link, None)
            if carried is not None:
                self._past.add(carried)
                self._ended[reason] += 1

    def seen(self) -> Seen:
        """All at this moment."""
        with self._lock:
            total = Carried()
            for carried in (self._past, *self._open.values()):
                total.add(carried)
            return Seen(len(self._open), sum(len(link.streams) for link in self._open), total, dict(self._ended))

    def may_tell(self, now: float) -> int | None:
        """None: too soon for another line in the log; else how many were left out since the last."""
        if now - self._told_at < _TELL_EVERY_S:
            self._untold += 1
            return None
        self._told_at = now
        left_out, self._untold = self._untold, 0
        return left_out
