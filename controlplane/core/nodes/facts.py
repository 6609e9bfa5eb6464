"""What is known of one node: from its record, its agent, and its provisioner."""

from collections.abc import Iterable, Mapping

from controlplane.core.draft import Draft
from controlplane.core.fences import has_ended
from controlplane.core.snapshot import LiveView, ProvisionerLive
from controlplane.core.tracing import in_trace_of, trace_id_of
from springtide.model.enums import NodeState, Phase, ReportedPhase, State
from springtide.model.node import Node, Provision
from springtide.model.provisioning import CapabilitySet, ProvidedNode, ProvidedPhase
from springtide.model.record import Event
from springtide.model.worker import Worker

COMING_OR_HERE = frozenset({NodeState.REQUESTED, NodeState.UP})
ENDING = frozenset({ProvidedPhase.ENDING, ProvidedPhase.ENDED})
SPOT_IS_BACK = "SPOT_IS_BACK"  # of an on-demand node that stood in for a spot node
PROVISIONER_LABEL = "provisioner"


def set_labels(provisioner_id: str, found: CapabilitySet) -> dict[str, str]:
    """Labels that the nodes of a set will have."""
    return {PROVISIONER_LABEL: provisioner_id, **found.labels}


def owner_of(live: LiveView, provided: Provision) -> ProvisionerLive | None:
    """Its provisioner, if that has said anything in its present session."""
    found = live.provisioners.get(provided.provisioner_id)
    return found if found is not None and found.reported else None


def listed(live: LiveView, node: Node) -> ProvidedNode | None:
    owner = owner_of(live, node.provided) if node.provided is not None else None
    return owner.nodes.get(node.node_id) if owner is not None else None


def is_alive_there(found: ProvidedNode | None) -> bool:
    """Its provisioner has it, or is about to."""
    return found is not None and found.phase is not ProvidedPhase.ENDED


def register_deadline(draft: Draft, phase: ProvidedPhase | None, since: float) -> float | None:
    """Until when the agent must be here. While the node waits in its provider's queue only that wait is bounded."""
    rules = draft.snapshot.rules
    if phase is ProvidedPhase.PENDING:
        return since + rules.pending_timeout_s if rules.pending_timeout_s > 0 else None
    return since + rules.register_timeout_s


def agent_is_here(draft: Draft, node_id: str) -> bool:
    """Its agent has a session and was heard within its lease."""
    live = draft.live(node_id)
    return (
        live is not None
        and live.connected
        and not live.goodbye
        and live.hello is not None
        and draft.now < live.last_heard_at + draft.timing.lease_s
    )


def workers_by_node(workers: Iterable[Worker]) -> dict[str, list[Worker]]:
    """Workers that are on a node: not INACTIVE, or with a slice that is not free. What is LOST there is left out: it
    waits for the node, not the other way round."""
    found: dict[str, list[Worker]] = {}
    for worker in workers:
        if worker.intent.phase is Phase.LOST:
            continue
        if worker.state is not State.INACTIVE or worker.intent.gpu_ids:
            found.setdefault(worker.intent.node_id, []).append(worker)
    return found


def is_empty(draft: Draft, node: Node, held: Mapping[str, list[Worker]], *, leaving: bool = False) -> bool:
    """Nothing of ours is there, and no engine of anybody's is reported there. A sleeper does not keep a node that is
    leaving."""
    if any(not (leaving and w.intent.phase is Phase.SLEEPING) for w in held.get(node.node_id, ())):
        return False
    live = draft.live(node.node_id)
    reports = live.reports.values() if live is not None else ()
    return all(has_ended(r) or (leaving and r.phase is ReportedPhase.SLEEPING) for r in reports)


def trace_on_node(draft: Draft, node: Node, traceparent: str, pool: str) -> str:
    """The first start on a node that was asked for it goes on in the node's trace: one trace from the decision that
    needed a node to the worker."""
    provided = node.provided
    if provided is None or provided.pool != pool or not provided.traceparent:
        return traceparent
    if any(worker.intent.node_id == node.node_id for worker in draft.workers.values()):
        return traceparent
    return in_trace_of(provided.traceparent, traceparent)


def node_event(draft: Draft, node: Node, action: str, message: str = "", reason: str = "") -> None:
    provided = node.provided
    draft.events.append(
        Event(
            at=draft.now,
            action=action,
            target=node.node_id,
            status=node.state.value.lower(),
            pool=provided.pool if provided is not None else "",
            node_id=node.node_id,
            reason=reason or node.reason,
            message=message,
            trace_id=trace_id_of(provided.traceparent) if provided is not None else "",
        )
    )
