"""The worker machine: only legal edges, generations that follow what is wanted, fences (CP1)."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.fences import is_current, tells_end
from controlplane.core.worker import (
    EDGES,
    PHASES,
    STATE_EDGES,
    Cause,
    IllegalEdge,
    can,
    id_order,
    order_of,
    place_of,
    step,
)
from springtide.model.enums import Phase, ReportedPhase, State
from springtide.model.worker import Worker, WorkerIntent, WorkerObserved, WorkerReport

SLICE: dict[str, Any] = {"node_id": "n1", "gpu_ids": ("0", "1"), "deadline": 900.0}
NEW = Worker("demo-1", "demo", WorkerIntent())


def extra(cause: Cause) -> dict[str, Any]:
    return dict(SLICE) if cause is Cause.START else {}


def test_table_uses_only_the_glossary() -> None:
    """CP1: every edge of the table is an edge of the glossary, every place is a known one, every cause is used."""
    assert set(EDGES) == set(Cause)
    for cause, moves in EDGES.items():
        assert moves, cause
        for (state, phase), (to_state, to_phase) in moves.items():
            assert phase in PHASES[state]
            assert to_phase in PHASES[to_state]
            assert state is to_state or (state, to_state) in STATE_EDGES
    used = {(a[0], b[0]) for moves in EDGES.values() for a, b in moves.items() if a[0] is not b[0]}
    assert used == STATE_EDGES


@given(st.lists(st.sampled_from(list(Cause)), max_size=40))
def test_only_legal_edges_are_reachable(causes: list[Cause]) -> None:
    """CP1: from any sequence of causes; an illegal one raises and changes nothing."""
    worker, now = NEW, 0.0
    for cause in causes:
        now += 1.0
        before = worker
        if not can(worker, cause):
            with pytest.raises(IllegalEdge, match=worker.worker_id):
                step(worker, cause, now, **extra(cause))
            continue
        worker = step(worker, cause, now, **extra(cause))
        state, phase = place_of(worker)
        assert phase in PHASES[state]
        assert (before.state, state) in STATE_EDGES or before.state is state
        if state is not before.state:
            assert worker.intent.reason
        assert worker.intent.state_since == (now if state is not before.state else before.intent.state_since)
        if state is not State.INACTIVE:
            assert worker.intent.gpu_ids, "whatever is not INACTIVE holds its slice"
        if before.intent.gpu_ids and not worker.intent.gpu_ids:
            assert cause in (Cause.FREE, Cause.STOP), "only the node's word frees a slice"


@given(st.lists(st.sampled_from(list(Cause)), max_size=40))
def test_generation_follows_what_is_wanted(causes: list[Cause]) -> None:
    """CP1: the generation grows by one exactly when the order to the node changes; around LOST as documented."""
    worker = NEW
    for cause in causes:
        if not can(worker, cause):
            continue
        before, worker = worker, step(worker, cause, 1.0, **extra(cause))
        grown = worker.intent.generation - before.intent.generation
        if cause is Cause.LOSE:
            assert grown == 0
        elif before.intent.phase is Phase.LOST:
            assert grown == 1
        else:
            assert grown == (1 if order_of(before.intent) != order_of(worker.intent) else 0)


def test_start_needs_a_free_slice() -> None:
    """Fault F34: a record whose GPUs the node has not freed cannot be started again."""
    failed = step(step(NEW, Cause.START, 1.0, **SLICE), Cause.FAIL, 2.0)
    with pytest.raises(IllegalEdge, match="slice is not free"):
        step(failed, Cause.START, 3.0, **SLICE)
    assert step(step(failed, Cause.FREE, 3.0), Cause.START, 4.0, **SLICE).state is State.STARTING


def report(**fields: object) -> WorkerReport:
    base = WorkerReport("demo-1", "demo", "store-a", 1, 100, ReportedPhase.READY)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def test_fence() -> None:
    """CP12, faults F15, F18: an older incarnation or generation is not current; an end is an end, but not of the next
    start."""
    active = dataclasses.replace(
        step(step(NEW, Cause.START, 1.0, **SLICE), Cause.READY, 2.0),
        observed=WorkerObserved(incarnation=100, generation=1, phase=ReportedPhase.READY),
    )
    assert is_current(active, report())
    assert not is_current(active, report(incarnation=99))
    assert not is_current(active, report(generation=0))
    assert tells_end(active, report(phase=ReportedPhase.FAILED, generation=0))
    assert not tells_end(active, report(phase=ReportedPhase.FAILED, generation=0, incarnation=99))
    assert not tells_end(active, report())
    freed = step(step(active, Cause.FAIL, 3.0), Cause.FREE, 4.0)
    again = step(freed, Cause.START, 5.0, **SLICE)
    assert not tells_end(again, report(phase=ReportedPhase.FAILED, generation=2))
    assert tells_end(again, report(phase=ReportedPhase.FAILED, generation=again.intent.generation))
    assert tells_end(again, report(phase=ReportedPhase.FAILED, generation=2, incarnation=101))


def test_an_old_end_does_not_free_a_start_that_was_cancelled_at_once() -> None:
    """F35: the node may be spawning what it was told before the cancel; only its word for the cancel frees the
    slice."""
    seen = WorkerObserved(incarnation=100, generation=1, phase=ReportedPhase.STOPPED)
    stopped = dataclasses.replace(NEW, observed=seen)
    cancelled = step(step(stopped, Cause.START, 1.0, **SLICE), Cause.CANCEL, 1.1)
    assert not tells_end(cancelled, report(phase=ReportedPhase.STOPPED, generation=1))
    assert tells_end(cancelled, report(phase=ReportedPhase.STOPPED, generation=cancelled.intent.generation))
    assert tells_end(cancelled, report(phase=ReportedPhase.FAILED, generation=1, incarnation=101))


def test_ids_sort_as_people_count() -> None:
    """PL10: ties by id are the same everywhere."""
    assert sorted(["b-2", "a-10", "a-9", "a"], key=id_order) == ["a", "a-9", "a-10", "b-2"]
