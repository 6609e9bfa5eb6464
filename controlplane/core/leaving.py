"""Workers of nodes that announced their end."""

import math

from controlplane.core.aims import staying
from controlplane.core.draft import Draft
from controlplane.core.drains import drain, drain_timeout_s
from controlplane.core.nodes.facts import SPOT_IS_BACK
from controlplane.core.signals import leaving_nodes, node_end
from controlplane.core.starts import cancel
from springtide.model.enums import Phase, State
from springtide.model.pool import Pool

_LEAVE_SLACK_S = 5.0  # before a node's announced end, on top of the drain timeout


def leave_nodes(draft: Draft, pool: Pool, target: int) -> None:
    """Workers of nodes that stop: starts are cancelled. ACTIVE ones drain at once after a notice, as long as half of
    the target serves on; else once they are replaced, when no replacement comes, or when the node's deadline leaves no
    more time. Drains end before the node does."""
    workers = draft.workers_of(pool.name)
    nodes = leaving_nodes(workers, draft.nodes)
    if not nodes:
        return
    leaving = [worker for worker in workers if worker.intent.node_id in nodes]
    remaining = staying(draft, pool)
    ready = sum(1 for worker in remaining if worker.state is State.ACTIVE)
    coming = len(remaining) - ready
    serving = ready + sum(1 for worker in leaving if worker.state is State.ACTIVE)
    for worker in leaving:
        if draft.full:
            return
        node_id = worker.intent.node_id
        if worker.state is State.STARTING:
            cancel(draft, worker, "NODE_STOPPING", f"{node_id} stops")
        elif worker.state is State.ACTIVE:
            latest, end = _leave_times(draft, pool, node_id)
            awaited = draft.awaited.get(pool.name, 0)  # a replacement whose node is still coming
            enough = _has_notice(draft, node_id) and serving > max(1, -(-target // 2))
            if enough or ready >= target or coming + awaited == 0 or draft.now >= latest:
                serving -= 1
                drain(draft, worker, "NODE_STOPPING", f"{node_id} stops", deadline=end)
            else:
                draft.wake(latest)
        elif worker.intent.phase in (Phase.UNROUTING, Phase.FINISHING) and not worker.intent.abort_in_flight:
            _, end = _leave_times(draft, pool, node_id)
            if worker.intent.deadline is not None and end < worker.intent.deadline:
                draft.set_intent(worker, deadline=end)
                draft.wake(end)


def _has_notice(draft: Draft, node_id: str) -> bool:
    """Its agent or an operator says that it ends soon. The end that a provisioner plans leaves time to replace."""
    live = draft.live(node_id)
    told = live is not None and live.stop_deadline_at is not None
    return told or draft.nodes[node_id].spec.ends_at is not None


def _leave_times(draft: Draft, pool: Pool, node_id: str) -> tuple[float, float]:
    """(when a worker of the stopping node has to begin its drain, when that drain has to end)."""
    timeout_s, end = drain_timeout_s(pool), node_end(draft.nodes[node_id], draft.live(node_id))
    if end is None and draft.nodes[node_id].reason == SPOT_IS_BACK:
        return math.inf, draft.now + timeout_s  # nobody takes the node away: its workers leave once they are replaced
    if end is None:
        return draft.nodes[node_id].state_since + timeout_s, draft.now + timeout_s
    latest = end - timeout_s - _LEAVE_SLACK_S
    return latest, min(draft.now + timeout_s, max(end - _LEAVE_SLACK_S, draft.now))
