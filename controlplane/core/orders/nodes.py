"""Orders that concern a node."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.orders.lookup import node_named
from controlplane.core.snapshot import Plan, Snapshot
from springtide.model.node import NodeSpec
from springtide.model.record import Event


def cordon_node(snapshot: Snapshot, node_id: str, now: float, *, reason: str = "") -> Plan:
    """No new worker is placed on it; what runs there stays."""
    return _set_cordon(snapshot, node_id, now, NodeSpec(True, reason[:200]))


def uncordon_node(snapshot: Snapshot, node_id: str, now: float) -> Plan:
    return _set_cordon(snapshot, node_id, now, NodeSpec())


def _set_cordon(snapshot: Snapshot, node_id: str, now: float, spec: NodeSpec) -> Plan:
    node = node_named(snapshot, node_id)
    draft = Draft(snapshot, now)
    if node.spec != spec:
        draft.put(dataclasses.replace(node, spec=spec))
        action = "node_cordoned" if spec.cordoned else "node_uncordoned"
        status = node.state.value.lower()
        draft.events.append(
            Event(now, action, node_id, status, node_id=node_id, reason="OPERATOR", message=spec.cordon_reason)
        )
    return draft.plan()
