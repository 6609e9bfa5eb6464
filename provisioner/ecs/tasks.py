"""A task of ECS as a provided node. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from provisioner.core.provider import Phase, ProvidedNode

PROVISIONER, GROUP, NODE, SET = (f"springtide:{key}" for key in ("provisioner", "group", "node", "capability-set"))

_PHASES = {
    "PROVISIONING": Phase.PENDING,
    "PENDING": Phase.PENDING,
    "ACTIVATING": Phase.PENDING,
    "RUNNING": Phase.RUNNING,
    "DEACTIVATING": Phase.ENDING,
    "STOPPING": Phase.ENDING,
    "DEPROVISIONING": Phase.ENDING,
    "STOPPED": Phase.ENDED,
    "DELETED": Phase.ENDED,
}
_REASONS = {
    "SpotInterruption": "PREEMPTED",
    "TerminationNotice": "PREEMPTED",
    "UserInitiated": "CANCELLED",
    "ServiceSchedulerInitiated": "CANCELLED",
    "TaskFailedToStart": "START_FAILED",
    "EssentialContainerExited": "AGENT_EXITED",
}


def tags(provisioner_id: str, group_id: str, node_id: str, capability_set: str) -> list[dict[str, str]]:
    """What tells whose task it is, also to a later process."""
    values = {PROVISIONER: provisioner_id, GROUP: group_id, NODE: node_id, SET: capability_set}
    return [{"key": key, "value": value} for key, value in values.items()]


def node_of(task: Mapping[str, Any], provisioner_id: str) -> ProvidedNode | None:
    """None: the task is not ours. A status that this version does not know counts as pending."""
    found = {tag["key"]: tag["value"] for tag in task.get("tags", ())}
    if found.get(PROVISIONER) != provisioner_id or not found.get(NODE):
        return None
    phase = _PHASES.get(task.get("lastStatus", ""), Phase.PENDING)
    # ECS says what is wanted before it says what is: a task that is to stop is on its way out.
    if task.get("desiredStatus") == "STOPPED" and phase in (Phase.PENDING, Phase.RUNNING):
        phase = Phase.ENDING
    leaving = phase in (Phase.ENDING, Phase.ENDED)
    return ProvidedNode(
        node_id=found[NODE],
        group_id=found.get(GROUP, ""),
        capability_set=found.get(SET, ""),
        phase=phase,
        reference=task.get("taskArn", ""),
        reason=_REASONS.get(task.get("stopCode", ""), "STOPPED") if leaving else "",
        message=task.get("stoppedReason", "") if leaving else "",
    )


def newest_of_each(nodes: Iterable[ProvidedNode]) -> dict[str, ProvidedNode]:
    """By node id. A living task counts before an ended one; of two living ones the one with the lower name."""
    chosen: dict[str, ProvidedNode] = {}
    for node in sorted(nodes, key=lambda node: (node.phase is Phase.ENDED, node.reference)):
        chosen.setdefault(node.node_id, node)
    return chosen
