"""What is left when a node was given back: workers that wait for its word, and its record."""

from controlplane.core.draft import Draft
from controlplane.core.nodes.facts import agent_is_here, is_alive_there, owner_of
from controlplane.core.snapshot import ProvisionerLive
from controlplane.core.worker import Cause
from springtide.model.enums import NodeState, Phase
from springtide.model.node import Node
from springtide.model.provisioning import ProvidedNode

_WAIT_FOR_NODE = frozenset({Phase.LOST, Phase.STOPPED, Phase.FAILED})
_UNASKED = 24  # times the retention: then a node whose provisioner never came back is forgotten, too


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


def forget_node(draft: Draft, node: Node, owner: ProvisionerLive | None, found: ProvidedNode | None) -> None:
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
