"""Where a pool's workers belong when its policy shares them out: which nodes are short, which workers are surplus."""

from collections.abc import Callable, Sequence

from controlplane.core.draft import Draft
from controlplane.core.policy import Share
from controlplane.core.supply import offers_of, provisioner_of
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.worker import Worker


def fits(share: Share, node: Node, pool: Pool) -> bool:
    return share.provisioner in (None, provisioner_of(node)) and (
        not share.needs or share.needs <= offers_of(node, pool)
    )


def missing(
    draft: Draft, pool: Pool, shares: Sequence[Share], workers: Sequence[Worker]
) -> tuple[list[int], list[Worker]]:
    """(workers that each share lacks, workers that no share counts). Each worker counts for one share only."""
    left = [share.workers for share in shares]
    surplus: list[Worker] = []
    for worker in workers:
        node = draft.nodes.get(worker.intent.node_id)
        for index, share in enumerate(shares):
            if left[index] > 0 and node is not None and fits(share, node, pool):
                left[index] -= 1
                break
        else:
            surplus.append(worker)
    return left, surplus


def preference(
    draft: Draft, pool: Pool, shares: Sequence[Share], workers: Callable[[], Sequence[Worker]]
) -> Callable[[Node], int]:
    """Rank of a node for the next start: that of the first share that is short and fits; nodes of none come last.
    Asked anew for every start, since each changes what is short."""

    def rank(node: Node) -> int:
        left, _ = missing(draft, pool, shares, workers())
        return next((i for i, share in enumerate(shares) if left[i] > 0 and fits(share, node, pool)), len(shares))

    return rank
