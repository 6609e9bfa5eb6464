"""Spot and on-demand nodes, after SkyServe's rule: `base_on_demand` workers of each pool stay off spot nodes, the rest
goes on them. With `dynamic_fallback` on-demand nodes stand in for spot nodes that are not ready:

    spot target = N - base,   on-demand target = base + (spot target - ready on spot)

So both are asked for at once; the worker starts where room comes first. When spot nodes are ready, the nodes that
stood in for them are given back: their workers move as those of any leaving node do.
"""

import dataclasses

from controlplane.core.aims import staying
from controlplane.core.draft import Draft
from controlplane.core.nodes.acquire import coming_rooms, on_spot, request_unit
from controlplane.core.nodes.facts import SPOT_IS_BACK, node_event, workers_by_node
from controlplane.core.nodes.offers import Offer, all_offers, best, offers_for
from controlplane.core.nodes.saga import move
from controlplane.core.nodes.slots import Room, fits_gpus, fits_labels
from controlplane.core.placement import free_gpus
from springtide.model.enums import NodeState
from springtide.model.pool import Pool, PoolSpec
from springtide.model.worker import Worker


def restore_mix(draft: Draft) -> None:
    """After all pools have placed what they could: what stood in goes back to spot nodes."""
    if not draft.snapshot.rules.dynamic_fallback or draft.was_full:
        return
    offers = all_offers(draft)
    for name in sorted(draft.pools):
        pool = draft.pools[name]
        fitting = offers_for(draft, pool.spec, offers)
        if not pool.intent.deleting and any(offer.kind.spot for offer in fitting):
            _restore(draft, pool, fitting)


def _restore(draft: Draft, pool: Pool, offers: list[Offer]) -> None:
    steady = [worker for worker in staying(draft, pool) if not on_spot(draft, worker)]
    held = workers_by_node(draft.workers.values())
    counts: dict[str, int] = {}  # of those that are started again elsewhere; a sleeper of such a node is stopped
    for worker in steady:
        if _can_go_back(draft, worker.intent.node_id, held, pool):
            counts[worker.intent.node_id] = counts.get(worker.intent.node_id, 0) + 1
    here = _free_on_spot(draft, pool)
    free = sum(here.values())
    spot_offers = [offer for offer in offers if offer.kind.spot]
    coming = sum(_fitting(room, pool.spec) for room in coming_rooms(draft) if room.spot)
    could = free + coming + sum(offer.units * offer.kind.nodes_per_unit * offer.workers for offer in spot_offers)
    leaving = _whole_nodes(draft, counts, min(could, len(steady) - draft.snapshot.rules.base_on_demand))
    excess = sum(counts[node_id] for node_id in leaving)
    if excess <= 0:
        return
    draft.needed.update(here)
    missing = excess - free
    for room in coming_rooms(draft):
        while missing > 0 and room.spot and room.fits(pool.spec):
            room.take(pool.spec)
            missing -= 1
    offer = best(draft, pool.name, spot_offers, spot=True)
    if missing > 0 and offer is not None and not draft.lacks_room(2 * offer.kind.nodes_per_unit + 12):
        request_unit(draft, offer, pool.name, f"{excess} workers of {pool.name} are on nodes that stand in for spot")
        coming_rooms(draft)[-1].used = True
    goes = next((node_id for node_id in leaving if counts[node_id] <= free), None)
    if goes is not None:
        _move(draft, pool, goes)


def _whole_nodes(draft: Draft, counts: dict[str, int], most: int) -> list[str]:
    """Nodes that can be emptied by moving at most so many workers, dearest first: a node goes as a whole, and what
    would not empty one is not worth a spot node."""
    found: list[str] = []
    for node_id in sorted(counts, key=lambda key: (-_cost(draft, key), key)):
        if counts[node_id] <= most:
            most -= counts[node_id]
            found.append(node_id)
    return found


def _cost(draft: Draft, node_id: str) -> float:
    provided = draft.nodes[node_id].provided
    return provided.cost_per_hour if provided is not None else 0.0


def _fitting(room: Room, spec: PoolSpec) -> int:
    """Workers that a coming node could take; nothing is promised."""
    trial, count = dataclasses.replace(room, resources=dict(room.resources)), 0
    while trial.fits(spec):
        trial.take(spec)
        count += 1
    return count


def _free_on_spot(draft: Draft, pool: Pool) -> dict[str, int]:
    """Workers that spot nodes which are UP could take now, by node."""
    size, free = pool.spec.tensor_parallel_size, dict[str, int]()
    for node in draft.nodes.values():
        live = draft.live(node.node_id)
        up = node.state is NodeState.UP and not node.spec.cordoned and live is not None and live.reported
        if not up or node.provided is None or not node.provided.spot:
            continue
        if fits_labels(pool.spec, node.observed.labels) and fits_gpus(len(node.observed.gpus), size):
            room = len(free_gpus(node, draft.workers.values(), live)) // size
            if room:
                free[node.node_id] = room
    return free


def _move(draft: Draft, pool: Pool, node_id: str) -> None:
    """One on-demand node at a time."""
    if any(n.state is NodeState.RELEASING and n.reason == SPOT_IS_BACK for n in draft.nodes.values()):
        return
    node = draft.nodes[node_id]
    if node.state is NodeState.UP:
        node = move(draft, node, NodeState.RELEASING, SPOT_IS_BACK)
        node_event(draft, node, "node_releasing", f"spot nodes take over its workers of {pool.name}")


def _can_go_back(draft: Draft, node_id: str, held: dict[str, list[Worker]], pool: Pool) -> bool:
    """An on-demand node that somebody takes back, with workers of this pool only: one that is used by others stays, and
    one that nobody takes back costs nothing more while it is used."""
    node = draft.nodes.get(node_id)
    provided = node.provided if node is not None else None
    if provided is None or provided.fixed or provided.spot:
        return False
    return all(worker.pool == pool.name for worker in held.get(node_id, ()))
