"""Plain text for people: aligned tables that never cut a cell, ages, shares."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import click
from google.protobuf.timestamp_pb2 import Timestamp

_COLOURS = {
    "ACTIVE": "green",
    "UP": "green",
    "SERVING": "green",
    "STARTING": "yellow",
    "DRAINING": "yellow",
    "RELEASING": "yellow",
    "REQUESTED": "yellow",
    "PAUSED": "yellow",
    "SUSPECT": "red",
    "FAILED": "red",
    "LOST": "red",
    "NOT_SERVING": "red",
}
UNKNOWN = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = "") -> str:
    """Columns as wide as their widest cell, state words coloured (click strips colours off a pipe)."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    if len(cells) == 1:
        return empty
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for number, row in enumerate(cells):
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[-1] = padded[-1].rstrip()
        lines.append("  ".join(click.style(c, bold=True) if number == 0 else coloured(c) for c in padded))
    return "\n".join(lines)


def coloured(cell: str) -> str:
    """A state word in its colour; other text as it is."""
    colour = _COLOURS.get(cell.strip().split("/")[0].split(" ")[0])
    return click.style(cell, fg=colour) if colour else cell


def pairs(rows: Iterable[tuple[str, object]]) -> str:
    """`name  value` lines, empty values left out."""
    shown = [(name, str(value)) for name, value in rows if value not in ("", None)]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown)


def number(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def duration(seconds: float) -> str:
    """`4s`, `3m05s`, `2h10m`, `5d`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d"


def age(stamp: Timestamp) -> str:
    return UNKNOWN if not stamp.seconds else duration(time.time() - seconds_of(stamp))


def remaining(stamp: Timestamp) -> str:
    return UNKNOWN if not stamp.seconds else duration(seconds_of(stamp) - time.time())


def seconds_of(stamp: Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9


def clock(stamp: Timestamp) -> str:
    """Local time of day, with the date when it is another day."""
    at = datetime.fromtimestamp(seconds_of(stamp), UTC).astimezone()
    today = datetime.now(UTC).astimezone().date()
    return at.strftime("%H:%M:%S") if at.date() == today else at.strftime("%Y-%m-%d %H:%M:%S")
