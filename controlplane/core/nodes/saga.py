"""One node's way, as its provisioner tells it: REQUESTED -> UP -> RELEASING -> GONE, and LOST.

An agent's own word comes before its provisioner's: a node whose agent reports is not gone. But a node that is given
back, or did not come in time, never counts as capacity again, whatever arrives late.
"""

import dataclasses
from typing import Any

from controlplane.core.draft import Draft
from controlplane.core.nodes.facts import (
    agent_is_here,
    is_alive_there,
    is_empty,
    node_event,
    owner_of,
    set_labels,
    workers_by_node,
)
from controlplane.core.snapshot import ProvisionerLive
from controlplane.core.worker import Cause
from springtide.model.enums import NodeState, Phase
from springtide.model.node import Node, NodeObserved, Provision
from springtide.model.provisioning import CapabilitySet, GroupStatus, ProvidedNode, ProvidedPhase
from springtide.model.worker import Worker

_MOVED_S = 2.0  # an end that moves by less has not moved
_WAIT_FOR_NODE = frozenset({Phase.LOST, Phase.STOPPED, Phase.FAILED})
_UNASKED = 24  # times the retention: then a node whose provisioner never came back is forgotten, too
_ENDING = frozenset({ProvidedPhase.ENDING, ProvidedPhase.ENDED})
_PREEMPTIONS = frozenset({"PREEMPTED", "SPOT_INTERRUPTED"})
ENDS = "ENDS_SOON"


def start_request(group_id: str) -> str:
    return f"{group_id}/start"


def shutdown_request(group_id: str) -> str:
    return f"{group_id}/shutdown"


def follow_provisioners(draft: Draft) -> None:
    """Node records follow what provisioners say. What they list and no record knows is taken in: it runs, and costs."""
    for provisioner_id in sorted(draft.snapshot.live.provisioners):
        provisioner = draft.snapshot.live.provisioners[provisioner_id]
        for node_id in sorted(provisioner.nodes) if provisioner.reported else ():
            if draft.full:
                return
            _find(draft, provisioner_id, provisioner, provisioner.nodes[node_id])
    held = workers_by_node(draft.workers.values())
    for node_id in sorted(draft.nodes):
        node = draft.nodes[node_id]
        if node.provided is None or node.provided.fixed:
            continue
        if draft.full:
            return
        _follow(draft, node, held)
    for node_id in sorted(draft.nodes):
        if draft.full:
            return
        _follow_unit(draft, draft.nodes[node_id])


def end_lost_workers(draft: Draft) -> None:
    """A worker that is LOST, or was to stop, waits for its node's word. Of a node that was given back, and that its
    provisioner has no more, none will come, and nothing is left of it."""
    for worker in list(draft.workers.values()):
        if worker.intent.phase not in _WAIT_FOR_NODE or not worker.intent.gpu_ids:
            continue
        if draft.full:
            return
        node = draft.nodes.get(worker.intent.node_id)
        if node is not None and _is_no_more(draft, node):
            message = f"its node {node.node_id} was given back"
            lost = worker.intent.phase is Phase.LOST
            ended = draft.step(worker, Cause.DISMISS, reason="NODE_GONE", message=message) if lost else worker
            draft.worker_event(draft.step(ended, Cause.FREE), "worker_freed", "inactive", message=message)


def _is_no_more(draft: Draft, node: Node) -> bool:
    if node.provided is None or node.state is not NodeState.GONE or not node.provided.release:
        return False
    owner = owner_of(draft.snapshot.live, node.provided)
    asked = owner is not None and owner.connected and not is_alive_there(owner.nodes.get(node.node_id))
    return asked and not agent_is_here(draft, node.node_id)


# ------------------------------------------------------------------ taking in


def _find(draft: Draft, provisioner_id: str, provisioner: ProvisionerLive, found: ProvidedNode) -> None:
    node = draft.nodes.get(found.node_id)
    if node is not None and node.provided is not None:
        if node.provided.provisioner_id != provisioner_id and is_alive_there(found):
            draft.note(f"{provisioner_id} lists {found.node_id}, which {node.provided.provisioner_id} gave")
        return
    if node is None and (provisioner.fixed or found.phase in _ENDING):
        return
    if node is not None and node.state is NodeState.GONE:
        return
    kind = provisioner.sets.get(found.capability_set, CapabilitySet(found.capability_set))
    provided = Provision(
        provisioner_id=provisioner_id,
        group_id=found.group_id,
        capability_set=found.capability_set,
        gpus=kind.gpus_per_node,
        spot=kind.spot,
        cost_per_hour=kind.cost_per_hour,
        fixed=provisioner.fixed,
        phase=found.phase,
        reference=found.reference,
        joined=node is not None,
    )
    if node is None:
        deadline = _deadline(draft, found.phase, draft.now)
        observed = NodeObserved(labels=set_labels(provisioner_id, kind), resources=dict(kind.resources))
        provided = dataclasses.replace(provided, register_deadline=deadline)
        node = Node(found.node_id, NodeState.REQUESTED, "FOUND", draft.now, observed=observed, provided=provided)
        node_event(draft, node, "node_found", f"{provisioner_id} has it: {found.reference or found.phase}")
    draft.put(dataclasses.replace(node, provided=provided))


def _deadline(draft: Draft, phase: ProvidedPhase | None, since: float) -> float | None:
    """Until when the agent must be here. While the node waits in its provider's queue only that wait is bounded."""
    rules = draft.snapshot.rules
    if phase is ProvidedPhase.PENDING:
        return since + rules.pending_timeout_s if rules.pending_timeout_s > 0 else None
    return since + rules.register_timeout_s


# ------------------------------------------------------------------ following


def _follow(draft: Draft, node: Node, held: dict[str, list[Worker]]) -> None:
    assert node.provided is not None
    owner = owner_of(draft.snapshot.live, node.provided)
    found = owner.nodes.get(node.node_id) if owner is not None else None
    node = _fold(draft, node, owner, found)
    if node.state is NodeState.REQUESTED:
        _follow_request(draft, node, owner, found)
    elif node.state is NodeState.GONE:
        if node.provided is not None and not node.provided.release:
            node = _keep(draft, node, release=True)  # its agent said goodbye: it is given back
        _forget(draft, node, owner, found)
    else:
        _follow_given(draft, node, owner, found, held)


def _fold(draft: Draft, node: Node, owner: ProvisionerLive | None, found: ProvidedNode | None) -> Node:
    """Keeps what is worth a commit. A node that comes to run has its whole time to register from then on."""
    provided = node.provided
    if provided is None or owner is None or found is None:
        return node
    changes: dict[str, Any] = {"reference": found.reference or provided.reference}
    if found.phase is not provided.phase:
        changes["phase"] = found.phase
        if node.state is NodeState.REQUESTED:
            requested_at = draft.now if provided.requested_at is None else provided.requested_at
            since = requested_at if found.phase is ProvidedPhase.PENDING else draft.now
            changes["register_deadline"] = _deadline(draft, found.phase, since)
    ends_at = owner.ends_at.get(node.node_id)
    if ends_at is None or provided.ends_at is None or abs(ends_at - provided.ends_at) > _MOVED_S:
        changes["ends_at"] = ends_at
    return _keep(draft, node, **changes)


def _keep(draft: Draft, node: Node, **changes: Any) -> Node:
    assert node.provided is not None
    if all(getattr(node.provided, key) == value for key, value in changes.items()):
        return node
    node = dataclasses.replace(node, provided=dataclasses.replace(node.provided, **changes))
    draft.put(node)
    return node


def move(draft: Draft, node: Node, state: NodeState, reason: str, **changes: Any) -> Node:
    """Changes a provided node's state; `changes` are fields of its provision."""
    assert node.provided is not None
    provided = dataclasses.replace(node.provided, **{"idle_since": None, **changes})
    node = dataclasses.replace(node, state=state, reason=reason, state_since=draft.now, provided=provided)
    draft.put(node)
    return node


def _follow_request(draft: Draft, node: Node, owner: ProvisionerLive | None, found: ProvidedNode | None) -> None:
    provided = node.provided
    if provided is None or agent_is_here(draft, node.node_id):
        return  # its hello makes it UP
    if found is not None and found.phase in _ENDING:
        give_up(draft, node, f"{found.reason or 'ENDED'}: {found.message or 'it ended before its agent registered'}")
        return
    answer = owner.answers.get(start_request(provided.group_id)) if owner is not None else None
    if answer is not None and found is None and answer.status not in (None, GroupStatus.SUCCESS):
        give_up(draft, node, f"{answer.status}: {answer.message}")
        return
    deadline = provided.register_deadline
    if deadline is None:
        return
    deadline = max(deadline, draft.snapshot.grace_until)  # nobody was heard while nobody listened
    if draft.now < deadline:
        draft.wake(deadline)
        return
    waited_for = "it stayed in the queue" if provided.phase is ProvidedPhase.PENDING else "its agent did not register"
    give_up(draft, node, f"NEVER_REGISTERED: {waited_for} for {draft.now - node.state_since:.0f} s")


def give_up(draft: Draft, node: Node, message: str, reason: str = "START_FAILED") -> Node:
    """It does not come, or is not wanted before it came: given back, also if it turns up later."""
    node = move(draft, node, NodeState.GONE, reason, release=True, register_deadline=None)
    node_event(draft, node, "node_gone", message)
    return node


def _follow_given(
    draft: Draft,
    node: Node,
    owner: ProvisionerLive | None,
    found: ProvidedNode | None,
    held: dict[str, list[Worker]],
) -> None:
    provided = node.provided
    assert provided is not None
    here = agent_is_here(draft, node.node_id)
    over = found is not None and found.phase is ProvidedPhase.ENDED
    unlisted = owner is not None and owner.connected and found is None and provided.phase is not None
    unlisted = unlisted and draft.now >= draft.snapshot.grace_until
    if not here and (over or unlisted):
        message = found.message if found is not None else "its provisioner has it no more"
        reason = (found.reason if found is not None else "") or ("RELEASED" if provided.release else "ENDED")
        if reason in _PREEMPTIONS:
            node_event(draft, node, "node_preempted", message, reason)
        node_event(draft, move(draft, node, NodeState.GONE, reason, release=True), "node_gone", message)
    elif node.state is NodeState.UP:
        _follow_up(draft, node, found)
    elif node.state is NodeState.RELEASING:
        if node.reason == ENDS and not provided.release and not _ends_soon(draft, provided):
            node_event(draft, move(draft, node, NodeState.UP, "END_MOVED"), "node_up", "its end was put off")
        elif not provided.release and is_empty(draft, node, held, leaving=True):
            _keep(draft, node, release=True)
    elif node.state is NodeState.LOST and not provided.release:
        at = max(node.state_since + draft.snapshot.rules.lost_release_s, draft.snapshot.grace_until)
        draft.wake(at)
        if draft.now >= at:
            node = _keep(draft, node, release=True)
            node_event(draft, node, "node_releasing", "it is lost for too long: given back", "LOST_TOO_LONG")


def _follow_up(draft: Draft, node: Node, found: ProvidedNode | None) -> None:
    provided = node.provided
    assert provided is not None
    if found is not None and found.phase in _ENDING:
        reason = found.reason or "ENDING"
        node = move(draft, node, NodeState.RELEASING, reason)
        action = "node_preempted" if reason in _PREEMPTIONS else "node_releasing"
        node_event(draft, node, action, found.message or "its provisioner takes it back")
    elif provided.ends_at is not None:
        preempted = found is not None and found.reason in _PREEMPTIONS
        lead_s = draft.snapshot.rules.rollover_lead_s
        if not preempted:  # a node that lives for less than the lead serves for half of its time
            lead_s = min(lead_s, (provided.ends_at - node.state_since) / 2)
        if draft.now >= provided.ends_at - lead_s:
            node = move(draft, node, NodeState.RELEASING, ENDS)
            left_s = max(0.0, provided.ends_at - draft.now)
            message = (found.message if found is not None else "") or f"it is taken away in {left_s:.0f} s"
            node_event(draft, node, "node_preempted" if preempted else "node_releasing", message)
        else:
            draft.wake(provided.ends_at - lead_s)


def _ends_soon(draft: Draft, provided: Provision) -> bool:
    return provided.ends_at is not None and draft.now >= provided.ends_at - draft.snapshot.rules.rollover_lead_s


def _follow_unit(draft: Draft, node: Node) -> None:
    """Nodes of one unit go together: when one is given back or gone, the others are, too."""
    provided = node.provided
    if provided is None or provided.fixed or provided.group_id in ("", node.node_id):
        return
    if node.state not in (NodeState.REQUESTED, NodeState.UP):
        return
    for other in draft.nodes.values():
        same = other.provided is not None and other.provided.group_id == provided.group_id
        if same and other.state in (NodeState.RELEASING, NodeState.GONE):
            message = f"{other.node_id} of its unit is {other.state}"
            if node.state is NodeState.REQUESTED:
                give_up(draft, node, message)
            else:
                node_event(draft, move(draft, node, NodeState.RELEASING, "UNIT_ENDS"), "node_releasing", message)
            return


def _forget(draft: Draft, node: Node, owner: ProvisionerLive | None, found: ProvidedNode | None) -> None:
    """A record is kept for a while, and as long as its provisioner has the node or cannot be asked."""
    at = node.state_since + draft.snapshot.rules.gone_retention_s
    if draft.now < at:
        draft.wake(at)
    elif owner is None or not owner.connected:
        if draft.now >= node.state_since + _UNASKED * draft.snapshot.rules.gone_retention_s:
            draft.delete(node)
    elif not is_alive_there(found):
        live = draft.live(node.node_id)
        held = any(w.intent.node_id == node.node_id and w.intent.gpu_ids for w in draft.workers.values())
        if not held and (live is None or not live.connected):
            draft.delete(node)
