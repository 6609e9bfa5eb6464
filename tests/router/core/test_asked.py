"""A pool's demand by the labels that requests ask for (PL6, RT7, seed 2 §2.07)."""

import random
from dataclasses import replace

import pytest

from router.core.admission import Admission, Ticket
from router.core.asked import Asked
from router.core.retry import Blame, Ruling, Verdict
from router.core.want import Needs, Want
from springtide.errors import Unavailable
from springtide.model.pool import RoutingSpec
from springtide.model.routing import MOST_NEEDS, NeedReport, RoutedPool, RoutedWorker, RoutingDelta, RoutingTable

POOL = RoutedPool("p", "m", max_waiting=100, waiting_timeout_s=10.0, max_workers=4)
OK = Ruling(Verdict.PASS, Blame.SUCCESS)
AGAIN = Ruling(Verdict.RETRY, Blame.FAILURE)


def admission(*zones: str, pool: RoutedPool = POOL) -> Admission:
    workers = {z: RoutedWorker(z, "p", 1, "127.0.0.1:1", 1, labels={"zone": z}) for z in zones}
    made = Admission(random.Random(0))
    made.fleet.snapshot(RoutingTable("s", 1, {"p": pool}, workers), 0.0)
    return made


def ask(made: Admission, zone: str = "", now: float = 0.0) -> Ticket:
    want = Want(needs=Needs((("zone", zone),))) if zone else Want()
    ticket = made.open("m", now, want=want)
    made.admit(ticket, now)
    return ticket


def told(made: Admission, now: float = 0.0) -> dict[str, tuple[int, int]]:
    """{zone: (waiting, running)} of the report."""
    [pool] = made.report(now).pools
    return {dict(need.labels).get("zone", ""): (need.waiting, need.running) for need in pool.by_needs}


def test_waiting_and_running_by_labels() -> None:
    """PL6: each set with what waits and what runs for it; what asks for nothing is one of them."""
    made = admission("a", "b")
    assert told(made) == {}
    tickets = [ask(made, zone) for zone in ("a", "a", "a", "b", "", "")]
    made.pump("p", 0.0)
    assert told(made) == {"a": (2, 1), "b": (0, 1), "": (2, 0)}
    made.settle(tickets[0], OK, "", 1.0)
    made.pump("p", 1.0)
    assert told(made, 1.0) == {"a": (1, 1), "b": (0, 1), "": (2, 0)}
    made.cancel(tickets[2])
    made.settle(tickets[3], OK, "", 1.0)
    assert told(made, 1.0) == {"a": (0, 1), "": (2, 0)}


def test_a_retried_request_counts_once() -> None:
    """PL6, PL5: an attempt that ended is no demand beside the one that follows."""
    made = admission("a")
    ticket = ask(made, "a")
    made.settle(ticket, AGAIN, "", 1.0)
    assert told(made, 1.0) == {}
    assert not made.admit(ticket, 1.0)
    assert told(made, 1.0) == {"a": (1, 0)}


def test_labels_that_no_worker_has_are_asked_for() -> None:
    """PL6, CP11: refused at once, and demand for a worker with them until the request may come back; not for any
    other."""
    made = admission("a")
    with pytest.raises(Unavailable, match="zone=c") as error:
        ask(made, "c")
    assert told(made, 1.0) == {"c": (1, 0)}
    [pool] = made.report(1.0).pools
    assert (pool.waiting, pool.rejected, pool.by_needs_waiting) == (0, 0, 1)
    assert error.value.retry_after_s
    assert told(made, error.value.retry_after_s) == {}
    made.fleet.delta(RoutingDelta("s", 2, pools=(replace(POOL, starting=1),)), 6.0)
    assert ask(made, "c", 6.0).seat is None  # one is coming, which may have them: held
    assert told(made, 6.0) == {"c": (1, 0)}


def test_a_pool_that_routes_by_capabilities_holds_them() -> None:
    """PL6, seed 2 §2.07: a worker with the labels may be started there; the request waits for it."""
    made = admission("a", pool=replace(POOL, routing=RoutingSpec("capabilities")))
    ticket = ask(made, "c")
    assert ticket.seat is None
    assert told(made) == {"c": (1, 0)}
    assert ask(made, "a").seat is None
    [granted] = made.pump("p", 0.0)[0]
    assert granted.ticket.want.needs.labels == (("zone", "a"),)


def test_a_rejection_keeps_its_labels() -> None:
    """PL6: a full queue's rejections count for the set that they belong to."""
    made = admission("a", pool=replace(POOL, max_waiting=1))
    ask(made, "a")
    ask(made, "a")
    with pytest.raises(Exception, match="wait for pool"):
        ask(made, "a")
    assert told(made) == {"a": (2, 1)}


def test_a_pool_that_left_and_came_back_counts_from_zero() -> None:
    """An attempt that ends after its pool's counters were dropped takes nothing from the new ones."""
    made = admission("a")
    ticket = ask(made, "a")
    made.fleet.delta(RoutingDelta("s", 2, removed_pools=("p",), removed_workers=("a",)), 1.0)
    made.report(1.0)
    made.settle(ticket, OK, "", 2.0)
    made.fleet.delta(RoutingDelta("s", 3, pools=(POOL,)), 3.0)
    assert told(made, 3.0) == {}


def test_no_more_entries_than_a_report_may_have() -> None:
    """PL6: beyond the bound, the least wanted ones count as what asks for nothing; none is lost."""
    asked = Asked()
    for number in range(3 * MOST_NEEDS):
        for _ in range(1 + number % 5):
            asked.entered((("zone", str(number)),))
    running = sum(asked.running.values()) + 7
    needs = asked.report((), (), running, 0.0)
    assert len(needs) == MOST_NEEDS
    assert sum(need.running for need in needs) == running
    assert {need.labels for need in needs} >= {()}
    assert min(need.running for need in needs if need.labels) == 4
    assert asked.report((), (), 0, 0.0) != (NeedReport((), 0, 0),)
