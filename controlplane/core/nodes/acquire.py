"""Nodes for workers that fit nowhere. Called while a pool grows, for what is left over.

What is on its way counts first: nodes REQUESTED, and nodes UP that cannot be reached right now. Only the rest is asked
for, each node once and by one provisioner, in the commit that records the need.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

from controlplane.core.aims import staying
from controlplane.core.draft import Draft
from controlplane.core.nodes.facts import COMING_OR_HERE, node_event, set_labels
from controlplane.core.nodes.offers import Offer, all_offers, best, nodes_of, offers_for, why_none
from controlplane.core.nodes.slots import Room
from controlplane.core.placement import CannotPlace, free_gpus
from controlplane.core.tracing import traceparent_for
from springtide.model.enums import NodeState
from springtide.model.node import Node, NodeObserved, Provision
from springtide.model.pool import Pool
from springtide.model.worker import Worker

MAX_REQUESTS = 16  # units of one pool in one plan; the next plan goes on


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of workers that fit nowhere: how many have a node coming, and a sentence."""

    awaited: int = 0
    text: str = ""


def with_nodes(draft: Draft, pool: Pool, blocked: CannotPlace, workers: int) -> CannotPlace:
    """The same refusal, after nodes were asked for so many workers."""
    outlook = want_nodes(draft, pool, workers)
    draft.awaited[pool.name] = outlook.awaited
    return dataclasses.replace(blocked, awaited=outlook.awaited, outlook=outlook.text)


def want_nodes(draft: Draft, pool: Pool, workers: int) -> Outlook:
    """Promises room on nodes that are coming to so many workers, and asks for what is missing."""
    everything = all_offers(draft)
    hunt = _Hunt(draft, pool, offers_for(draft, pool.spec, everything))
    kinds = _kinds(draft, pool, workers, hunt.offers)
    missing = 0
    without: set[bool | None] = set()  # kinds for which there is none: room only becomes less
    for spot in kinds:
        if spot in without or not hunt.find(spot):
            without.add(spot)
            missing += 1
        elif spot and draft.snapshot.rules.dynamic_fallback:
            hunt.find(False, strictly=True)  # whichever comes first gets the worker
    for offer in hunt.offers:
        draft.wake(offer.blocked_until)
    return Outlook(len(kinds) - missing, _say(hunt.promised, missing, why_none(hunt.offers, everything)))


class _Hunt:
    """Room for the workers of one pool, one after another: each goes where the one before it went, while it fits."""

    def __init__(self, draft: Draft, pool: Pool, offers: list[Offer]) -> None:
        self._draft = draft
        self._pool = pool
        self._seen = 0  # of the draft's rooms
        self._open: list[Room] = []  # those that fitted when they were last looked at, in order
        self._requests = 0
        self.offers = offers
        self.promised: dict[str, None] = {}  # node ids in order

    def find(self, spot: bool | None, *, strictly: bool = False) -> bool:
        """Takes room on a coming node, or asks for a node and takes it there. `spot`: the wanted kind (None: any);
        another kind will do unless `strictly`. False: there is none."""
        room = self._fitting(spot, strictly)
        if room is None:
            self._request(spot, strictly)
            room = self._fitting(spot, strictly)
        if room is None:
            return False
        room.take(self._pool.spec)
        self.promised[room.node_id] = None
        return True

    def _fitting(self, spot: bool | None, strictly: bool) -> Room | None:
        """Of the wanted kind before any other: a node that comes is used, whatever it is."""
        rooms = coming_rooms(self._draft)
        self._open += [room for room in rooms[self._seen :] if room.fits(self._pool.spec)]
        self._seen = len(rooms)
        other: Room | None = None
        while self._open and not self._open[0].fits(self._pool.spec):
            self._open.pop(0)
        for room in self._open:
            if not room.fits(self._pool.spec):
                continue
            if spot is None or room.spot is spot:
                return room
            elif other is None:
                other = room
        return None if strictly else other

    def _request(self, spot: bool | None, strictly: bool) -> None:
        if self._requests >= MAX_REQUESTS:
            self._draft.again()
            return
        usable = [offer for offer in self.offers if not strictly or offer.kind.spot is spot]
        offer = best(self._draft, self._pool.name, usable, spot=spot)
        if offer is None:
            return
        if self._draft.lacks_room(2 * offer.kind.nodes_per_unit + 12):
            return
        request_unit(self._draft, offer, self._pool.name, f"workers of {self._pool.name} fit nowhere")
        self._requests += 1
        left = dataclasses.replace(offer, room=offer.room - offer.kind.nodes_per_unit)
        self.offers = [left if found == offer else found for found in self.offers]


def _kinds(draft: Draft, pool: Pool, workers: int, offers: list[Offer]) -> list[bool | None]:
    """For each worker whether it belongs on a spot node; None: wherever it is cheapest. The first of each pool stay off
    spot nodes (base_on_demand)."""
    if not any(offer.kind.spot for offer in offers) or all(offer.kind.spot for offer in offers):
        return [None] * workers
    steady = sum(1 for worker in staying(draft, pool) if not on_spot(draft, worker))
    base = min(workers, max(0, draft.snapshot.rules.base_on_demand - steady))
    return [index >= base for index in range(workers)]


def on_spot(draft: Draft, worker: Worker) -> bool:
    node = draft.nodes.get(worker.intent.node_id)
    return node is not None and node.provided is not None and node.provided.spot


def _say(promised: dict[str, None], missing: int, why: str) -> str:
    waits = f"waits for {', '.join(list(promised)[:8])}" if promised else ""
    return "; ".join(part for part in (waits, why if missing else "") if part)


def coming_rooms(draft: Draft) -> list[Room]:
    """Made once per plan; requests of this plan are added, promises of all pools are kept in it."""
    if draft.rooms is None:
        held: dict[str, list[Worker]] = {}
        for worker in draft.workers.values():
            held.setdefault(worker.intent.node_id, []).append(worker)
        found = [_room(draft, draft.nodes[node_id], held.get(node_id, [])) for node_id in sorted(draft.nodes)]
        draft.rooms = [room for room in found if room is not None]
    return draft.rooms


def _room(draft: Draft, node: Node, held: list[Worker]) -> Room | None:
    provided = node.provided
    if node.spec.cordoned or (provided is not None and provided.release):
        return None
    spot = provided is not None and provided.spot
    if node.state is NodeState.REQUESTED and provided is not None:
        labels, resources = node.observed.labels, dict(node.observed.resources)
        return Room(node.node_id, labels, provided.gpus, provided.gpus, resources, spot)
    live = draft.live(node.node_id)
    if node.state is not NodeState.UP or (live is not None and live.connected and live.reported):
        return None  # what is here has been tried, what leaves does not count
    resources = dict(node.observed.resources)
    for worker in held:
        pool = draft.pools.get(worker.pool)
        if worker.intent.gpu_ids and pool is not None:
            for key, amount in pool.spec.resources.items():
                resources[key] = resources.get(key, 0) - amount
    free = len(free_gpus(node, held, live))
    return Room(node.node_id, node.observed.labels, len(node.observed.gpus), free, resources, spot)


def request_unit(draft: Draft, offer: Offer, pool: str, why: str) -> None:
    """Records a unit of nodes; the order follows from the records once they are committed."""
    kind, snapshot = offer.kind, draft.snapshot
    draft.requested += 1
    seed = f"{snapshot.store_id}/{snapshot.revision}/{offer.name}/{draft.requested}"
    digest = hashlib.sha256(seed.encode()).hexdigest()[:10]
    group_id = f"{offer.provisioner_id[:40]}-{kind.name[:60]}-{digest}"  # an id has at most 128 characters
    ids = [group_id] if kind.nodes_per_unit == 1 else [f"{group_id}-{n}" for n in range(kind.nodes_per_unit)]
    observed = NodeObserved(labels=set_labels(offer.provisioner_id, kind), resources=dict(kind.resources))
    for node_id in ids:
        provided = Provision(
            provisioner_id=offer.provisioner_id,
            group_id=group_id,
            capability_set=kind.name,
            gpus=kind.gpus_per_node,
            spot=kind.spot,
            cost_per_hour=kind.cost_per_hour,
            pool=pool,
            requested_at=draft.now,
            register_deadline=draft.now + snapshot.rules.register_timeout_s,
            traceparent=traceparent_for(snapshot.store_id, snapshot.revision, node_id, 1),
        )
        node = Node(node_id, NodeState.REQUESTED, "NEEDED", draft.now, observed=observed, provided=provided)
        draft.put(node)
        node_event(draft, node, "node_requested", f"{why}; from {offer.name}")
        room = Room(node_id, observed.labels, provided.gpus, provided.gpus, dict(kind.resources), kind.spot)
        coming_rooms(draft).append(room)


def keep_sets(draft: Draft) -> None:
    """Greedy sets: so many nodes whatever pools ask for, within the cap."""
    for offer in all_offers(draft):
        wanted = min(offer.kind.keep_nodes, offer.kind.max_nodes)
        here = sum(
            1
            for node in nodes_of(draft.nodes.values(), offer.provisioner_id, offer.kind.name)
            if node.state in COMING_OR_HERE and node.provided is not None and not node.provided.release
        )
        missing = wanted - here
        if missing > 0:
            draft.wake(offer.blocked_until)
        units = min(-(-missing // offer.kind.nodes_per_unit), offer.units) if offer.blocked_until is None else 0
        for _ in range(min(units, MAX_REQUESTS)):
            if draft.lacks_room(2 * offer.kind.nodes_per_unit + 12):
                return
            request_unit(draft, offer, "", f"{here} of {wanted} nodes to keep")
            coming_rooms(draft)[-1].used = True
