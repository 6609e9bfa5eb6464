"""What a provisioner remembers of its orders: the calls that it made, and what came of them. Pure."""

from dataclasses import dataclass, field

from springtide.backoff import delay_s
from springtide.model.provisioning import GroupStatus, Orders, ProvidedNode, ProvidedPhase

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0
STOP_AGAIN_S = 30.0  # a group that is still listed as alive so long after its stop is stopped again
START_AGAIN_S = 10.0  # a group that is not listed so long after its start is started again
CLOSED_KEPT = 4096  # ids of groups that were shut down and are refused from then on


@dataclass(frozen=True, slots=True)
class Listing:
    """What the provider last listed, and when that look began."""

    nodes: tuple[ProvidedNode, ...]
    begun_at: float


@dataclass(frozen=True, slots=True)
class Done:
    """The call had its effect."""


@dataclass(frozen=True, slots=True)
class No:
    """The provider refused: nothing was changed."""

    status: GroupStatus
    message: str


@dataclass(frozen=True, slots=True)
class Unsure:
    """The call may or may not have had its effect."""

    message: str


Outcome = Done | No | Unsure


@dataclass(slots=True)
class Group:
    """What this process did about one group, beside what the provider lists."""

    node_ids: tuple[str, ...] = ()
    capability_set: str = ""
    calling: bool = False
    starting: bool = False  # the last call was a start
    stopped: bool = False  # a stop had its effect
    last: Outcome | None = None
    called_at: float = 0.0  # when the last call ended
    attempts: int = 0  # in a row that did not succeed
    next_at: float = 0.0  # no further call before


@dataclass(slots=True)
class Book:
    """The memory of one process. `closed`: ids that were shut down, oldest first."""

    groups: dict[str, Group] = field(default_factory=dict)
    closed: dict[str, None] = field(default_factory=dict)


def finished(book: Book, group_id: str, outcome: Outcome, now: float) -> None:
    """A call has ended."""
    group = book.groups.setdefault(group_id, Group())
    group.calling, group.last, group.called_at = False, outcome, now
    if isinstance(outcome, Done):
        group.attempts = 0
        group.next_at = now + (START_AGAIN_S if group.starting else STOP_AGAIN_S)
        group.stopped = not group.starting
    else:
        group.attempts += 1
        group.next_at = now + delay_s(group.attempts, RETRY_FIRST_S, RETRY_MAX_S)
    if group.stopped:
        close(book, group_id)


def coming(book: Book, listing: Listing | None) -> tuple[ProvidedNode, ...]:
    """Nodes of starts that are under way or done, but not listed yet: reported as PENDING, so that nobody takes them
    for unknown."""
    listed = by_group(listing)
    return tuple(
        ProvidedNode(node_id, group_id, group.capability_set, ProvidedPhase.PENDING)
        for group_id, group in book.groups.items()
        if group_id not in listed and may_exist(group, listing)
        for node_id in group.node_ids
    )


def may_exist(group: Group, listing: Listing | None) -> bool:
    """A start is under way, or has ended since the last look began, and was not refused."""
    if not group.starting or isinstance(group.last, No):
        return group.calling and group.starting
    return group.calling or listing is None or group.called_at > listing.begun_at


def by_group(listing: Listing | None) -> dict[str, list[ProvidedNode]]:
    found: dict[str, list[ProvidedNode]] = {}
    for node in listing.nodes if listing is not None else ():
        found.setdefault(node.group_id, []).append(node)
    return found


def close(book: Book, group_id: str) -> None:
    book.closed.pop(group_id, None)
    book.closed[group_id] = None
    while len(book.closed) > CLOSED_KEPT:
        del book.closed[next(iter(book.closed))]


def forget(book: Book, orders: Orders, listing: Listing | None) -> None:
    """Groups that nobody speaks of any more."""
    named = {order.group.group_id for order in orders.start} | {order.group_id for order in orders.shutdown}
    listed = by_group(listing)
    for group_id in [key for key in book.groups if key not in named and key not in listed]:
        group = book.groups[group_id]
        if not group.calling and not may_exist(group, listing):
            del book.groups[group_id]
