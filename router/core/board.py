"""What the processes of one router tell each other at once: requests at each worker, and how many wait for each pool.

The core knows the interface only; router.shared has the one in shared memory.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

Key = tuple[str, int]


class Cell(Protocol):
    """One number of each process."""

    def put(self, own: int) -> None:
        """This process's."""

    def siblings(self) -> int:
        """The sum of the other processes', now."""


class Board(Protocol):
    def cells(self, keys: Iterable[Key]) -> Mapping[Key, Cell]:
        """The cells of exactly these keys; earlier ones are given up. A key that is left out has none."""


class _Alone:
    def put(self, own: int) -> None:
        pass

    def siblings(self) -> int:
        return 0


class _OneProcess:
    def cells(self, keys: Iterable[Key]) -> Mapping[Key, Cell]:
        return {}


ALONE: Cell = _Alone()
ONE_PROCESS: Board = _OneProcess()


def pool_key(pool: str) -> Key:
    """The cell of what waits for a pool; no worker has incarnation -1."""
    return pool, -1
