"""The pure core: orders and a listing in, calls and answers out."""

import random

import pytest

from provisioner.core.converge import (
    MAX_CALLS,
    START_AGAIN_S,
    Book,
    Decision,
    Done,
    Listing,
    No,
    Unsure,
    coming,
    decide,
    finished,
)
from springtide.model.provisioning import (
    CapabilitySet,
    GroupOrder,
    GroupStatus,
    Orders,
    ProvidedNode,
    ProvidedPhase,
    ShutdownOrder,
    StartOrder,
)

SETS = {"std": CapabilitySet("std", max_nodes=3), "pair": CapabilitySet("pair", max_nodes=4, nodes_per_unit=2)}
PENDING, RUNNING, ENDED = ProvidedPhase.PENDING, ProvidedPhase.RUNNING, ProvidedPhase.ENDED


def start(group_id: str, *node_ids: str, kind: str = "std") -> StartOrder:
    return StartOrder(f"{group_id}/start", GroupOrder(group_id, kind, node_ids or (group_id,)))


def stop(group_id: str) -> ShutdownOrder:
    return ShutdownOrder(f"{group_id}/stop", group_id, (group_id,), "SURPLUS")


def node(group_id: str, phase: ProvidedPhase = RUNNING, kind: str = "std") -> ProvidedNode:
    return ProvidedNode(group_id, group_id, kind, phase)


def listing(at: float, *nodes: ProvidedNode) -> Listing:
    return Listing(nodes, at)


def answers(decision: Decision) -> dict[str, GroupStatus | None]:
    return {answer.request_id: answer.status for answer in decision.answers}


def test_nothing_is_started_before_the_first_look() -> None:
    """CP10, PV1: what an earlier process began is found first."""
    book, orders = Book(), Orders(start=(start("g1"),))
    assert decide(book, orders, None, SETS, 0.0) == Decision()
    found = decide(book, orders, listing(0.0, node("g1")), SETS, 0.1)
    assert found.starts == ()
    assert answers(found) == {"g1/start": GroupStatus.SUCCESS}


def test_the_same_order_is_one_call() -> None:
    """CP15: re-sent orders coalesce; a group has one call at a time."""
    book = Book()
    orders = Orders(start=(start("g1"), start("g1")))
    assert [order.group_id for order in decide(book, orders, listing(0.0), SETS, 0.0).starts] == ["g1"]
    assert decide(book, orders, listing(1.0), SETS, 1.0).starts == ()
    finished(book, "g1", Done(), 1.5)
    assert coming(book, listing(1.0)) == (node("g1", PENDING),), "reported before it is listed"
    assert decide(book, orders, listing(1.0), SETS, 1.6).starts == ()
    assert decide(book, orders, listing(2.0, node("g1", PENDING)), SETS, 2.0).starts == ()


def test_an_unknown_outcome_is_looked_up_before_it_is_repeated() -> None:
    """PV1: no retry without a look that began after the call; then after a pause."""
    book, orders = Book(), Orders(start=(start("g1"),))
    decide(book, orders, listing(0.0), SETS, 0.0)
    finished(book, "g1", Unsure("timed out"), 5.0)
    found = decide(book, orders, listing(4.0), SETS, 100.0)
    assert found.starts == ()
    assert answers(found) == {"g1/start": None}, "unknown: neither success nor a refusal"
    assert decide(book, orders, listing(5.5), SETS, 5.5).starts == (), "the pause is not over"
    assert decide(book, orders, listing(5.5), SETS, 6.5).starts != ()
    finished(book, "g1", Unsure("timed out"), 7.0)
    assert answers(decide(book, orders, listing(7.5, node("g1")), SETS, 99.0)) == {"g1/start": GroupStatus.SUCCESS}


def test_a_start_that_is_never_listed_is_made_again() -> None:
    """PV1: the provider lost it."""
    book, orders = Book(), Orders(start=(start("g1"),))
    decide(book, orders, listing(0.0), SETS, 0.0)
    finished(book, "g1", Done(), 1.0)
    later = 1.0 + START_AGAIN_S
    assert decide(book, orders, listing(later - 1), SETS, later - 1).starts == ()
    assert decide(book, orders, listing(later), SETS, later).starts != ()


def test_the_six_answers() -> None:
    """CP15: Success, TooMuch, IDNotFound, IDNotSpecified, Shutdown, UnknownAction."""
    book = Book()
    orders = Orders(
        start=(start("here"), start("full1"), start("full2"), start(""), start("ended"), start("odd", kind="none")),
        shutdown=(stop("unheard-of"), stop("")),
        unknown=(("r-9", "g-9"),),
    )
    nodes = listing(0.0, node("here"), node("there"), node("ended", ENDED))
    found = decide(book, orders, nodes, SETS, 0.0)
    assert [order.group_id for order in found.starts] == ["full1"], "the cap of three leaves one"
    assert answers(found) == {
        "here/start": GroupStatus.SUCCESS,
        "full2/start": GroupStatus.WORKER_GROUP_TOO_MUCH,
        "/start": GroupStatus.WORKER_GROUP_ID_NOT_SPECIFIED,
        "ended/start": GroupStatus.WORKER_GROUP_SHUTDOWN,
        "odd/start": GroupStatus.WORKER_GROUP_TOO_MUCH,
        "unheard-of/stop": GroupStatus.WORKER_GROUP_ID_NOT_FOUND,
        "/stop": GroupStatus.WORKER_GROUP_ID_NOT_SPECIFIED,
        "r-9": GroupStatus.UNKNOWN_ACTION,
    }


def test_duplicates_are_refused() -> None:
    """CP15, CP16: an id with other nodes, a node of another group, half a unit."""
    book = Book()
    orders = Orders(
        start=(start("g1", "n1"), start("g1", "n2"), start("g2", "n1"), start("g3", "n3", kind="pair")),
    )
    found = decide(book, orders, listing(0.0), SETS, 0.0)
    assert [order.node_ids for order in found.starts] == [("n1",)]
    texts = {answer.request_id: answer.message for answer in found.answers}
    assert "ordered twice" in texts["g1/start"]
    assert "is 2 nodes" in texts["g3/start"]
    assert "belongs to group g1" in texts["g2/start"]


def test_a_group_that_was_shut_down_does_not_come_back() -> None:
    """CP15: WORKER_GROUP_SHUTDOWN for a start after its stop, also in the same message."""
    book = Book()
    both = Orders(start=(start("g1"),), shutdown=(stop("g1"),))
    found = decide(book, both, listing(0.0, node("g1")), SETS, 0.0)
    assert [order.group_id for order in found.stops] == ["g1"]
    assert answers(found)["g1/start"] is GroupStatus.WORKER_GROUP_SHUTDOWN
    finished(book, "g1", Done(), 1.0)
    found = decide(book, Orders(start=(start("g1"),)), listing(2.0), SETS, 2.0)
    assert answers(found) == {"g1/start": GroupStatus.WORKER_GROUP_SHUTDOWN}
    assert answers(decide(book, Orders(shutdown=(stop("g1"),)), listing(3.0), SETS, 3.0)) == {
        "g1/stop": GroupStatus.WORKER_GROUP_SHUTDOWN
    }


def test_a_stop_waits_for_the_start_that_is_under_way() -> None:
    """CP9: no orphan when a start is cancelled while it is being made."""
    book = Book()
    decide(book, Orders(start=(start("g1"),)), listing(0.0), SETS, 0.0)
    order = Orders(shutdown=(stop("g1"),))
    assert decide(book, order, listing(1.0), SETS, 1.0) == Decision(), "it is not known whether there is anything"
    finished(book, "g1", Done(), 2.0)
    assert decide(book, order, listing(1.0), SETS, 2.1).answers == ()
    assert [o.group_id for o in decide(book, order, listing(3.0, node("g1", PENDING)), SETS, 3.0).stops] == ["g1"]


def test_a_refusal_is_answered_and_tried_again_after_a_pause() -> None:
    """CP14: the refusal stands as the answer while the order does; the pause doubles."""
    book, orders = Book(), Orders(start=(start("g1"),))
    pauses = []
    now = 0.0
    for _ in range(4):
        assert decide(book, orders, listing(now), SETS, now).starts
        finished(book, "g1", No(GroupStatus.WORKER_GROUP_TOO_MUCH, "no capacity"), now)
        found = decide(book, orders, listing(now), SETS, now)
        assert answers(found) == {"g1/start": GroupStatus.WORKER_GROUP_TOO_MUCH}
        assert found.wake_at is not None
        pauses.append(found.wake_at - now)
        now = found.wake_at
    assert pauses == [1.0, 2.0, 4.0, 8.0]


PAIR = start("g1", "a", "b", kind="pair")


def part(node_id: str, phase: ProvidedPhase = RUNNING) -> ProvidedNode:
    return ProvidedNode(node_id, "g1", "pair", phase)


def test_the_rest_of_a_unit_is_started_too() -> None:
    """CP15, PV1: half a unit is no success: what is there is kept, the rest is started, also by a new process."""
    book, orders = Book(), Orders(start=(PAIR,))
    found = decide(book, orders, listing(0.0, part("a")), SETS, 0.0)
    assert [group.node_ids for group in found.starts] == [("a", "b")]
    assert decide(book, orders, listing(0.5, part("a")), SETS, 0.5).starts == (), "one call at a time"
    finished(book, "g1", Done(), 1.0)
    assert decide(book, orders, listing(0.5, part("a")), SETS, 1.1).starts == (), "that look began before"
    found = decide(book, orders, listing(2.0, part("a"), part("b", PENDING)), SETS, 2.0)
    assert (found.starts, answers(found)) == ((), {"g1/start": GroupStatus.SUCCESS})


def test_half_a_unit_whose_rest_is_refused_is_refused() -> None:
    """CP15: so that the control plane gives the whole unit up; it is tried again after a pause while it is wanted."""
    book, orders = Book(), Orders(start=(PAIR,))
    assert decide(book, orders, listing(0.0), SETS, 0.0).starts
    finished(book, "g1", No(GroupStatus.WORKER_GROUP_TOO_MUCH, "no job more"), 1.0)
    found = decide(book, orders, listing(1.5, part("a")), SETS, 1.5)
    assert (found.starts, answers(found)) == ((), {"g1/start": GroupStatus.WORKER_GROUP_TOO_MUCH})
    assert found.wake_at is not None
    assert decide(book, orders, listing(1.5, part("a")), SETS, found.wake_at).starts


def test_a_unit_of_which_a_node_has_ended_is_not_filled_up() -> None:
    """CP12: nodes of a unit go together: the rest is not started any more, and the control plane hears of the end."""
    for phase in (ProvidedPhase.ENDING, ENDED):
        assert decide(Book(), Orders(start=(PAIR,)), listing(0.0, part("a", phase)), SETS, 0.0).starts == ()


def test_half_a_unit_at_the_cap_has_its_own_nodes_counted_once() -> None:
    """PV1: four of four with the missing one; the cap stays."""
    others = (ProvidedNode("c", "g2", "pair", RUNNING), ProvidedNode("d", "g2", "pair", RUNNING))
    assert decide(Book(), Orders(start=(PAIR,)), listing(0.0, part("a"), *others), SETS, 0.0).starts
    more = (*others, ProvidedNode("e", "g3", "pair", RUNNING))
    found = decide(Book(), Orders(start=(PAIR,)), listing(0.0, part("a"), *more), SETS, 0.0)
    assert (found.starts, answers(found)) == ((), {"g1/start": GroupStatus.WORKER_GROUP_TOO_MUCH})


def test_calls_are_bounded() -> None:
    """Rule 10: so many at a time, the rest later."""
    sets = {"std": CapabilitySet("std", max_nodes=99)}
    book, orders = Book(), Orders(start=tuple(start(f"g{n}") for n in range(40)))
    assert len(decide(book, orders, listing(0.0), sets, 0.0).starts) == MAX_CALLS
    finished(book, "g0", Done(), 1.0)
    assert len(decide(book, orders, listing(0.0), sets, 1.0).starts) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_interleavings(seed: int) -> None:
    """CP10, CP15, PV1: calls end in any way, the process restarts, listings lag: no group is started twice, caps hold,
    and in the end what is wanted is there and nothing else."""
    rng = random.Random(seed)
    book, now = Book(), 0.0
    there: dict[str, ProvidedPhase] = {}
    ended: set[str] = set()
    under_way: list[tuple[str, bool]] = []
    wanted: dict[str, bool] = {}
    latest: Listing | None = None

    def act(group_id: str, starting: bool, *, effect: bool) -> None:
        if effect and starting:
            assert group_id not in ended, "a group that was stopped is started again"
            there.setdefault(group_id, RUNNING)
        elif effect and there.pop(group_id, None) is not None:
            ended.add(group_id)
        assert len(there) <= 3

    def step(*, faults: bool) -> None:
        nonlocal book, now, latest
        now += rng.choice((0.1, 1.0, 12.0))
        for call in list(under_way):
            if faults and rng.random() < 0.3:
                continue
            under_way.remove(call)
            how = rng.choice(("done", "lost", "nothing")) if faults else "done"
            act(*call, effect=how != "nothing")
            finished(book, call[0], Done() if how == "done" else Unsure(how), now)
        if faults and rng.random() < 0.1:
            for call in under_way:
                act(*call, effect=rng.random() < 0.5)  # the process died; its calls may have arrived
            book, latest = Book(), None
            under_way.clear()
        if not faults or rng.random() < 0.7:
            latest = Listing(tuple(node(group_id) for group_id in there), now)
        orders = Orders(
            start=tuple(start(g) for g, up in wanted.items() if up),
            shutdown=tuple(stop(g) for g, up in wanted.items() if not up),
        )
        found = decide(book, orders, latest, SETS, now)
        under_way.extend((order.group_id, True) for order in found.starts)
        under_way.extend((order.group_id, False) for order in found.stops)
        assert len({group_id for group_id, _ in under_way}) == len(under_way)

    for number in range(60):
        if rng.random() < 0.3 and sum(wanted.values()) < 3:
            wanted[f"g{number}"] = True
        if rng.random() < 0.2 and wanted:
            wanted[rng.choice(sorted(wanted))] = False
        step(faults=True)
    for _ in range(40):
        step(faults=False)
    assert set(there) == {group_id for group_id, up in wanted.items() if up}
