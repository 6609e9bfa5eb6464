"""Memory that the simulated engine really holds: anonymous pages, written to; a sleep gives them back to the kernel."""

import mmap

_PAGE = mmap.PAGESIZE
_SHARES = {"weights": 0.5, "kv_cache": 0.5}


class Memory:
    """`size_bytes` in two parts, `weights` and `kv_cache`, half each."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = {tag: int(size_bytes * share) // _PAGE * _PAGE for tag, share in _SHARES.items()}
        self._held: dict[str, mmap.mmap] = {}

    @property
    def held_bytes(self) -> int:
        """What it occupies now."""
        return sum(self._size_bytes[tag] for tag in self._held)

    def occupy(self, tag: str) -> None:
        """Maps a part and touches every page of it; nothing when it is held already."""
        size = self._size_bytes[tag]
        if size and tag not in self._held:
            area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for at in range(0, size, _PAGE):
                area[at] = 1
            self._held[tag] = area

    def free(self, tag: str) -> None:
        """Unmaps a part."""
        area = self._held.pop(tag, None)
        if area is not None:
            area.close()
