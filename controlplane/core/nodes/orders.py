"""What a provisioner is told, derived from the records alone: re-sent as a whole, the same after every restart."""

from collections.abc import Mapping

from controlplane.core.nodes.saga import shutdown_request, start_request
from controlplane.core.snapshot import Snapshot
from springtide.model.enums import NodeState
from springtide.model.node import Node
from springtide.model.provisioning import (
    DesiredNodes,
    GroupOrder,
    Orders,
    ProvidedNode,
    ProvidedPhase,
    ShutdownOrder,
    StartOrder,
)

_GIVEN = frozenset({NodeState.REQUESTED, NodeState.UP})


def provisioner_orders(snapshot: Snapshot, provisioner_id: str) -> Orders:
    """Of its own nodes only. Join tokens are added when the orders are sent; they are in no record."""
    live = snapshot.live.provisioners.get(provisioner_id)
    own = [
        node
        for _, node in sorted(snapshot.nodes.items())
        if node.provided is not None and node.provided.provisioner_id == provisioner_id
    ]
    if live is None or live.fixed:
        return Orders(known_node_ids=tuple(node.node_id for node in own))
    groups: dict[str, list[Node]] = {}
    for node in own:
        assert node.provided is not None
        groups.setdefault(node.provided.group_id, []).append(node)
    seen = live.nodes if live.reported else {}
    starts = [_start(group_id, members) for group_id, members in groups.items() if _is_wanted(members, seen)]
    shutdowns = [
        _shutdown(group_id, members) for group_id, members in groups.items() if _may_go(members, seen, live.reported)
    ]
    return Orders(
        desired=_desired(snapshot, own, sorted(live.sets)),
        start=tuple(starts),
        shutdown=tuple(shutdowns),
        known_node_ids=tuple(node.node_id for node in own),
    )


def _is_wanted(members: list[Node], seen: Mapping[str, ProvidedNode]) -> bool:
    """Some of it has not come, and none of it is given back."""
    listed = [_phase(node, seen) for node in members if node.state is NodeState.REQUESTED]
    if not listed or any(node.state not in _GIVEN or (node.provided and node.provided.release) for node in members):
        return False
    return any(phase in (None, ProvidedPhase.PENDING) for phase in listed)


def _may_go(members: list[Node], seen: Mapping[str, ProvidedNode], reported: bool) -> bool:
    """All of it is drained, or never came; and its provisioner has it, or has not said."""
    if not all(node.provided is not None and node.provided.release for node in members):
        return False
    if not reported:
        return any(node.state is not NodeState.GONE for node in members)
    return any(_phase(node, seen) not in (None, ProvidedPhase.ENDED) for node in members)


def _phase(node: Node, seen: Mapping[str, ProvidedNode]) -> ProvidedPhase | None:
    found = seen.get(node.node_id)
    return found.phase if found is not None else None


def _start(group_id: str, members: list[Node]) -> StartOrder:
    first = members[0].provided
    assert first is not None
    group = GroupOrder(
        group_id, first.capability_set, tuple(node.node_id for node in members), traceparent=first.traceparent
    )
    return StartOrder(start_request(group_id), group)


def _shutdown(group_id: str, members: list[Node]) -> ShutdownOrder:
    ids = tuple(node.node_id for node in members)
    return ShutdownOrder(shutdown_request(group_id), group_id, ids, members[0].reason)


def _desired(snapshot: Snapshot, own: list[Node], sets: list[str]) -> tuple[DesiredNodes, ...]:
    return tuple(desired_of(snapshot, own, name) for name in sets)


def desired_of(snapshot: Snapshot, own: list[Node], name: str) -> DesiredNodes:
    """REQUESTED and UP nodes of a set are what is wanted; those whose agents report are connected."""
    wanted = [node for node in own if node.provided and node.provided.capability_set == name and node.state in _GIVEN]
    lives = [snapshot.live.nodes.get(node.node_id) for node in wanted]
    connected = sum(1 for live in lives if live is not None and live.connected)
    latest = max((node.revision for node in wanted), default=0)
    return DesiredNodes(name, len(wanted), connected, f"{snapshot.store_id}/{latest}")
