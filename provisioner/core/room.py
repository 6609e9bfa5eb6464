"""What every provider that lists its own nodes asks of an order before it acts. Raises Refused; pure."""

from collections.abc import Mapping

from provisioner.core.provider import GroupOrder, Phase, ProvidedNode, Refused

_OVER = (Phase.ENDING, Phase.ENDED)


def named(group_id: str) -> str:
    """A group's id that is one."""
    if not group_id:
        raise Refused("WORKER_GROUP_ID_NOT_SPECIFIED", "The order names no group.")
    return group_id


def missing_nodes(
    order: GroupOrder, listed: Mapping[str, ProvidedNode], *, set_name: str, max_nodes: int
) -> tuple[str, ...]:
    """Nodes of the order that are not `listed` (by node id) and for which there is room."""
    if order.capability_set not in ("", set_name):
        raise Refused("WORKER_GROUP_TOO_MUCH", f"There is no capability set {order.capability_set!r} here.")
    group = [node for node in listed.values() if node.group_id == order.group_id]
    if group and all(node.phase in _OVER for node in group):
        raise Refused("WORKER_GROUP_SHUTDOWN", f"The nodes of group {order.group_id} have ended.")
    missing = tuple(node_id for node_id in order.node_ids if node_id not in listed)
    there = sum(node.phase is not Phase.ENDED for node in listed.values())
    if there + len(missing) > max_nodes:
        raise Refused("WORKER_GROUP_TOO_MUCH", f"{there} nodes are there and {max_nodes} is the most.")
    return missing


def nodes_of_group(group_id: str, listed: Mapping[str, ProvidedNode]) -> tuple[ProvidedNode, ...]:
    """At least one."""
    found = tuple(node for node in listed.values() if node.group_id == group_id)
    if not found:
        raise Refused("WORKER_GROUP_ID_NOT_FOUND", f"There is no node of group {group_id}.")
    return found
