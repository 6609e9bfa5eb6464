"""How much memory a worker occupies: on its GPUs as the driver counts, or in its processes where they are simulated."""

import os
from pathlib import Path

from nodeagent import marks
from nodeagent.ledger import LedgerEntry
from nodeagent.setup import NodeSetup

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LEAST_FREED_BYTES = 4 * 1024 * 1024
LEAST_FREED_SHARE = 0.05


def used_bytes(setup: NodeSetup, entry: LedgerEntry) -> int | None:
    """Bytes in use on the worker's GPUs (by whoever), or resident in its processes; None: nobody can tell. Slow."""
    if setup.simulated:
        return _resident_bytes(setup.marker, entry)
    read = [setup.memory.memory_used_bytes(gpu_id) for gpu_id in entry.gpu_ids]
    known = [used for used in read if used is not None]
    return sum(known) if known and len(known) == len(read) else None


def least_freed(setup: NodeSetup, entry: LedgerEntry, before: int) -> int:
    """What a release must free of `before` bytes to be one."""
    base = 0 if setup.simulated else sum(entry.memory_before.values())
    share = 0.0 if setup.simulated else LEAST_FREED_SHARE
    return max(LEAST_FREED_BYTES, int((before - base) * share))


def _resident_bytes(marker: str, entry: LedgerEntry) -> int | None:
    shim = entry.shim.pid if entry.shim is not None else 0
    total = 0
    for identity, env in marks.marked(marker):
        if env.get(marks.WORKER) == entry.worker_id and identity.pid != shim:
            try:
                total += int(Path(f"/proc/{identity.pid}/statm").read_text().split()[1]) * PAGE_BYTES
            except (OSError, IndexError, ValueError):
                continue
    return total or None
