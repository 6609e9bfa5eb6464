"""One node's way, as its provisioner tells it: REQUESTED -> UP -> RELEASING -> GONE, and LOST.

An agent's own word comes before its provisioner's: a node whose agent reports is not gone. But a node that is given
back, or did not come in time, never counts as capacity again, whatever arrives late.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from controlplane.core.draft import Draft
from controlplane.core.nodes.ends import forget_node
from controlplane.core.nodes.facts import (
    ENDING,
    agent_is_here,
    is_empty,
    node_event,
    owner_of,
    register_deadline,
    workers_by_node,
)
from controlplane.core.nodes.found import take_in
from controlplane.core.snapshot import ProvisionerLive
from springtide.model.enums import NodeState
from springtide.model.node import Node, Provision
from springtide.model.provisioning import GroupStatus, ProvidedNode, ProvidedPhase
from springtide.model.worker import Worker

_MOVED_S = 2.0  # an end that moves by less has not moved
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
            take_in(draft, provisioner_id, provisioner, provisioner.nodes[node_id])
    held = workers_by_node(draft.workers.values())
    for node_id in sorted(draft.nodes):
        node = draft.nodes[node_id]
        if node.provided is None or node.provided.fixed:
            continue
        if draft.full:
            return
        _follow(draft, node, held)
    leaving = _leaving_units(draft)
    for node_id in sorted(draft.nodes) if leaving else ():
        if draft.full:
            return
        _follow_unit(draft, draft.nodes[node_id], leaving)


def _follow(draft: Draft, node: Node, held: dict[str, list[Worker]]) -> None:
    assert node.provided is not None
    owner = owner_of(draft.snapshot.live, node.provided)
    found = owner.nodes.get(node.node_id) if owner is not None else None
    node = _fold(draft, node, owner, found)
    if node.state in (NodeState.RELEASING, NodeState.GONE, NodeState.LOST):
        node = _tell_preemption(draft, node, found)  # its agent's own notice came first
    elif node.state is NodeState.UP and not _is_preempted(found):
        node = _keep(draft, node, preempted=False)  # that was taken back: another one is another event
    if node.state is NodeState.REQUESTED:
        _follow_request(draft, node, owner, found)
    elif node.state is NodeState.GONE:
        if node.provided is not None and not node.provided.release:
            node = _keep(draft, node, release=True)  # its agent said goodbye: it is given back
        forget_node(draft, node, owner, found)
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
            changes["register_deadline"] = register_deadline(draft, found.phase, since)
    ends_at = owner.ends_at.get(node.node_id)
    if ends_at is None or provided.ends_at is None or abs(ends_at - provided.ends_at) > _MOVED_S:
        changes["ends_at"] = ends_at
    return _keep(draft, node, **changes)


def _is_preempted(found: ProvidedNode | None) -> bool:
    return found is not None and found.reason in _PREEMPTIONS


def _tell_preemption(draft: Draft, node: Node, found: ProvidedNode | None, message: str = "") -> Node:
    """Once, whoever speaks first: the agent, whose notice says nothing of why, or its provisioner. Also of a node whose
    agent has left in order before its provisioner knew. The same node as before: there was nothing to tell."""
    if found is None or not _is_preempted(found) or node.provided is None or node.provided.preempted:
        return node
    node = _keep(draft, node, preempted=True)
    message = message or found.message or "its provisioner takes it back"
    node_event(draft, node, "node_preempted", message, found.reason)
    return node


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
    if found is not None and found.phase in ENDING:
        node = _tell_preemption(draft, node, found)
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
        node = _tell_preemption(draft, node, found)
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
    if found is not None and found.phase in ENDING:
        reason = found.reason or "ENDING"
        node = move(draft, node, NodeState.RELEASING, reason)
        _say_leaving(draft, node, found, found.message or "its provisioner takes it back")
    elif provided.ends_at is not None:
        lead_s = draft.snapshot.rules.rollover_lead_s
        if not _is_preempted(found):  # a node that lives for less than the lead serves for half of its time
            lead_s = min(lead_s, (provided.ends_at - node.state_since) / 2)
        if draft.now >= provided.ends_at - lead_s:
            node = move(draft, node, NodeState.RELEASING, ENDS)
            left_s = max(0.0, provided.ends_at - draft.now)
            message = (found.message if found is not None else "") or f"it is taken away in {left_s:.0f} s"
            _say_leaving(draft, node, found, message)
        else:
            draft.wake(provided.ends_at - lead_s)


def _say_leaving(draft: Draft, node: Node, found: ProvidedNode | None, message: str) -> None:
    if _tell_preemption(draft, node, found, message) is node:
        node_event(draft, node, "node_releasing", message)


def _ends_soon(draft: Draft, provided: Provision) -> bool:
    return provided.ends_at is not None and draft.now >= provided.ends_at - draft.snapshot.rules.rollover_lead_s


def _leaving_units(draft: Draft) -> dict[tuple[str, str], Node]:
    """One node of each unit that has one RELEASING or GONE, by provisioner and group. A node that follows it adds no
    unit, so that one pass is enough."""
    found: dict[tuple[str, str], Node] = {}
    for node in draft.nodes.values():
        if node.provided is not None and node.state in (NodeState.RELEASING, NodeState.GONE):
            found.setdefault((node.provided.provisioner_id, node.provided.group_id), node)
    return found


def _follow_unit(draft: Draft, node: Node, leaving: Mapping[tuple[str, str], Node]) -> None:
    """Nodes of one unit go together: when one is given back or gone, the others are, too."""
    provided = node.provided
    if provided is None or provided.fixed or provided.group_id in ("", node.node_id):
        return
    other = leaving.get((provided.provisioner_id, provided.group_id))
    if other is None or node.state not in (NodeState.REQUESTED, NodeState.UP):
        return
    message = f"{other.node_id} of its unit is {other.state}"
    if node.state is NodeState.REQUESTED:
        give_up(draft, node, message)
    else:
        node_event(draft, move(draft, node, NodeState.RELEASING, "UNIT_ENDS"), "node_releasing", message)
