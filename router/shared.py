"""The board in shared memory: what the processes of one router tell each other at once, each writing its own row only.

The file holds the keys of the slots, which process uses which slot, and one row of numbers for each process. Slots are
given under a file lock, when a table changes; numbers are written and read without one, each is a single word.
"""

import fcntl
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from router.core.board import Cell, Key

SLOTS = 4096
_KEY_BYTES = 16
_WINDOW = 64
"""A key lies within so many slots from where its hash points."""
_FREE = bytes(_KEY_BYTES)


class SharedCell:
    """One slot as one process sees it."""

    __slots__ = ("_others", "_own", "_slot")

    def __init__(self, own: memoryview, others: tuple[memoryview, ...], slot: int) -> None:
        self._own = own
        self._others = others
        self._slot = slot

    def put(self, own: int) -> None:
        self._own[self._slot] = own

    def siblings(self) -> int:
        slot = self._slot
        total = 0
        for row in self._others:
            total += row[slot]
        return total


class SharedBoard:
    """Row `index` of `count`. A process that starts clears what an earlier one left in its row."""

    def __init__(self, path: Path, index: int, count: int) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size_of(count))
        self._view = view = memoryview(self._map)
        uses_at = SLOTS * _KEY_BYTES
        rows_at = uses_at + count * SLOTS
        self._uses = [view[uses_at + n * SLOTS : uses_at + (n + 1) * SLOTS] for n in range(count)]
        rows = [view[rows_at + 4 * n * SLOTS : rows_at + 4 * (n + 1) * SLOTS].cast("i") for n in range(count)]
        self._own_uses = self._uses[index]
        self._own = rows[index]
        self._others = tuple(row for n, row in enumerate(rows) if n != index)
        self._slots: dict[Key, int] = {}
        self.clear()

    def cells(self, keys: Iterable[Key]) -> Mapping[Key, Cell]:
        """See Board. A key without a free slot near its place is left out: it is then not shared."""
        wanted = set(keys)
        if wanted != self._slots.keys():
            with self._locked():
                for key in self._slots.keys() - wanted:
                    self._give_up(self._slots.pop(key))
                for key in wanted - self._slots.keys():
                    slot = self._take(_digest(key))
                    if slot is not None:
                        self._slots[key] = slot
        return {key: SharedCell(self._own, self._others, slot) for key, slot in self._slots.items()}

    def clear(self) -> None:
        """Gives up all slots of this row."""
        with self._locked():
            for slot in range(SLOTS):
                if self._own_uses[slot]:
                    self._give_up(slot)
        self._slots.clear()

    def close(self) -> None:
        """Gives up the row and the file. Cells must not be used afterwards."""
        self.clear()
        for view in (*self._uses, self._own, *self._others):
            view.release()
        self._view.release()
        self._map.close()
        self._file.close()

    def _take(self, digest: bytes) -> int | None:
        start = int.from_bytes(digest[:4], "little") % SLOTS
        free = None
        for step in range(_WINDOW):
            slot = (start + step) % SLOTS
            held = self._map[slot * _KEY_BYTES : (slot + 1) * _KEY_BYTES]
            if held == digest:
                free = slot
                break
            if free is None and held == _FREE:
                free = slot
        if free is not None:
            self._map[free * _KEY_BYTES : (free + 1) * _KEY_BYTES] = digest
            self._own_uses[free] = 1
        return free

    def _give_up(self, slot: int) -> None:
        self._own[slot] = 0
        self._own_uses[slot] = 0
        if not any(uses[slot] for uses in self._uses):
            self._map[slot * _KEY_BYTES : (slot + 1) * _KEY_BYTES] = _FREE

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def make_board(path: Path, count: int) -> None:
    """An empty board for `count` processes."""
    with path.open("wb") as file:
        file.truncate(size_of(count))


def size_of(count: int) -> int:
    """Bytes of a board."""
    return SLOTS * (_KEY_BYTES + count * 5)


def _digest(key: Key) -> bytes:
    return blake2b(f"{key[0]}\0{key[1]}".encode(), digest_size=_KEY_BYTES).digest()
