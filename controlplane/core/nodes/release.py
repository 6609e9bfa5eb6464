"""Nodes that nothing needs are given back after a while: those that came, and those that are still on their way."""

import dataclasses
from collections.abc import Iterable

from controlplane.core.draft import Draft
from controlplane.core.nodes.acquire import coming_rooms
from controlplane.core.nodes.facts import COMING_OR_HERE, agent_is_here, is_empty, node_event, workers_by_node
from controlplane.core.nodes.saga import give_up, move
from springtide.model.enums import NodeState
from springtide.model.node import Node
from springtide.model.worker import Worker


def release_idle(draft: Draft) -> None:
    """After all pools have placed what they could. Nothing is concluded from a plan that left work for the next."""
    if draft.was_full:
        return
    needed = draft.needed | {room.node_id for room in coming_rooms(draft) if room.used}
    held = workers_by_node(draft.workers.values())
    units: dict[tuple[str, str], list[Node]] = {}
    for node_id in sorted(draft.nodes):
        node = draft.nodes[node_id]
        if node.provided is not None and not node.provided.fixed and node.state in COMING_OR_HERE:
            units.setdefault((node.provided.provisioner_id, node.provided.group_id), []).append(node)
    due: list[list[Node]] = []
    for members in units.values():
        if draft.full:
            return
        if _note_idle(draft, members, needed, held):
            due.append([draft.nodes[node.node_id] for node in members])
    _release(draft, due, units.values())


def _note_idle(draft: Draft, members: list[Node], needed: set[str], held: dict[str, list[Worker]]) -> bool:
    """Keeps since when the whole unit is idle; whether that is long enough."""
    idle = all(_is_idle(draft, node, needed, held) for node in members)
    since: float | None = None
    for node in members:
        provided = node.provided
        assert provided is not None
        wanted = (draft.now if provided.idle_since is None else provided.idle_since) if idle else None
        if wanted != provided.idle_since:
            draft.put(dataclasses.replace(node, provided=dataclasses.replace(provided, idle_since=wanted)))
        since = wanted if since is None or (wanted is not None and wanted > since) else since
    if not idle or since is None:
        return False
    draft.wake(since + draft.snapshot.rules.idle_s)
    return draft.now >= since + draft.snapshot.rules.idle_s


def _is_idle(draft: Draft, node: Node, needed: set[str], held: dict[str, list[Worker]]) -> bool:
    """A cordoned node stays: somebody wants to look at it. Of an agent that does not report nothing is known."""
    if node.node_id in needed or node.spec.cordoned:
        return False
    if node.state is NodeState.REQUESTED:
        return not agent_is_here(draft, node.node_id)
    live = draft.live(node.node_id)
    return agent_is_here(draft, node.node_id) and live is not None and live.reported and is_empty(draft, node, held)


def _release(draft: Draft, due: list[list[Node]], units: Iterable[list[Node]]) -> None:
    """Dearest first, those on their way before those that are here; never below what their set is to keep."""
    counts: dict[tuple[str, str], int] = {}
    for members in units:
        counts[_set_of(members[0])] = counts.get(_set_of(members[0]), 0) + len(members)
    for members in sorted(due, key=_order):
        key = _set_of(members[0])
        if counts[key] - len(members) < _keep(draft, key) or draft.lacks_room(2 * len(members) + 12):
            continue
        counts[key] -= len(members)
        for node in members:
            idle_s = draft.snapshot.rules.idle_s
            message = f"nothing needed it for {idle_s:g} s"
            if node.state is NodeState.REQUESTED:
                give_up(draft, node, message, "NOT_NEEDED")
            else:
                node_event(
                    draft, move(draft, node, NodeState.RELEASING, "SURPLUS", release=True), "node_releasing", message
                )


def _set_of(node: Node) -> tuple[str, str]:
    assert node.provided is not None
    return node.provided.provisioner_id, node.provided.capability_set


def _order(members: list[Node]) -> tuple[bool, float, str]:
    node = members[0]
    assert node.provided is not None
    return node.state is not NodeState.REQUESTED, -node.provided.cost_per_hour, node.node_id


def _keep(draft: Draft, key: tuple[str, str]) -> int:
    """What the set is to keep; while its provisioner has not said, all of it."""
    provisioner_id, name = key
    provisioner = draft.snapshot.live.provisioners.get(provisioner_id)
    if provisioner is None or not provisioner.reported:
        return 1 << 30
    kind = provisioner.sets.get(name)
    return min(kind.keep_nodes, kind.max_nodes) if kind is not None else 0
