"""Table rules, the choice of a worker, and the table of retry rulings (RT1, RT5, RT6; F4, F11, F18)."""

import random
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.pick import pick as pick_by
from router.core.policies.least_in_flight import LeastInFlight
from router.core.retry import Blame, Ruling, Verdict, rule
from router.core.seat import Seat
from router.core.table import Change, apply_delta, apply_snapshot
from springtide.dataplane.messages import OutcomeKind
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingDelta, RoutingTable


def pick(seats: list[Seat], excluded: Collection[tuple[str, int]], now: float) -> Seat | None:
    return pick_by(LeastInFlight(), seats, excluded, now, random.Random(0))


def worker(name: str, incarnation: int = 1, **fields: object) -> RoutedWorker:
    return RoutedWorker(name, "p", incarnation, "127.0.0.1:1", **fields)  # type: ignore[arg-type]


POOL = RoutedPool("p", "m")


def table(store: str, revision: int, *names: str) -> RoutingTable:
    return RoutingTable(store, revision, {"p": POOL}, {name: worker(name) for name in names})


def test_a_snapshot_replaces_whatever_its_revision() -> None:
    got, change = apply_snapshot(table("a", 9, "w1"), table("a", 3, "w2"))
    assert (change, list(got.workers), got.revision) == (Change.APPLIED, ["w2"], 3)
    got, change = apply_snapshot(table("a", 9, "w1"), table("b", 1, "w2"))
    assert (change, got.store_id) == (Change.APPLIED, "b")


def test_an_empty_foreign_snapshot_keeps_the_last_known_good() -> None:
    old = table("a", 9, "w1")
    assert apply_snapshot(old, RoutingTable("b", 1)) == (old, Change.KEPT)
    assert apply_snapshot(old, RoutingTable("a", 10))[1] is Change.APPLIED
    assert apply_snapshot(RoutingTable(), RoutingTable("b", 1))[1] is Change.APPLIED


def test_deltas() -> None:
    old = table("a", 9, "w1", "w2")
    assert apply_delta(old, RoutingDelta("b", 10))[1] is Change.FOREIGN
    assert apply_delta(old, RoutingDelta("a", 9, removed_workers=("w1",))) == (old, Change.OLD)
    got, change = apply_delta(
        old, RoutingDelta("a", 10, workers=(worker("w3"), worker("w2", 7)), removed_workers=("w1",))
    )
    assert change is Change.APPLIED
    assert {name: w.incarnation for name, w in got.workers.items()} == {"w2": 7, "w3": 1}
    got, _ = apply_delta(got, RoutingDelta("a", 11, removed_pools=("p",)))
    assert not got.pools


def test_least_in_flight_own_and_others() -> None:
    a, b, c = (Seat(worker(name), 0.0) for name in "abc")
    a.own, b.own, b.others, c.own = 2, 0, 3, 1
    assert pick([a, b, c], (), 100.0) is c
    assert pick([a, b, c], {("c", 1)}, 100.0) is a
    assert pick([], (), 0.0) is None


def test_a_full_or_blocked_seat_is_not_picked() -> None:
    a, b = Seat(worker("a", max_in_flight=1), 0.0), Seat(worker("b", max_in_flight=4), 0.0)
    a.enter(1.0)
    assert pick([a], (), 1.0) is None
    b.refused("draining", 1.0)
    assert pick([a, b], (), 1.0) is None
    assert pick([a, b], (), 7.0) is b
    b.reported(4, 7.0)  # others fill it, as far as known: only when nothing else is there
    a.leave(7.0)
    assert pick([a, b], (), 7.0) is a
    a.enter(7.0)
    assert pick([a, b], (), 7.0) is b


def test_slow_start_gives_a_new_worker_less() -> None:
    old, new = Seat(worker("old"), 0.0), Seat(worker("new", ramp_s=10.0), 100.0)
    old.own = 4
    assert pick([old, new], (), 100.0) is old
    assert pick([old, new], (), 109.0) is new


def test_reports_do_not_count_our_own_requests_twice() -> None:
    seat = Seat(worker("a"), 0.0)
    for _ in range(5):
        seat.enter(10.0)
    for _ in range(5):
        seat.leave(10.5)
    seat.reported(5, 10.6)
    assert seat.others == 0
    seat.reported(7, 10.6)
    assert seat.others == 2
    seat.reported(7, 20.0)
    assert seat.others == 7


def test_back_off_grows_and_ends_with_a_success() -> None:
    seat = Seat(worker("a"), 0.0)
    seat.failed(0.0)
    first = seat.free_at()
    seat.failed(first)
    assert seat.free_at() - first > first
    for _ in range(50):
        seat.failed(seat.free_at())
    last = seat.free_at()
    seat.failed(last)
    assert seat.free_at() == last + 10.0
    seat.succeeded()
    assert seat.free_at() == 0.0
    doubtful = Seat(worker("b"), 0.0)
    doubtful.failed(0.0, doubtful=True)
    assert doubtful.free_at() == 0.0
    assert doubtful.admits(0.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), min_size=1, max_size=8))
def test_the_pick_is_never_worse_than_another_free_one(loads: list[tuple[int, int, bool]]) -> None:
    seats = []
    for i, (own, others, blocked) in enumerate(loads):
        seat = Seat(worker(f"w{i}"), 0.0)
        seat.own, seat.others, seat.blocked_until = own, others, 10.0 if blocked else 0.0
        seats.append(seat)
    got = pick(seats, (), 1.0)
    free = [seat for seat in seats if seat.blocked_until <= 1.0]
    assert (got is None) == (not free)
    assert got is None or got.load == min(seat.load for seat in free)


FAULT, LATE = {"response_started": False}, {"response_started": True}


@pytest.mark.parametrize(
    ("kind", "facts", "ruling"),
    [
        (OutcomeKind.OK, LATE, Ruling(Verdict.PASS, Blame.SUCCESS)),
        (OutcomeKind.CLIENT_GONE, LATE, Ruling(Verdict.PASS, Blame.NOTHING)),
        (OutcomeKind.CLIENT_GONE, FAULT, Ruling(Verdict.ERROR, Blame.NOTHING)),
        (OutcomeKind.ABORTED, FAULT, Ruling(Verdict.ERROR, Blame.NOTHING)),
        (OutcomeKind.REFUSED, {**FAULT, "refusal": "full"}, Ruling(Verdict.REQUEUE, Blame.REFUSAL)),
        (OutcomeKind.REFUSED, {**FAULT, "attempts": 99}, Ruling(Verdict.REQUEUE, Blame.REFUSAL)),
        (OutcomeKind.CONNECT_FAILED, FAULT, Ruling(Verdict.RETRY, Blame.FAILURE)),
        (OutcomeKind.UPSTREAM_EOF, FAULT, Ruling(Verdict.RETRY, Blame.FAILURE)),
        (OutcomeKind.UPSTREAM_EOF, {**FAULT, "attempts": 5}, Ruling(Verdict.ERROR, Blame.FAILURE)),
        (OutcomeKind.UPSTREAM_EOF, LATE, Ruling(Verdict.PASS, Blame.FAILURE)),
        (OutcomeKind.UPSTREAM_ERROR_EVENT, FAULT, Ruling(Verdict.RETRY, Blame.FAILURE, doubtful=True)),
        (OutcomeKind.ERROR_STATUS, FAULT, Ruling(Verdict.RETRY, Blame.FAILURE, doubtful=True)),
        (OutcomeKind.ERROR_STATUS, {**FAULT, "fault": "upstream_eof"}, Ruling(Verdict.RETRY, Blame.FAILURE)),
        (OutcomeKind.BAD_RESPONSE, FAULT, Ruling(Verdict.RETRY, Blame.FAILURE, doubtful=True)),
        (OutcomeKind.TIMEOUT, {**FAULT, "timeout": "connect"}, Ruling(Verdict.RETRY, Blame.FAILURE)),
        (OutcomeKind.TIMEOUT, {**FAULT, "timeout": "first_byte"}, Ruling(Verdict.RETRY, Blame.FAILURE, doubtful=True)),
        (OutcomeKind.TIMEOUT, {**FAULT, "timeout": "total"}, Ruling(Verdict.ERROR, Blame.NOTHING, doubtful=True)),
        (OutcomeKind.TIMEOUT, {**LATE, "timeout": "idle"}, Ruling(Verdict.PASS, Blame.FAILURE, doubtful=True)),
    ],
)
def test_rulings(kind: OutcomeKind, facts: dict[str, object], ruling: Ruling) -> None:
    """RT5"""
    known = {"refusal": "", "timeout": "", "attempts": 1, "max_attempts": 5, **facts}
    assert rule(kind, **known) == ruling  # type: ignore[arg-type]


@given(st.sampled_from(OutcomeKind), st.booleans(), st.integers(1, 10))
def test_nothing_is_tried_again_once_the_client_saw_a_byte(kind: OutcomeKind, started: bool, attempts: int) -> None:
    got = rule(kind, response_started=started, refusal="", timeout="", attempts=attempts, max_attempts=5)
    if started and kind is not OutcomeKind.REFUSED:
        assert got.verdict is Verdict.PASS
    if attempts >= 5:
        assert got.verdict is not Verdict.RETRY
