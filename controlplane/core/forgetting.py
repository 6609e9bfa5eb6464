"""Records that nothing needs any more."""

from controlplane.core.aims import staying
from controlplane.core.draft import Draft
from controlplane.core.starts import is_failing
from controlplane.core.worker import holds_slice
from springtide.model.enums import Phase, State
from springtide.model.pool import Pool
from springtide.model.record import Event


def delete_when_empty(draft: Draft, pool: Pool) -> None:
    """The last step of a deletion. A LOST worker is not waited for: when its node comes back, an engine without a
    record is stopped, and until then its GPUs count as taken there."""
    workers = draft.workers_of(pool.name)
    if any(w.state is not State.INACTIVE or (holds_slice(w) and w.intent.phase is not Phase.LOST) for w in workers):
        return
    for worker in workers:
        if draft.full:
            return
        draft.delete(worker)
    draft.events.append(Event(draft.now, "pool_deleted", pool.name, "deleted", pool.name, reason="DELETING"))
    draft.delete(pool)


def forget(draft: Draft, pool: Pool) -> None:
    """Drops INACTIVE records that nothing needs any more."""
    unused = [
        worker
        for worker in draft.workers_of(pool.name)
        if worker.state is State.INACTIVE and (not holds_slice(worker) or worker.intent.phase is Phase.LOST)
    ]
    retried = any(map(is_failing, unused)) and pool.intent.desired_workers > len(staying(draft, pool))
    for worker in unused:
        if retried and is_failing(worker):
            continue
        lost = worker.intent.phase is Phase.LOST  # what slept for long before it was lost may be back soon
        since = worker.intent.phase_since if lost else worker.intent.state_since
        at = since + draft.timing.inactive_retention_s
        if draft.now < at:
            draft.wake(at)
        elif draft.full:
            return
        else:
            draft.delete(worker)
