"""The breaker: opened by transport faults and 5xx only, one probe at a time, closed by its first byte (F11, F18)."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.admission import Admission, Granted, Ticket
from router.core.breaker import Breaker, BreakerState
from router.core.retry import Blame, Ruling, Verdict, rule
from springtide.dataplane.messages import OutcomeKind
from springtide.model.routing import RoutedPool, RoutingDelta, RoutingTable
from tests.routing.world import worker

POOL = RoutedPool("p", "m", max_waiting=50, waiting_timeout_s=1000.0, max_workers=4)
OK = Ruling(Verdict.PASS, Blame.SUCCESS)
BROKE = Ruling(Verdict.RETRY, Blame.FAILURE)
LOST = Ruling(Verdict.PASS, Blame.FAILURE)
GONE = Ruling(Verdict.PASS, Blame.NOTHING)


def admission(*names: str) -> Admission:
    made = Admission(random.Random(1))
    made.fleet.snapshot(RoutingTable("s", 1, {"p": POOL}, {name: worker(name) for name in names}), 0.0)
    return made


def go(made: Admission, now: float) -> Ticket:
    ticket = made.open("m", now)
    assert made.admit(ticket, now)
    return ticket


def test_open_then_one_probe_then_closed_by_its_first_byte() -> None:
    breaker = Breaker()
    assert breaker.failed(0.0, doubtful=False)
    assert breaker.state(0.1) is BreakerState.OPEN
    assert not breaker.admits(0.1)
    assert breaker.state(0.25) is BreakerState.HALF_OPEN
    assert breaker.admits(0.25)
    assert breaker.entered()
    assert not breaker.admits(0.3)
    breaker.succeeded()
    assert breaker.state(0.3) is BreakerState.CLOSED
    assert breaker.admits(0.3)
    assert not breaker.entered()


def test_many_streams_that_break_together_are_one_fault() -> None:
    breaker = Breaker()
    assert [breaker.failed(1.0, doubtful=False) for _ in range(30)] == [True] + [False] * 29
    assert breaker.open_until == 1.25


def test_a_probe_that_fails_opens_it_for_longer_up_to_a_bound() -> None:
    breaker, now = Breaker(), 0.0
    spans: list[float] = []
    for _ in range(9):
        assert breaker.failed(now, doubtful=True) or not spans
        if breaker.open_until > now:
            spans.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.entered()
        breaker.probe_over()
    assert spans == sorted(spans)
    assert spans[-1] <= 10.0


def test_what_may_be_the_requests_own_fault_opens_it_only_in_a_row() -> None:
    """A poisonous request breaks on every worker; that must not close the pool to everybody else."""
    breaker = Breaker()
    assert not breaker.failed(0.0, doubtful=True)
    assert not breaker.failed(0.0, doubtful=True)
    breaker.succeeded()
    assert not breaker.failed(0.0, doubtful=True)
    assert breaker.admits(0.0)
    breaker.failed(0.0, doubtful=True)
    assert breaker.failed(0.0, doubtful=True)


def test_only_faults_of_the_transport_and_5xx_are_blamed() -> None:
    """A 4xx, a refusal, a client that left or ran out of its own time says nothing against the worker."""
    blamed = {
        kind
        for kind in OutcomeKind
        if rule(
            kind, response_started=False, refusal="full" if kind is OutcomeKind.REFUSED else "", timeout="", attempts=1,
            max_attempts=5,
        ).blame
        is Blame.FAILURE
    }  # fmt: skip
    assert blamed == {
        OutcomeKind.CONNECT_FAILED,
        OutcomeKind.ERROR_STATUS,
        OutcomeKind.UPSTREAM_EOF,
        OutcomeKind.UPSTREAM_ERROR_EVENT,
        OutcomeKind.TIMEOUT,
        OutcomeKind.BAD_RESPONSE,
    }
    total = rule(OutcomeKind.TIMEOUT, response_started=False, refusal="", timeout="total", attempts=1, max_attempts=5)
    assert total.blame is Blame.NOTHING


def test_half_open_takes_one_and_sends_the_rest_elsewhere() -> None:
    """One dead worker never slows requests to the others."""
    made = admission("a", "b")
    first = go(made, 0.0)
    assert first.seat is not None
    broken = first.seat
    made.settle(first, BROKE, "", 0.0)
    assert made.trips("p") == 1
    tickets = [go(made, 0.1) for _ in range(5)]
    assert all(t.seat is not broken for t in tickets)
    probe = go(made, 1.0)
    assert probe.seat is broken
    assert probe.probe
    assert all(go(made, 1.0).seat is not broken for _ in range(5))
    assert made.first_byte(probe, broken)
    assert go(made, 1.1).seat is broken
    assert not made.first_byte(probe, broken)


def test_a_probe_that_says_nothing_makes_way_for_the_next() -> None:
    made = admission("a")
    made.settle(first := go(made, 0.0), LOST, "", 0.0)
    assert first.seat is None
    probe = go(made, 1.0)
    held = made.open("m", 1.0)
    assert not made.admit(held, 1.0)
    made.settle(probe, GONE, "", 1.5)
    assert made.pump("p", 1.5)[0] == [Granted(held)]
    assert held.probe


def test_with_every_worker_broken_requests_wait_for_the_earliest() -> None:
    made = admission("a", "b")
    a, b = go(made, 0.0), go(made, 0.1)
    made.settle(a, LOST, "", 0.2)
    made.settle(b, LOST, "", 0.3)
    held = made.open("m", 0.3)
    assert not made.admit(held, 0.3)
    verdicts, wake_at = made.pump("p", 0.3)
    assert (verdicts, wake_at) == ([], 0.45)
    assert made.pump("p", 0.45)[0] == [Granted(held)]


def test_a_new_incarnation_starts_closed() -> None:
    """F18"""
    made = admission("a")
    made.settle(go(made, 0.0), LOST, "", 0.0)
    made.fleet.delta(RoutingDelta("s", 2, workers=(worker("a", 2),)), 0.01)
    assert go(made, 0.01).seat is not None


def test_a_word_of_the_control_plane_ends_a_tombstone_but_closes_no_breaker() -> None:
    made = admission("a")
    made.settle(go(made, 0.0), LOST, "", 0.0)
    made.fleet.delta(RoutingDelta("s", 2, workers=(worker("a", 1),)), 0.01)
    assert not made.admit(made.open("m", 0.01), 0.01)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("efdsp"), st.floats(0, 3)), max_size=60))
def test_any_history_leaves_it_closed_or_due_within_its_bound(steps: list[tuple[str, float]]) -> None:
    """Never stuck: after any history it admits within 10 s of a probe's end, and a success always closes it."""
    breaker, now, probes = Breaker(), 0.0, 0
    for step, wait in steps:
        now += wait
        if step == "e" and breaker.admits(now):
            probes += breaker.entered()
        elif step in "fd":
            breaker.failed(now, doubtful=step == "d")
        elif step == "s":
            breaker.succeeded()
            probes = 0
        elif step == "p":
            breaker.probe_over()
            probes = 0
        assert probes <= 1
        assert breaker.open_until <= now + 10
    breaker.probe_over()
    assert breaker.admits(now + 10)
    breaker.succeeded()
    assert breaker.admits(now)
