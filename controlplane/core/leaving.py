"""Workers of nodes that announced their end."""

from controlplane.core.aims import staying
from controlplane.core.draft import Draft
from controlplane.core.drains import drain, drain_timeout_s
from controlplane.core.signals import is_leaving
from controlplane.core.starts import cancel
from springtide.model.enums import Phase, State
from springtide.model.pool import Pool

_LEAVE_SLACK_S = 5.0  # before a node's announced end, on top of the drain timeout


def leave_nodes(draft: Draft, pool: Pool, target: int) -> None:
    """Workers of nodes that stop: starts are cancelled, ACTIVE ones drain once they are replaced, or when no
    replacement comes, or when the node's deadline leaves no more time. Drains end before the node does."""
    remaining = staying(draft, pool)
    ready = sum(1 for worker in remaining if worker.state is State.ACTIVE)
    coming = len(remaining) - ready
    for worker in draft.workers_of(pool.name):
        if draft.full or not is_leaving(worker, draft.nodes):
            continue
        node_id = worker.intent.node_id
        if worker.state is State.STARTING:
            cancel(draft, worker, "NODE_STOPPING", f"{node_id} stops")
        elif worker.state is State.ACTIVE:
            latest, end = _leave_times(draft, pool, node_id)
            awaited = draft.awaited.get(pool.name, 0)  # a replacement whose node is still coming
            if ready >= target or coming + awaited == 0 or draft.now >= latest:
                drain(draft, worker, "NODE_STOPPING", f"{node_id} stops", deadline=end)
            else:
                draft.wake(latest)
        elif worker.intent.phase in (Phase.UNROUTING, Phase.FINISHING) and not worker.intent.abort_in_flight:
            _, end = _leave_times(draft, pool, node_id)
            if worker.intent.deadline is not None and end < worker.intent.deadline:
                draft.set_intent(worker, deadline=end)
                draft.wake(end)


def _leave_times(draft: Draft, pool: Pool, node_id: str) -> tuple[float, float]:
    """(when a worker of the stopping node has to begin its drain, when that drain has to end)."""
    live, timeout_s = draft.live(node_id), drain_timeout_s(pool)
    provided = draft.nodes[node_id].provided
    told = [live.stop_deadline_at if live is not None else None, provided.ends_at if provided is not None else None]
    ends = [at for at in told if at is not None]
    if not ends:
        return draft.nodes[node_id].state_since + timeout_s, draft.now + timeout_s
    latest = min(ends) - timeout_s - _LEAVE_SLACK_S
    return latest, min(draft.now + timeout_s, max(min(ends) - _LEAVE_SLACK_S, draft.now))
