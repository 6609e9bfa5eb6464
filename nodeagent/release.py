"""The proof that nothing of a worker is left: no process that carries its mark, and its GPUs' memory free."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from nodeagent import marks
from nodeagent.ledger import LedgerEntry
from nodeagent.setup import GpuMemory
from springtide import processes

log = logging.getLogger(__name__)

_MEMORY_SLACK_BYTES = 1024 * 1024 * 1024  # what a driver keeps for itself comes and goes


async def kill_leftovers(marker: str, worker_id: str, fields: Mapping[str, object]) -> None:
    """Kills what carries this worker's mark, again and again until nothing is left. `fields` are for log lines."""
    pause_s = 0.02
    while True:
        ours = await asyncio.to_thread(marks.marked, marker)
        left = [identity for identity, env in ours if env.get(marks.WORKER) == worker_id]
        if not left:
            return
        for identity in left:
            processes.kill(identity)
        await asyncio.sleep(pause_s)
        if pause_s >= 1.0:
            pids = [identity.pid for identity in left]
            log.error("worker %s: processes %s do not end", worker_id, pids, extra=fields)
        pause_s = min(pause_s * 2, 5.0)


async def memory_free(
    memory: GpuMemory,
    entry: LedgerEntry,
    fields: Mapping[str, object],
    shared: Callable[[str, str], bool] = lambda gpu_id, worker_id: False,
) -> None:
    """Waits, however long: a slice is given again only when its memory is free. A GPU that is `shared` (its id, this
    worker's) is another's by now: a sleeper that ends while its GPUs are lent."""
    pause_s = 0.1
    while await asyncio.to_thread(_is_held, memory, entry, shared):
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 2.0)
        if pause_s >= 2.0:
            log.warning("memory of GPUs %s is not free yet", ",".join(entry.gpu_ids), extra=fields)


def _is_held(memory: GpuMemory, entry: LedgerEntry, shared: Callable[[str, str], bool]) -> bool:
    """More is in use than before the start. One that cannot be measured counts as free: its processes are gone."""
    for gpu_id in entry.gpu_ids:
        used = None if shared(gpu_id, entry.worker_id) else memory.memory_used_bytes(gpu_id)
        if used is not None and used > entry.memory_before.get(gpu_id, 0) + _MEMORY_SLACK_BYTES:
            return True
    return False
