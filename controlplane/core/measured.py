"""What the leader measures about its own acts: how long starts take, from the order to ACTIVE."""

from collections.abc import Mapping

from springtide.model.enums import Phase, State
from springtide.model.worker import Worker

KEPT = 16  # start-ups that are remembered per pool


def start_ups(before: Mapping[str, Worker], after: Mapping[str, Worker], now: float) -> dict[str, tuple[float, ...]]:
    """Seconds of the starts that ended well between the two, by pool. An engine that was found alive is no start."""
    found: dict[str, tuple[float, ...]] = {}
    for worker_id, worker in after.items():
        old = before.get(worker_id)
        if old is None or old.state is not State.STARTING or worker.state is not State.ACTIVE:
            continue
        if old.intent.phase is Phase.ADOPTING:
            continue
        found[worker.pool] = (*found.get(worker.pool, ()), now - old.intent.state_since)
    return found
