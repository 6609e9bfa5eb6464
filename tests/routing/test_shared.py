"""The board in shared memory, and one metrics endpoint for several processes."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.core.admission import Admission, Denied, Granted
from router.core.retry import Blame, Ruling, Verdict
from router.merged import merged
from router.shared import SLOTS, SharedBoard, make_board
from springtide.errors import Exhausted
from springtide.model.routing import RoutedPool, RoutingTable, WorkerLoad
from tests.routing.world import worker

OK = Ruling(Verdict.PASS, Blame.SUCCESS)


def boards(folder: Path, count: int) -> list[SharedBoard]:
    make_board(folder / "board", count)
    return [SharedBoard(folder / "board", index, count) for index in range(count)]


def test_each_sees_what_the_others_put(tmp_path: Path) -> None:
    a, b, c = boards(tmp_path, 3)
    key = ("w", 7)
    cells = [board.cells([key])[key] for board in (a, b, c)]
    for cell, own in zip(cells, (1, 20, 300), strict=True):
        cell.put(own)
    assert [cell.siblings() for cell in cells] == [320, 301, 21]
    b.cells([])
    assert [cells[0].siblings(), cells[2].siblings()] == [300, 1]


def test_another_incarnation_is_another_slot_and_slots_come_back(tmp_path: Path) -> None:
    a, b = boards(tmp_path, 2)
    for incarnation in range(3 * SLOTS):
        key = ("w", incarnation)
        cell = a.cells([key])[key]
        assert cell.siblings() == 0
        cell.put(5)
        if incarnation % 500 == 0:
            assert b.cells([key])[key].siblings() == 5


def test_a_row_of_a_dead_process_is_cleared_by_the_next(tmp_path: Path) -> None:
    a, b = boards(tmp_path, 2)
    key = ("w", 1)
    a.cells([key])[key].put(9)
    seen = b.cells([key])[key]
    assert seen.siblings() == 9
    again = SharedBoard(tmp_path / "board", 0, 2)
    assert seen.siblings() == 0
    again.cells([key])[key].put(2)
    assert seen.siblings() == 2
    again.close()
    assert seen.siblings() == 0


def test_more_keys_than_slots_are_not_shared_and_nothing_breaks(tmp_path: Path) -> None:
    a, b = boards(tmp_path, 2)
    keys = [(f"w{i}", 1) for i in range(SLOTS + 500)]
    mine, theirs = a.cells(keys), b.cells(keys)
    assert len(mine) <= SLOTS
    assert mine.keys() == theirs.keys()
    for number, cell in enumerate(mine.values(), 1):
        cell.put(number)
    assert [cell.siblings() for cell in theirs.values()] == list(range(1, len(mine) + 1))


KEYS = st.lists(st.integers(0, 6), max_size=6)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("kpr"), KEYS), max_size=40))
def test_the_board_is_a_sum_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str, list[int]]]
) -> None:
    """Against a plain model: keys change, numbers change, processes die and come back."""
    path = tmp_path_factory.mktemp("board") / "board"
    make_board(path, 3)
    made = [SharedBoard(path, index, 3) for index in range(3)]
    model: list[dict[tuple[str, int], int]] = [{}, {}, {}]
    for number, (index, step, chosen) in enumerate(steps):
        keys = {(f"w{i}", 1) for i in chosen}
        if step == "k":
            made[index].cells(keys)
            model[index] = {key: model[index].get(key, 0) for key in keys}
        elif step == "r":
            made[index] = SharedBoard(path, index, 3)
            model[index] = {}
        else:
            cells = made[index].cells(model[index])
            for key in keys & model[index].keys():
                cells[key].put(number)
                model[index][key] = number
        for at in range(3):
            for key, cell in made[at].cells(model[at]).items():
                assert cell.siblings() == sum(other.get(key, 0) for n, other in enumerate(model) if n != at)


def admissions(folder: Path, pool: RoutedPool, *names: str, limit: int = 2) -> list[Admission]:
    made = [Admission(random.Random(i), board) for i, board in enumerate(boards(folder, 2))]
    for each in made:
        each.fleet.snapshot(RoutingTable("s", 1, {"p": pool}, {n: worker(n, max_in_flight=limit) for n in names}), 0.0)
    return made


def test_two_processes_have_one_view_of_load(tmp_path: Path) -> None:
    """The second one sees at once what the first sent, spreads around it and never fills a worker twice."""
    one, two = admissions(tmp_path, RoutedPool("p", "m", max_workers=2), "a", "b")
    places = []
    for each in (one, two, one, two):
        ticket = each.open("m", 0.0)
        assert each.admit(ticket, 0.0)
        assert ticket.seat is not None
        places.append(ticket.seat.worker.worker_id)
    assert sorted(places) == ["a", "a", "b", "b"]
    assert places[0] != places[1]
    held = two.open("m", 0.0)
    assert not two.admit(held, 0.0)
    _, wake_at = two.pump("p", 0.0)
    assert wake_at is not None
    assert wake_at <= 0.05  # nobody tells it that the other process's request ended: it looks
    for seat in one.fleet.of("p"):
        while seat.own:
            seat.leave(1.0)
    assert two.pump("p", wake_at)[0] == [Granted(held)]


def test_a_report_does_not_count_another_processs_requests_twice(tmp_path: Path) -> None:
    one, two = admissions(tmp_path, RoutedPool("p", "m", max_workers=2), "a", limit=9)
    for _ in range(5):
        assert one.admit(one.open("m", 0.0), 0.0)
    for each in (one, two):
        each.fleet.loads([WorkerLoad("a", 1, 5)], 1.0)
        [seat] = each.fleet.of("p")
        assert (seat.load, seat.others, seat.echo) == (5, 0, 0)
        each.fleet.loads([WorkerLoad("a", 1, 15)], 2.0)
        assert (seat.load, seat.others, seat.echo) == (15, 10, 2)


def test_what_waits_is_bounded_for_all_processes_together(tmp_path: Path) -> None:
    one, two = admissions(tmp_path, RoutedPool("p", "m", max_waiting=3, max_workers=2))
    for each in (one, two, one):
        assert not each.admit(each.open("m", 0.0), 0.0)
    with pytest.raises(Exhausted):
        two.admit(two.open("m", 0.0), 0.0)
    verdicts, _ = one.pump("p", 400.0)
    assert [isinstance(v, Denied) for v in verdicts] == [True, True]
    assert not two.admit(two.open("m", 0.0), 0.0)


def test_merged_metrics_are_those_of_one_router() -> None:
    texts = []
    for part in (1, 2):
        registry = CollectorRegistry()
        Counter("springtide_router_requests", "Requests.", ("pool",), registry=registry).labels("p").inc(part)
        Gauge("springtide_router_waiting", "Waiting.", ("pool",), registry=registry).labels("p").set(10 * part)
        Gauge("springtide_router_workers", "Workers.", ("pool",), registry=registry).labels("p").set(4)
        Gauge("springtide_router_breaker_state", "Breaker.", ("worker",), registry=registry).labels("a").set(part)
        Gauge("springtide_router_connected", "Connected.", registry=registry).set(2 - part)
        Gauge("springtide_router_table_age_seconds", "Age.", registry=registry).set(part)
        took = Histogram("springtide_router_waited_seconds", "Waited.", ("pool",), buckets=(1, 5), registry=registry)
        took.labels("p").observe(3)
        texts.append(generate_latest(registry).decode())
    samples = {(s.name, tuple(s.labels.items())): s.value for metric in merged(texts) for s in metric.samples}
    assert samples["springtide_router_requests_total", (("pool", "p"),)] == 3
    assert samples["springtide_router_waiting", (("pool", "p"),)] == 30
    assert samples["springtide_router_workers", (("pool", "p"),)] == 4
    assert samples["springtide_router_breaker_state", (("worker", "a"),)] == 2
    assert (samples["springtide_router_connected", ()], samples["springtide_router_table_age_seconds", ()]) == (0, 2)
    assert samples["springtide_router_waited_seconds_count", (("pool", "p"),)] == 2
    assert samples["springtide_router_waited_seconds_bucket", (("le", "5.0"), ("pool", "p"))] == 2
    assert merged([]) == []
