"""What could be had for a pool now, best first: sets of the provisioners that are here, within their caps, not in
back-off."""

import dataclasses
from collections.abc import Iterable, Iterator

from controlplane.core.draft import Draft
from controlplane.core.nodes.facts import is_alive_there, set_labels
from controlplane.core.nodes.slots import workers_of_node
from controlplane.core.snapshot import NodeRules, Snapshot
from springtide.model.enums import NodeState
from springtide.model.node import Gpu, Node, NodeObserved
from springtide.model.pool import PoolSpec
from springtide.model.provisioning import CapabilitySet

_UNKNOWN = float("inf")
_LIKE = "?"  # no node's id begins with it


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """One set of one provisioner. `room`: nodes that its cap leaves."""

    provisioner_id: str
    kind: CapabilitySet
    room: int
    workers: int = 0  # of the pool that an empty node holds
    blocked_until: float | None = None
    coming: int = 0  # nodes REQUESTED

    @property
    def name(self) -> str:
        return f"{self.provisioner_id}/{self.kind.name}"

    @property
    def units(self) -> int:
        return max(0, self.room) // self.kind.nodes_per_unit

    @property
    def cost(self) -> float:
        """Of one worker. A set that does not say its cost comes after those that do."""
        return self.kind.cost_per_hour / self.workers if self.kind.cost_per_hour > 0 and self.workers else _UNKNOWN


def all_offers(draft: Draft) -> list[Offer]:
    """Every set of every provisioner that is here and gives nodes on order. Kept in the draft while no node changes."""
    if draft.offers is None:
        draft.offers = list(_all_offers(draft))
    return draft.offers


def _all_offers(draft: Draft) -> Iterator[Offer]:
    givers = {
        key: live
        for key, live in sorted(draft.snapshot.live.provisioners.items())
        if live.connected and live.reported and not live.fixed
    }
    if not givers:
        return
    own: dict[tuple[str, str], list[Node]] = {}
    for node in draft.nodes.values():
        if node.provided is not None:
            own.setdefault((node.provided.provisioner_id, node.provided.capability_set), []).append(node)
    for provisioner_id, provisioner in givers.items():
        there: dict[str, set[str]] = {}
        for found in provisioner.nodes.values():
            if is_alive_there(found):
                there.setdefault(found.capability_set, set()).add(found.node_id)
        for name in sorted(provisioner.sets):
            kind, members = provisioner.sets[name], own.get((provisioner_id, name), [])
            recorded = {node.node_id for node in members if node.state is not NodeState.GONE}
            room = kind.max_nodes - len(recorded | there.get(name, set()))  # a GONE node that is still there counts
            coming = sum(1 for node in members if node.state is NodeState.REQUESTED)
            blocked_until = _blocked_until(members, draft.snapshot.rules, draft.now)
            yield Offer(provisioner_id, kind, room, blocked_until=blocked_until, coming=coming)


def nodes_of(nodes: Iterable[Node], provisioner_id: str, name: str) -> Iterable[Node]:
    for node in nodes:
        provided = node.provided
        if provided is not None and (provided.provisioner_id, provided.capability_set) == (provisioner_id, name):
            yield node


def blocked_sets(snapshot: Snapshot, provisioner_id: str, now: float) -> dict[str, float]:
    """Until when the sets of a provisioner are left alone because their nodes did not come."""
    names = {n.provided.capability_set for n in snapshot.nodes.values() if n.provided is not None}
    found = {
        name: _blocked_until(nodes_of(snapshot.nodes.values(), provisioner_id, name), snapshot.rules, now)
        for name in names
    }
    return {name: until for name, until in found.items() if until is not None}


def _blocked_until(nodes: Iterable[Node], rules: NodeRules, now: float) -> float | None:
    """After nodes that did not come the set is left alone for a while, longer with each in a row."""
    failed: list[float] = []
    came = 0.0
    for node in nodes:
        if node.provided is not None and node.provided.joined:
            came = max(came, node.state_since)
        elif node.state is NodeState.GONE and node.reason == "START_FAILED":
            failed.append(node.state_since)
    in_a_row = sorted({at for at in failed if at > came})  # those of one moment count as one
    if not in_a_row:
        return None
    until = in_a_row[-1] + min(rules.backoff_s * 2.0 ** min(len(in_a_row) - 1, 32), rules.backoff_max_s)
    return until if until > now else None


def offers_for(draft: Draft, spec: PoolSpec, offers: Iterable[Offer]) -> list[Offer]:
    """Those whose nodes hold the pool's workers, whether they can be had now or not."""
    found: list[Offer] = []
    for offer in offers:
        workers = workers_of_node(spec, offer.kind, set_labels(offer.provisioner_id, offer.kind))
        if workers:
            found.append(dataclasses.replace(offer, workers=workers))
    return found


def best(draft: Draft, pool: str, offers: Iterable[Offer], *, spot: bool | None = None) -> Offer | None:
    """The one to take next: where the policy wants its workers, of the wanted kind (spot or not; None: either), with
    nodes that can be had now, cheapest for one worker. A set whose cap is reached or that is in back-off is none."""
    prefer = draft.preferences.get(pool)

    def rank(offer: Offer) -> tuple[int, bool, bool, float, str]:
        shared = 0 if prefer is None else prefer(_likeness(offer))
        unlike = spot is not None and offer.kind.spot is not spot
        return shared, unlike, offer.kind.available_nodes == 0, offer.cost, offer.name

    usable = [offer for offer in offers if offer.units > 0 and offer.blocked_until is None]
    return min(usable, key=rank, default=None)


def _likeness(offer: Offer) -> Node:
    """A node as it would be."""
    kind = offer.kind
    gpus = tuple(Gpu(str(index)) for index in range(kind.gpus_per_node))
    observed = NodeObserved(gpus=gpus, labels=set_labels(offer.provisioner_id, kind), resources=kind.resources)
    return Node(f"{_LIKE}{offer.name}", observed=observed)


def likely_nodes(draft: Draft, spec: PoolSpec, room: dict[str, int]) -> list[Node]:
    """One node as it would be for each set that could still give, or is giving, some for the pool; `room` gets how many
    workers fit on all of them. For policies, which otherwise see nodes that are UP only."""
    found: list[Node] = []
    for offer in offers_for(draft, spec, all_offers(draft)):
        more = 0 if offer.blocked_until is not None else offer.units * offer.kind.nodes_per_unit
        if offer.coming + more > 0:
            node = _likeness(offer)
            room[node.node_id] = (offer.coming + more) * offer.workers
            found.append(node)
    return found


def why_none(offers: Iterable[Offer], all_of: Iterable[Offer]) -> str:
    """One sentence: why no node is asked for."""
    fitting = list(offers)
    if not fitting:
        others = list(all_of)
        if not others:
            return ""
        return f"no capability set fits: {', '.join(offer.name for offer in others[:8])}"
    parts = []
    for offer in fitting[:8]:
        if offer.units <= 0:
            parts.append(f"{offer.name} has reached its cap of {offer.kind.max_nodes} nodes")
        elif offer.blocked_until is not None:
            parts.append(f"{offer.name} waits after nodes that did not come")
        else:
            parts.append(f"{offer.name} could give more")
    return "; ".join(parts)
