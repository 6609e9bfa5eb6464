"""Weight versions that a request accepts (RT10). Numbers within a version compare as numbers: step-9 < step-10."""

import re
from functools import lru_cache

from springtide.model.routing import RoutedWorker

_PART = re.compile(r"\d+|\D+")


@lru_cache(maxsize=4096)
def order(version: str) -> tuple[tuple[bool, int, str], ...]:
    """A key to compare versions by."""
    parts = _PART.findall(version)
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part.lstrip("0")) for part in parts)


def is_within(worker: RoutedWorker, minimum: str, maximum: str) -> bool:
    """Empty bounds are none. A worker that says no version meets no bound: unknown is not current."""
    if not minimum and not maximum:
        return True
    version = worker.weight_version
    if not version:
        return False
    return (not minimum or order(version) >= order(minimum)) and (not maximum or order(version) <= order(maximum))
