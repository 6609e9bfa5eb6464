"""What a provisioner does next with its orders, as a pure function of what it knows.

    decide(book, orders, listing, sets, now) -> Decision(starts, stops, answers, wake_at)
    finished(book, group_id, outcome, now)

Orders are level-triggered: all of them are re-sent, and each is answered in every report, so that nothing hangs on one
message. A group has at most one call at a time; equal orders are one order. A call whose outcome is unknown (a timeout,
any exception of the provider's) is not repeated before a listing that began after it has been read. Nothing is started
before the first listing: what an earlier process of the same id began is found there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provisioner.core.book import (
    START_AGAIN_S,
    Book,
    Done,
    Group,
    Listing,
    No,
    Outcome,
    Unsure,
    by_group,
    close,
    coming,
    finished,
    forget,
    may_exist,
)
from springtide.model.provisioning import (
    CapabilitySet,
    GroupAnswer,
    GroupOrder,
    GroupStatus,
    Orders,
    ProvidedPhase,
    ShutdownOrder,
    StartOrder,
)

__all__ = [
    "MAX_CALLS",
    "START_AGAIN_S",
    "Book",
    "Decision",
    "Done",
    "Listing",
    "No",
    "Outcome",
    "Unsure",
    "coming",
    "decide",
    "finished",
]

MAX_CALLS = 16  # to the provider at the same time
_LEAVING = (ProvidedPhase.ENDING, ProvidedPhase.ENDED)


@dataclass(frozen=True, slots=True)
class Decision:
    """Calls to make now, what to answer, and when time alone could change the decision."""

    starts: tuple[GroupOrder, ...] = ()
    stops: tuple[ShutdownOrder, ...] = ()
    answers: tuple[GroupAnswer, ...] = ()
    wake_at: float | None = None


def decide(
    book: Book, orders: Orders, listing: Listing | None, sets: Mapping[str, CapabilitySet], now: float
) -> Decision:
    """Marks the groups of the returned calls as being called; the caller makes the calls and tells `finished`."""
    look = _Look(book, listing, sets, now)
    look.shutdowns(orders.shutdown)
    look.starts(orders.start, {order.group_id for order in orders.shutdown})
    for request_id, group_id in orders.unknown:
        look.answer(request_id, group_id, GroupStatus.UNKNOWN_ACTION, "this version knows no such order")
    forget(book, orders, listing)
    return look.decision()


class _Look:
    """One decision while it is made."""

    def __init__(self, book: Book, listing: Listing | None, sets: Mapping[str, CapabilitySet], now: float) -> None:
        self.book = book
        self.listing = listing
        self.sets = sets
        self.now = now
        self.listed = by_group(listing)
        self.owners = {node.node_id: node.group_id for node in (listing.nodes if listing is not None else ())}
        for group_id, group in book.groups.items():
            if group_id not in self.listed and may_exist(group, listing):
                self.owners.update(dict.fromkeys(group.node_ids, group_id))
        self.free_calls = MAX_CALLS - sum(group.calling for group in book.groups.values())
        self.started: list[GroupOrder] = []
        self.stopped: list[ShutdownOrder] = []
        self.answers: list[GroupAnswer] = []
        self.wakes: list[float] = []

    def decision(self) -> Decision:
        wake_at = min(self.wakes, default=None)
        return Decision(tuple(self.started), tuple(self.stopped), tuple(self.answers), wake_at)

    def answer(self, request_id: str, group_id: str, status: GroupStatus | None, message: str = "") -> None:
        self.answers.append(GroupAnswer(request_id, group_id, status, message))

    # ------------------------------------------------------------ shutdown

    def shutdowns(self, orders: Sequence[ShutdownOrder]) -> None:
        for order in orders:
            if not order.group_id:
                status = GroupStatus.WORKER_GROUP_ID_NOT_SPECIFIED
                self.answer(order.request_id, "", status, "the order names no group")
            elif self.listing is not None and not self._calling(order.group_id):
                self._shutdown(order)

    def _shutdown(self, order: ShutdownOrder) -> None:
        group_id = order.group_id
        group = self.book.groups.get(group_id, Group())
        nodes = self.listed.get(group_id, [])
        if not nodes and may_exist(group, self.listing):
            return  # the next listing tells
        if not nodes:
            was_here = group.stopped or group_id in self.book.closed
            status = GroupStatus.WORKER_GROUP_SHUTDOWN if was_here else GroupStatus.WORKER_GROUP_ID_NOT_FOUND
            self.answer(order.request_id, group_id, status, "it is gone" if was_here else "there is no such group")
        elif all(node.phase is ProvidedPhase.ENDED for node in nodes):
            close(self.book, group_id)
            self.answer(order.request_id, group_id, GroupStatus.WORKER_GROUP_SHUTDOWN, "it has ended")
        elif group.stopped and all(node.phase in (ProvidedPhase.ENDING, ProvidedPhase.ENDED) for node in nodes):
            self.answer(order.request_id, group_id, GroupStatus.SUCCESS)
        elif self._may_call(group, starting=False):
            self._call(group_id, starting=False)
            self.stopped.append(order)
        else:
            self._answer_last(order.request_id, group_id, group)

    # ------------------------------------------------------------ start

    def starts(self, orders: Sequence[StartOrder], shut: set[str]) -> None:
        seen: dict[str, GroupOrder] = {}
        for order in orders:
            group_id = order.group.group_id
            if not group_id:
                status = GroupStatus.WORKER_GROUP_ID_NOT_SPECIFIED
                self.answer(order.request_id, "", status, "the order names no group")
            elif group_id in shut or (group_id in self.book.closed and not self._calling(group_id)):
                status = GroupStatus.WORKER_GROUP_SHUTDOWN
                self.answer(order.request_id, group_id, status, "it was shut down; its id is not used again")
            elif group_id in seen and _differ(seen[group_id], order.group):
                message = f"group {group_id} is ordered twice, with different nodes"
                self.answer(order.request_id, group_id, GroupStatus.WORKER_GROUP_TOO_MUCH, message)
            elif self.listing is not None and not self._calling(group_id):
                seen[group_id] = order.group
                self._start(order)
            else:
                seen[group_id] = order.group

    def _start(self, order: StartOrder) -> None:
        wanted, group_id = order.group, order.group.group_id
        nodes = self.listed.get(group_id, [])
        group = self.book.groups.get(group_id, Group())
        there = {node.node_id for node in nodes}
        if there - set(wanted.node_ids):
            problem = f"group {group_id} is there with other nodes: {', '.join(n.node_id for n in nodes[:8])}"
            self.answer(order.request_id, group_id, GroupStatus.WORKER_GROUP_TOO_MUCH, problem)
            return
        if nodes and all(node.phase in _LEAVING for node in nodes):
            status, why = GroupStatus.WORKER_GROUP_SHUTDOWN, nodes[0].reason or "it has ended"
            self.answer(order.request_id, group_id, status, why)
            return
        if there == set(wanted.node_ids) or any(node.phase in _LEAVING for node in nodes):
            self.answer(order.request_id, group_id, GroupStatus.SUCCESS)
            return
        if may_exist(group, self.listing):
            self._answer_last(order.request_id, group_id, group)  # the next listing tells
            return
        problem = self._why_not(wanted, there)  # part of a unit is there: the rest is started, too
        if problem:
            self.answer(order.request_id, group_id, GroupStatus.WORKER_GROUP_TOO_MUCH, problem)
        elif self._may_call(group, starting=True):
            self._call(group_id, starting=True, order=wanted)
            self.started.append(wanted)
        else:
            self._answer_last(order.request_id, group_id, group)

    def _why_not(self, wanted: GroupOrder, there: set[str]) -> str:
        found = self.sets.get(wanted.capability_set)
        if found is None:
            return f"there is no capability set {wanted.capability_set!r}; known: {', '.join(sorted(self.sets))}"
        if len(wanted.node_ids) != found.nodes_per_unit or len(set(wanted.node_ids)) != len(wanted.node_ids):
            return f"a group of {found.name} is {found.nodes_per_unit} nodes, not {len(wanted.node_ids)}"
        taken = [node_id for node_id in wanted.node_ids if self.owners.get(node_id, "") not in ("", wanted.group_id)]
        if taken:
            return f"node {taken[0]} belongs to group {self.owners[taken[0]]}"
        used = self._used(found.name)
        if used + len(set(wanted.node_ids) - there) > found.max_nodes:
            return f"{used} of at most {found.max_nodes} nodes of {found.name} are given"
        return ""

    def _used(self, name: str) -> int:
        listed = sum(
            1
            for nodes in self.listed.values()
            for node in nodes
            if node.capability_set == name and node.phase is not ProvidedPhase.ENDED
        )
        return listed + sum(
            len(group.node_ids)
            for group_id, group in self.book.groups.items()
            if group.capability_set == name and group_id not in self.listed and may_exist(group, self.listing)
        )

    # ------------------------------------------------------------ calls

    def _calling(self, group_id: str) -> bool:
        group = self.book.groups.get(group_id)
        return group is not None and group.calling

    def _may_call(self, group: Group, *, starting: bool) -> bool:
        """After the pause that follows the last call of the same kind, and a look if its outcome is unknown."""
        if self.free_calls <= 0:
            return False
        if group.last is None or group.starting is not starting:
            return True
        if isinstance(group.last, Unsure) and (self.listing is None or self.listing.begun_at < group.called_at):
            return False
        if self.now < group.next_at:
            self.wakes.append(group.next_at)
            return False
        return True

    def _call(self, group_id: str, *, starting: bool, order: GroupOrder | None = None) -> None:
        group = self.book.groups.setdefault(group_id, Group())
        if group.starting is not starting:
            group.attempts = 0
        group.calling, group.starting = True, starting
        group.last = None
        if order is not None:
            group.node_ids, group.capability_set = order.node_ids, order.capability_set
            self.owners.update(dict.fromkeys(order.node_ids, group_id))
        self.free_calls -= 1

    def _answer_last(self, request_id: str, group_id: str, group: Group) -> None:
        if isinstance(group.last, No):
            self.answer(request_id, group_id, group.last.status, group.last.message)
        elif isinstance(group.last, Unsure):
            self.answer(request_id, group_id, None, group.last.message)
        elif isinstance(group.last, Done):
            self.answer(request_id, group_id, GroupStatus.SUCCESS)


def _differ(one: GroupOrder, other: GroupOrder) -> bool:
    return (one.capability_set, one.node_ids) != (other.capability_set, other.node_ids)
