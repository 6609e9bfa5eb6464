"""Orders that concern a node."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.orders.lookup import node_named
from controlplane.core.snapshot import Plan, Snapshot
from springtide.errors import FailedPrecondition
from springtide.model.enums import NodeState
from springtide.model.record import Event


def cordon_node(snapshot: Snapshot, node_id: str, now: float, *, reason: str = "") -> Plan:
    """No new worker is placed on it; what runs there stays."""
    return _set_cordon(snapshot, node_id, now, True, reason[:200])


def uncordon_node(snapshot: Snapshot, node_id: str, now: float) -> Plan:
    return _set_cordon(snapshot, node_id, now, False, "")


def notice_node(snapshot: Snapshot, node_id: str, now: float, in_s: float | None) -> Plan:
    """It is taken away in `in_s` seconds; None: it stays after all. What lives there is moved by the next plan."""
    node = node_named(snapshot, node_id)
    draft = Draft(snapshot, now)
    spec = dataclasses.replace(node.spec, ends_at=None if in_s is None else now + in_s)
    if in_s is not None and node.state in (NodeState.GONE, NodeState.LOST):
        raise FailedPrecondition(
            f"node {node_id} is {node.state}: nothing on it can be drained.",
            reason="NODE_NOT_HERE",
            field="node_id",
            value=node_id,
            remedy="Name a node that is UP.",
        )
    if spec != node.spec:
        draft.put(dataclasses.replace(node, spec=spec))
        action = "node_notice" if in_s is not None else "node_notice_withdrawn"
        message = "" if in_s is None else f"it is taken away in {in_s:g} s"
        status = node.state.value.lower()
        draft.events.append(Event(now, action, node_id, status, node_id=node_id, reason="OPERATOR", message=message))
    return draft.plan()


def _set_cordon(snapshot: Snapshot, node_id: str, now: float, cordoned: bool, reason: str) -> Plan:
    node = node_named(snapshot, node_id)
    draft = Draft(snapshot, now)
    spec = dataclasses.replace(node.spec, cordoned=cordoned, cordon_reason=reason)
    if node.spec != spec:
        draft.put(dataclasses.replace(node, spec=spec))
        action = "node_cordoned" if spec.cordoned else "node_uncordoned"
        status = node.state.value.lower()
        draft.events.append(
            Event(now, action, node_id, status, node_id=node_id, reason="OPERATOR", message=spec.cordon_reason)
        )
    return draft.plan()
