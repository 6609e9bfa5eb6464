"""Nodes that a provisioner lists and no record knows: of an earlier store, or of agents that came by themselves."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.nodes.facts import ENDING, is_alive_there, node_event, register_deadline, set_labels
from controlplane.core.snapshot import ProvisionerLive
from springtide.model.enums import NodeState
from springtide.model.node import Node, NodeObserved, Provision
from springtide.model.provisioning import CapabilitySet, ProvidedNode


def take_in(draft: Draft, provisioner_id: str, provisioner: ProvisionerLive, found: ProvidedNode) -> None:
    """It runs, and costs: it is used where it fits, and given back where nothing needs it."""
    node = draft.nodes.get(found.node_id)
    if node is not None and node.provided is not None:
        if node.provided.provisioner_id != provisioner_id and is_alive_there(found):
            draft.note(f"{provisioner_id} lists {found.node_id}, which {node.provided.provisioner_id} gave")
        return
    if node is None and (provisioner.fixed or found.phase in ENDING):
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
        deadline = register_deadline(draft, found.phase, draft.now)
        observed = NodeObserved(labels=set_labels(provisioner_id, kind), resources=dict(kind.resources))
        provided = dataclasses.replace(provided, register_deadline=deadline)
        node = Node(found.node_id, NodeState.REQUESTED, "FOUND", draft.now, observed=observed, provided=provided)
        node_event(draft, node, "node_found", f"{provisioner_id} has it: {found.reference or found.phase}")
    draft.put(dataclasses.replace(node, provided=provided))
