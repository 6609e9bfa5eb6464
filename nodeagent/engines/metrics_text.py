"""Reads the few values that probes need out of an engine's Prometheus text."""

import math
from collections.abc import Iterable


def read_metrics(text: str, names: Iterable[str]) -> dict[str, list[float]]:
    """All samples of the named metrics, in order, whatever their labels. NaN and broken lines are left out."""
    wanted = frozenset(names)
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        at = line.find("{")
        name = line[:at] if at >= 0 else line.partition(" ")[0]
        if name not in wanted:
            continue
        rest = line[line.rfind("}") + 1 :] if at >= 0 else line[len(name) :]
        fields = rest.split()
        try:
            value = float(fields[0])
        except (IndexError, ValueError):
            continue
        if math.isfinite(value):
            found.setdefault(name, []).append(value)
    return found


def total(samples: dict[str, list[float]], name: str) -> int | None:
    """Sum over ranks of a count; None when the metric is absent: unknown is not zero."""
    values = samples.get(name)
    return None if values is None else int(sum(values))


def highest(samples: dict[str, list[float]], name: str) -> float | None:
    """The highest value over ranks; None when the metric is absent."""
    values = samples.get(name)
    return None if values is None else max(values)
