"""Waiting and dispatch: bounds, order, time-outs, exclusions, exact counts (RT3, RT4, RT6; F8, F11, F18, F23, F37)."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.admission import DOUBT_S, Admission, Denied, Granted, Ticket
from router.core.demand import Demand, DispatchRate, retry_after_s
from router.core.retry import Blame, Ruling, Verdict
from springtide.errors import Exhausted, NotFound, Unavailable
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingDelta, RoutingTable, WorkerLoad

POOL = RoutedPool("p", "m", max_waiting=3, waiting_timeout_s=10.0, max_workers=4)
OK = Ruling(Verdict.PASS, Blame.SUCCESS)
REFUSED = Ruling(Verdict.REQUEUE, Blame.REFUSAL)
BROKE = Ruling(Verdict.RETRY, Blame.FAILURE)
ERRED = Ruling(Verdict.RETRY, Blame.FAILURE, doubtful=True)


def worker(name: str, incarnation: int = 1, max_in_flight: int = 1) -> RoutedWorker:
    return RoutedWorker(name, "p", incarnation, "127.0.0.1:1", max_in_flight)


def admission(*workers: RoutedWorker, pool: RoutedPool = POOL) -> Admission:
    made = Admission(random.Random(0))
    made.fleet.snapshot(RoutingTable("s", 1, {pool.name: pool}, {w.worker_id: w for w in workers}), 0.0)
    return made


def delta(made: Admission, workers: Iterable[RoutedWorker] = (), removed: Iterable[str] = (), now: float = 0.0) -> None:
    revision = made.fleet.table.revision + 1
    made.fleet.delta(RoutingDelta("s", revision, workers=tuple(workers), removed_workers=tuple(removed)), now)


def seat_name(ticket: Ticket) -> str:
    assert ticket.seat is not None
    return ticket.seat.worker.worker_id


def granted(made: Admission, now: float) -> list[Ticket]:
    return [v.ticket for v in made.pump("p", now)[0] if isinstance(v, Granted)]


def test_models_by_served_name_and_by_pool_name() -> None:
    """RT2"""
    made = admission()
    assert made.fleet.pool_of("m") is made.fleet.pool_of("p")
    with pytest.raises(NotFound, match="Known: m"):
        made.fleet.pool_of("x")
    with pytest.raises(Unavailable):
        Admission(random.Random(0)).fleet.pool_of("x")


def test_held_in_order_and_dispatched_when_one_finishes() -> None:
    """RT4"""
    made = admission(worker("a"))
    first, *held = [made.open("m", 0.0) for _ in range(4)]
    assert made.admit(first, 0.0)
    assert [made.admit(t, 0.0) for t in held] == [False] * 3
    assert granted(made, 0.1) == []
    for i, ticket in enumerate(held):
        made.settle([first, *held][i], OK, "", 1.0)
        assert granted(made, 1.0) == [ticket]
    assert made.waiting("p") == 0


def test_queue_full_is_a_retryable_answer_with_a_time() -> None:
    """RT3"""
    made = admission(worker("a"))
    tickets = [made.open("m", 0.0) for _ in range(5)]
    for ticket in tickets[:4]:
        made.admit(ticket, 0.0)
    with pytest.raises(Exhausted) as error:
        made.admit(tickets[4], 0.0)
    assert error.value.retry_after_s is not None
    assert error.value.retry_after_s >= 1
    report = made.report(0.5)
    assert (report.pools[0].waiting, report.pools[0].rejected) == (3, 1)
    assert made.report(100.0).pools[0].rejected == 0


def test_at_zero_with_no_hope_refused_and_with_hope_held() -> None:
    """RT3, F37"""
    never = admission(pool=replace(POOL, max_workers=0))
    with pytest.raises(Unavailable, match="max_workers = 0"):
        never.admit(never.open("m", 0.0), 0.0)
    made = admission()
    ticket = made.open("m", 0.0)
    assert not made.admit(ticket, 0.0)
    delta(made, [worker("a")], now=4.0)
    assert granted(made, 4.0) == [ticket]
    assert ticket.waited_s == 4.0
    assert ticket.attempts == 1


def test_waiting_ends_with_its_time_or_the_clients_own() -> None:
    """RT3"""
    made = admission()
    a, b = made.open("m", 0.0), made.open("m", 0.0, deadline=3.0)
    made.admit(a, 0.0)
    made.admit(b, 0.0)
    verdicts, wake_at = made.pump("p", 0.0)
    assert (verdicts, wake_at) == ([], 3.0)
    [denied], wake_at = made.pump("p", 3.0)
    assert isinstance(denied, Denied)
    assert (denied.ticket, wake_at) == (b, 10.0)
    [denied], wake_at = made.pump("p", 10.0)
    assert isinstance(denied, Denied)
    assert isinstance(denied.error, Unavailable)
    assert (denied.ticket, wake_at) == (a, None)


def test_a_removed_pool_denies_what_waits() -> None:
    made = admission()
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.fleet.delta(RoutingDelta("s", 2, removed_pools=("p",)), 1.0)
    [denied], _ = made.pump("p", 1.0)
    assert isinstance(denied, Denied)
    assert isinstance(denied.error, NotFound)


def test_a_refusal_goes_elsewhere_and_costs_no_attempt() -> None:
    """F4"""
    made = admission(worker("a", max_in_flight=9), worker("b", max_in_flight=9))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    assert seat_name(ticket) == "a"
    made.settle(ticket, REFUSED, "draining", 0.0)
    assert made.admit(ticket, 0.0)
    assert (seat_name(ticket), ticket.attempts) == ("b", 1)
    other = made.open("m", 1.0)
    made.admit(other, 1.0)
    assert seat_name(other) == "b"


def test_a_tombstone_ends_with_a_new_word_or_a_new_incarnation() -> None:
    """F18"""
    for renewed in (worker("a", 1), worker("a", 2)):
        made = admission(worker("a"))
        ticket = made.open("m", 0.0)
        made.admit(ticket, 0.0)
        made.settle(ticket, REFUSED, "draining", 0.0)
        assert not made.admit(ticket, 0.1)
        assert granted(made, 0.2) == []
        delta(made, [renewed], now=0.3)
        assert granted(made, 0.3) == [ticket]


def test_full_is_asked_again_soon() -> None:
    made = admission(worker("a", max_in_flight=4))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.settle(ticket, REFUSED, "full", 0.0)
    assert not made.admit(ticket, 0.0)
    _, wake_at = made.pump("p", 0.0)
    assert wake_at is not None
    assert wake_at <= 0.1
    assert granted(made, wake_at) == [ticket]


def test_a_worker_that_failed_a_request_is_not_tried_by_it_again() -> None:
    """F11"""
    made = admission(worker("a", max_in_flight=9), worker("b", max_in_flight=9))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.settle(ticket, BROKE, "", 0.0)
    made.admit(ticket, 0.0)
    assert (seat_name(ticket), ticket.attempts) == ("b", 2)


def test_alone_and_broken_the_request_waits_for_the_replacement() -> None:
    """RT5: a killed engine is replaced; the request is held, not failed."""
    made = admission(worker("a"))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.settle(ticket, ERRED, "", 0.0)
    assert not made.admit(ticket, 0.0)
    delta(made, removed=["a"], now=1.0)
    assert made.pump("p", DOUBT_S + 0.1)[0] == []
    delta(made, [worker("a", 2)], now=8.0)
    assert granted(made, 8.0) == [ticket]


def test_alone_and_still_there_the_fault_is_passed_on() -> None:
    made = admission(worker("a"))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.settle(ticket, ERRED, "", 0.0)
    assert not made.admit(ticket, 0.0)
    assert made.pump("p", 1.0)[0] == []
    assert made.pump("p", DOUBT_S)[0] == [Denied(ticket, None)]


def test_doubt_is_no_reason_to_give_up_while_another_worker_is_only_busy() -> None:
    made = admission(worker("a"), worker("b"))
    ticket, other = made.open("m", 0.0), made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.admit(other, 0.0)
    made.settle(ticket, ERRED, "", 0.0)
    assert not made.admit(ticket, 0.0)
    third = made.open("m", 0.0)
    assert not made.admit(third, 0.0)
    assert granted(made, 0.1) == [third]
    assert made.pump("p", DOUBT_S + 0.1)[0] == []
    made.settle(other, OK, "", DOUBT_S + 0.2)
    assert granted(made, DOUBT_S + 0.2) == [ticket]


def test_a_transport_fault_alone_is_tried_again_after_a_pause() -> None:
    made = admission(worker("a"))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    made.settle(ticket, BROKE, "", 0.0)
    assert not made.admit(ticket, 0.0)
    assert granted(made, 1.0) == []
    assert granted(made, DOUBT_S + 0.1) == [ticket]
    assert ticket.attempts == 2


def test_one_that_avoids_a_worker_does_not_hold_up_those_behind() -> None:
    made = admission(worker("a"), worker("b"))
    x, y = made.open("m", 0.0), made.open("m", 0.0)
    made.admit(x, 0.0)
    made.admit(y, 0.0)
    made.settle(x, BROKE, "", 0.0)  # on a; b is taken
    assert not made.admit(x, 0.0)
    z = made.open("m", 0.0)
    assert not made.admit(z, 0.0)
    assert granted(made, 0.5) == [z]  # a is past its back-off; x still avoids it
    assert made.waiting("p") == 1


def test_a_retried_request_keeps_its_place() -> None:
    made = admission(worker("a"))
    old, young = made.open("m", 0.0), made.open("m", 0.0)
    made.admit(old, 0.0)
    made.admit(young, 0.0)
    made.settle(old, REFUSED, "full", 0.0)
    assert not made.admit(old, 0.0)
    assert granted(made, 1.0) == [old]


def test_a_cancelled_drain_brings_the_seat_back_with_its_count() -> None:
    """RT6"""
    made = admission(worker("a", max_in_flight=9))
    ticket = made.open("m", 0.0)
    made.admit(ticket, 0.0)
    delta(made, removed=["a"])
    assert [(s.worker.worker_id, s.own) for s in made.fleet.all()] == [("a", 1)]
    delta(made, [worker("a", max_in_flight=9)])
    assert [(s.worker.worker_id, s.own) for s in made.fleet.all()] == [("a", 1)]
    delta(made, removed=["a"])
    made.settle(ticket, OK, "", 1.0)
    assert list(made.fleet.all()) == []


def test_an_endpoint_that_makes_no_sense_is_unroutable_and_not_fatal() -> None:
    made = admission(replace(worker("a"), endpoint=""))
    assert made.fleet.active("p") == 0


def test_loads_of_another_incarnation_are_ignored() -> None:
    made = admission(worker("a", 2, max_in_flight=9))
    made.fleet.loads([WorkerLoad("a", 1, 5), WorkerLoad("x", 1, 5), WorkerLoad("a", 2, None)], 1.0)
    assert [s.others for s in made.fleet.all()] == [0]
    made.fleet.loads([WorkerLoad("a", 2, 5)], 1.0)
    assert [s.others for s in made.fleet.all()] == [5]


def test_retry_after_follows_the_measured_rate() -> None:
    rate = DispatchRate()
    for i in range(100):
        rate.dispatched(i / 10)
    assert 5 < rate.per_second(10.0) < 10.5
    assert rate.per_second(100.0) < 0.01
    assert retry_after_s(40, 10.0, None) == 5.0
    assert retry_after_s(0, 0.0, 17.2) == 18.0
    assert retry_after_s(0, 0.0, None) == 5.0
    assert retry_after_s(10**6, 1.0, None) == 60.0


def test_first_token_percentiles_of_one_interval() -> None:
    demand = Demand()
    assert demand.take_ttft() == (None, None)
    for i in range(100):
        demand.first_token(i / 100)
    assert demand.take_ttft() == (0.49, 0.98)
    assert demand.take_ttft() == (None, None)


STEPS = st.lists(st.tuples(st.sampled_from("rrrffqxbeacudt"), st.integers(0, 7)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_counts_are_exact_and_nobody_is_forgotten(steps: list[tuple[str, int]]) -> None:
    """F23: after any history each ticket is running, held or over, and seats count exactly what runs."""
    made = admission(worker("w0", max_in_flight=2), worker("w1", max_in_flight=2))
    running: list[Ticket] = []
    held: list[Ticket] = []
    now, over = 0.0, 0
    opened = 0

    def place(ticket: Ticket) -> None:
        nonlocal over
        try:
            (running if made.admit(ticket, now) else held).append(ticket)
        except Exhausted:
            over += 1

    def pump() -> None:
        nonlocal over
        for verdict in made.pump("p", now)[0]:
            held.remove(verdict.ticket)
            if isinstance(verdict, Granted):
                running.append(verdict.ticket)
            else:
                over += 1

    for step, n in steps:
        now += 0.2
        if step == "r":
            opened += 1
            place(made.open("m", now))
        elif step in "fqbe" and running:
            ticket = running.pop(n % len(running))
            made.settle(ticket, {"f": OK, "q": REFUSED, "b": BROKE, "e": ERRED}[step], "full", now)
            if step == "f":
                over += 1
            else:
                place(ticket)
        elif step == "x" and held:
            made.cancel(held.pop(n % len(held)))
            over += 1
        elif step == "a":
            delta(made, [worker(f"w{n % 3}", 1 + n, max_in_flight=2)], now=now)
        elif step == "c":
            delta(made, removed=[f"w{n % 3}"], now=now)
        elif step == "u":
            made.fleet.loads([WorkerLoad(f"w{n % 3}", 1, n)], now)
        elif step == "d":
            made.report(now)
        elif step == "t":
            now += n
        pump()
        assert sum(seat.own for seat in made.fleet.all()) == len(running)
        assert all(0 < seat.own <= 2 or seat.own == 0 for seat in made.fleet.all())
        assert made.waiting("p") == len(held)
        assert sum(not ticket.had_seat for ticket in held) <= POOL.max_waiting
        assert opened == len(running) + len(held) + over
    for ticket in running:
        made.settle(ticket, OK, "", now)
    assert all(seat.own == 0 for seat in made.fleet.all())
