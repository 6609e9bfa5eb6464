"""The bounded queue: priorities, deadlines, needs, refusals with a computed time (RT3, RT4, RT7; F37)."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.admission import Admission, Denied, Granted, Ticket
from router.core.demand import retry_after_s
from router.core.retry import Blame, Ruling, Verdict
from router.core.want import Needs, Want
from springtide.errors import Exhausted, NotFound, SpringtideError, Unavailable
from springtide.model.enums import Role
from springtide.model.pool import RoutingSpec
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingDelta, RoutingTable
from tests.routing.world import worker

POOL = RoutedPool("p", "m", max_waiting=3, waiting_timeout_s=100.0, max_workers=4)
OK = Ruling(Verdict.PASS, Blame.SUCCESS)


def admission(*workers: RoutedWorker, pool: RoutedPool = POOL) -> Admission:
    made = Admission(random.Random(0))
    made.fleet.snapshot(RoutingTable("s", 1, {"p": pool}, {w.worker_id: w for w in workers}), 0.0)
    return made


def hold(made: Admission, now: float = 0.0, **want: object) -> Ticket:
    ticket = made.open("m", now, want=Want(**want))  # type: ignore[arg-type]
    assert not made.admit(ticket, now)
    return ticket


def refused(made: Admission, now: float = 0.0, **want: object) -> SpringtideError:
    with pytest.raises(SpringtideError) as caught:
        made.admit(made.open("m", now, want=Want(**want)), now)  # type: ignore[arg-type]
    return caught.value


def arrive(made: Admission, *workers: RoutedWorker, now: float) -> None:
    made.fleet.delta(RoutingDelta("s", made.fleet.table.revision + 1, workers=workers), now)


def test_the_higher_priority_goes_first_and_equals_in_order() -> None:
    made = admission()
    low, usual, high = hold(made, priority=1), hold(made), hold(made, priority=9)
    arrive(made, worker("a", max_in_flight=1), now=1.0)
    order = []
    for now in (1.0, 2.0, 3.0):
        [granted] = made.pump("p", now)[0]
        assert isinstance(granted, Granted)
        order.append(granted.ticket)
        made.settle(granted.ticket, OK, "", now + 0.5)
    assert order == [high, usual, low]


def test_a_higher_priority_passes_those_that_wait() -> None:
    """Only where a worker has room: a waiting one of lower priority is not ahead of it."""
    made = admission(worker("a", max_in_flight=1))
    running = made.open("m", 0.0)
    assert made.admit(running, 0.0)
    waiting = hold(made)
    made.settle(running, OK, "", 1.0)
    urgent = made.open("m", 1.0, want=Want(priority=9))
    assert made.admit(urgent, 1.0)
    assert made.pump("p", 1.0)[0] == []
    made.settle(urgent, OK, "", 2.0)
    assert made.pump("p", 2.0)[0] == [Granted(waiting)]


def test_a_full_queue_makes_room_for_a_higher_priority_only() -> None:
    made = admission()
    first, last, other = hold(made), hold(made, priority=2), hold(made, priority=7)
    assert isinstance(refused(made, priority=2), Exhausted)
    high = hold(made, priority=8)
    [denied] = made.pump("p", 0.1)[0]
    assert isinstance(denied, Denied)
    assert denied.ticket is last
    assert isinstance(denied.error, Exhausted)
    assert (denied.error.http_status, denied.error.grpc_code) == (429, "RESOURCE_EXHAUSTED")
    assert made.waiting("p") == 3
    arrive(made, worker("a"), now=1.0)
    assert [v.ticket for v in made.pump("p", 1.0)[0]] == [high, other, first]


def test_one_that_was_pushed_out_and_left_is_told_nothing() -> None:
    made = admission(pool=replace(POOL, max_waiting=1))
    out = hold(made)
    hold(made, priority=9)
    made.cancel(out)
    assert made.pump("p", 0.1)[0] == []


def test_nothing_is_dropped_on_its_way_to_another_worker() -> None:
    """RT4: a request that a draining worker refuses waits although the queue is full, and is not pushed out."""
    made = admission(worker("a"), pool=replace(POOL, max_waiting=1))
    moved = made.open("m", 0.0, want=Want(priority=0))
    assert made.admit(moved, 0.0)
    made.fleet.delta(RoutingDelta("s", 9, removed_workers=("a",)), 1.0)
    waiting = hold(made, 1.0)
    made.settle(moved, Ruling(Verdict.REQUEUE, Blame.REFUSAL), "draining", 1.0)
    assert not made.admit(moved, 1.0)
    assert isinstance(refused(made, 1.0), Exhausted)
    high = hold(made, 1.0, priority=9)
    [denied] = made.pump("p", 1.0)[0]
    assert denied.ticket is waiting
    arrive(made, worker("b"), now=2.0)
    assert [v.ticket for v in made.pump("p", 2.0)[0]] == [high, moved]


def test_a_role_of_a_later_version_is_reached_by_name_only() -> None:
    made = admission(worker("a"), pool=replace(POOL, role=None))
    assert made.fleet.models() == []
    assert made.open("p", 0.0).pool == "p"
    with pytest.raises(NotFound):
        made.open("m", 0.0)


def test_a_deadline_ends_the_wait_as_unavailable() -> None:
    made = admission()
    soon, later = hold(made, deadline_s=2.0), hold(made)
    verdicts, wake_at = made.pump("p", 0.0)
    assert (verdicts, wake_at) == ([], 2.0)
    [denied] = made.pump("p", 2.0)[0]
    assert isinstance(denied, Denied)
    assert denied.ticket is soon
    assert isinstance(denied.error, Unavailable)
    assert (denied.error.reason, denied.error.http_status, denied.error.grpc_code) == ("DEADLINE", 503, "UNAVAILABLE")
    assert denied.error.retry_after_s is not None
    assert made.waiting("p") == 1
    arrive(made, worker("a"), now=3.0)
    assert made.pump("p", 3.0)[0] == [Granted(later)]
    both = made.open("m", 10.0, deadline=11.0, want=Want(deadline_s=5.0))
    assert both.deadline == 11.0


def test_a_deadline_of_the_wait_ends_with_the_first_worker() -> None:
    """A stream that loses its worker later waits for another one as any does; a call's own deadline stays."""
    made = admission(worker("a", max_in_flight=1))
    ticket = made.open("m", 0.0, deadline=60.0, want=Want(deadline_s=1.0))
    assert ticket.deadline == 1.0
    assert made.admit(ticket, 0.0)
    made.settle(ticket, Ruling(Verdict.RETRY, Blame.FAILURE), "", 30.0)
    assert not made.admit(ticket, 30.0)
    arrive(made, worker("b"), now=31.0)
    assert made.pump("p", 31.0)[0] == [Granted(ticket)]
    assert ticket.deadline == 60.0


def test_a_deadline_of_zero_does_not_wait() -> None:
    made = admission(worker("a", max_in_flight=1))
    first = made.open("m", 0.0, want=Want(deadline_s=0.0))
    assert made.admit(first, 0.0)
    assert refused(made, 0.0, deadline_s=0.0).reason == "DEADLINE"
    assert made.waiting("p") == 0


# ------------------------------------------------------------ Retry-After


def test_retry_after_is_what_is_left_of_a_measured_start() -> None:
    """RT3: the control plane's measurement; then by how long the pool has been waited for."""
    made = admission(pool=replace(POOL, max_waiting=1, start_up_s=120.0))
    hold(made, 0.0)
    assert refused(made, 0.0).retry_after_s == 120.0
    assert refused(made, 50.0).retry_after_s == 70.0
    assert refused(made, 119.5).retry_after_s == 1.0
    assert refused(made, 130.0).retry_after_s == 30.0  # overdue: a quarter of a start more


def test_retry_after_without_a_measurement_is_what_this_router_saw() -> None:
    made = admission(pool=replace(POOL, max_waiting=1))
    hold(made, 0.0)
    assert refused(made, 0.0).retry_after_s == 5.0
    arrive(made, worker("a", max_in_flight=1), now=17.2)
    [granted] = made.pump("p", 17.2)[0]
    made.fleet.delta(RoutingDelta("s", 9, removed_workers=("a",)), 30.0)
    made.settle(granted.ticket, OK, "", 30.0)
    hold(made, 100.0)
    assert refused(made, 100.0).retry_after_s == 18.0


def test_a_rejection_counts_as_demand_until_it_may_come_back() -> None:
    made = admission(pool=replace(POOL, max_waiting=1, start_up_s=90.0))
    hold(made)
    refused(made, 0.0)
    assert made.report(89.0).pools[0].rejected == 1
    assert made.report(90.0).pools[0].rejected == 0


def test_the_clock_of_starvation_starts_anew_after_everybody_gave_up() -> None:
    made = admission(pool=replace(POOL, max_waiting=1, start_up_s=40.0))
    made.cancel(hold(made, 0.0))
    hold(made, 5000.0)
    assert refused(made, 5000.0).retry_after_s == 40.0


@given(st.integers(0, 10**6), st.floats(0, 1e6), st.one_of(st.none(), st.floats(0, 1e6)), st.floats(0, 1e6))
def test_retry_after_is_always_a_sensible_whole_number(
    waiting: int, rate: float, start_up: float | None, starved: float
) -> None:
    got = retry_after_s(waiting, rate, start_up, starved)
    assert 1 <= got <= 600
    assert got == int(got)


# ------------------------------------------------------------ needs


def test_one_whose_needs_nobody_meets_does_not_hold_up_the_others() -> None:
    """RT7, RT10: it waits for a worker with the weights; they pass."""
    made = admission(worker("a", max_in_flight=1, weight_version="4"))
    running = made.open("m", 0.0)
    made.admit(running, 0.0)
    picky = hold(made, needs=Needs((), "5"), priority=9)
    behind = hold(made)
    made.settle(running, OK, "", 1.0)
    assert made.pump("p", 1.0)[0] == [Granted(behind)]
    made.settle(behind, OK, "", 2.0)
    assert made.pump("p", 2.0)[0] == []
    arrive(made, worker("a", max_in_flight=1, weight_version="5"), now=3.0)
    assert made.pump("p", 3.0)[0] == [Granted(picky)]


def test_labels_that_no_worker_has_are_refused_at_once_unless_one_is_coming() -> None:
    """RT7"""
    has = worker("a", labels={"zone": "a"})
    needs = Needs((("zone", "b"),))
    error = refused(admission(has), needs=needs)
    assert (error.reason, error.remedy) == ("NO_WORKER_HAS_LABELS", "Known: zone=a.")
    coming = admission(has, pool=replace(POOL, starting=1))
    held = hold(coming, needs=needs)
    arrive(coming, worker("b", labels={"zone": "b"}), now=1.0)
    assert coming.pump("p", 1.0)[0] == [Granted(held)]
    assert held.seat is not None
    assert held.seat.worker.worker_id == "b"
    hold(admission(), needs=needs)  # at zero nobody knows what will come


def test_a_model_with_a_pool_for_each_role() -> None:
    made = Admission(random.Random(0))
    pools = {"pre": RoutedPool("pre", "m", role=Role.PREFILL), "dec": RoutedPool("dec", "m", role=Role.DECODE)}
    made.fleet.snapshot(RoutingTable("s", 1, pools), 0.0)
    assert made.open("m", 0.0).pool == "dec"
    assert made.open("m", 0.0, want=Want(role=Role.PREFILL)).pool == "pre"
    assert made.open("pre", 0.0).pool == "pre"
    assert made.fleet.models() == ["m"]
    with pytest.raises(NotFound, match="Known: decode, prefill"):
        made.open("m", 0.0, want=Want(role=Role.MIXED))


# ------------------------------------------------------------ policies in admission


def test_a_pools_policy_changes_with_its_spec_and_keeps_its_memory_otherwise() -> None:
    made = admission(pool=replace(POOL, routing=RoutingSpec("sticky")))
    sticky = made.policy("p")
    arrive(made, worker("a"), now=1.0)
    assert made.policy("p") is sticky
    changed = replace(POOL, routing=RoutingSpec("round_robin"))
    made.fleet.delta(RoutingDelta("s", 9, pools=(changed,)), 2.0)
    assert type(made.policy("p")) is not type(sticky)


STEPS = st.lists(st.tuples(st.sampled_from("rrrrfffxaclt"), st.integers(0, 9)), max_size=60)


@pytest.mark.parametrize("name", ["least_in_flight", "request_cost", "kv_cost", "sticky", "prefix_aware"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_counts_are_exact_under_priorities_needs_and_policies(name: str, steps: list[tuple[str, int]]) -> None:
    """F23: each ticket is running, held or over; requests and tokens of the seats are those of what runs."""
    made = admission(
        worker("w0", max_in_flight=2), worker("w1", max_in_flight=2), pool=replace(POOL, routing=RoutingSpec(name))
    )
    running: list[Ticket] = []
    held: list[Ticket] = []
    now, opened, over = 0.0, 0, 0
    for step, n in steps:
        now += 0.2
        if step == "r":
            opened += 1
            needs = Needs((), "3") if n == 3 else Needs()
            want = Want(priority=n, session=f"s{n % 4}", prompt_tokens=n * 100, output_tokens=n, needs=needs,
                        prompt=lambda n=n: bytes([n]) * 900)  # type: ignore[misc]  # fmt: skip
            ticket = made.open("m", now, want=want)
            try:
                (running if made.admit(ticket, now) else held).append(ticket)
            except Exhausted:
                over += 1
        elif step == "f" and running:
            made.settle(running.pop(n % len(running)), OK, "", now)
            over += 1
        elif step == "x" and held:
            made.cancel(held.pop(n % len(held)))
            over += 1
        elif step == "a":
            arrive(made, worker(f"w{n % 3}", 1 + n, max_in_flight=2, weight_version=str(n)), now=now)
        elif step == "c":
            made.fleet.delta(RoutingDelta("s", 1000 + int(now * 10), removed_workers=(f"w{n % 3}",)), now)
        elif step == "l" and running:
            ticket = running[n % len(running)]
            assert ticket.seat is not None
            made.first_byte(ticket, ticket.seat)
        elif step == "t":
            now += n
        for verdict in made.pump("p", now)[0]:
            held.remove(verdict.ticket)
            if isinstance(verdict, Granted):
                running.append(verdict.ticket)
            else:
                over += 1
        assert sum(seat.own for seat in made.fleet.all()) == len(running)
        assert sum(seat.own_tokens for seat in made.fleet.all()) == sum(t.tokens for t in running)
        assert sum(seat.own_prefill for seat in made.fleet.all()) == sum(t.prefill for t in running)
        assert made.waiting("p") == len(held)
        assert sum(not ticket.had_seat for ticket in held) <= POOL.max_waiting
        assert opened == len(running) + len(held) + over
    for ticket in running:
        made.settle(ticket, OK, "", now)
    assert all((seat.own, seat.own_tokens, seat.own_prefill) == (0, 0, 0) for seat in made.fleet.all())
