"""What each policy is chosen for, in simulated pools: ratios within one run, virtual time, a fixed seed."""

import random
from collections import OrderedDict

import pytest

from router.core.fleet import hear_others
from router.core.seat import Seat
from router.core.want import Want
from tests.routing.world import Job, Sender, percentile, policy, prompt, seats_of, simulate


class Cache:
    """A worker's prefix cache: the real one, of which routers only guess."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._held: OrderedDict[int, None] = OrderedDict()

    def missing(self, chunks: tuple[int, ...]) -> int:
        """Chunks that must be computed; afterwards they are held."""
        known = 0
        for chunk in chunks:
            if chunk not in self._held:
                break
            known += 1
        for chunk in reversed(chunks):
            self._held[chunk] = None
            self._held.move_to_end(chunk)
        while len(self._held) > self._chunks:
            self._held.popitem(last=False)
        return len(chunks) - known


def conversations(rng: random.Random, users: int, turns: int) -> list[tuple[float, Want]]:
    """Users who talk in turns; each turn has all that was said before."""
    told = []
    for user in range(users):
        text, at = f"You help user {user}. " + "rule " * 300, rng.uniform(0, 20)
        for _ in range(turns):
            text += f"{rng.random()} " * 60
            told.append((at, prompt(text, session=f"u{user}")))
            at += rng.expovariate(1 / 4)
    return told


def run_conversations(name: str) -> tuple[int, list[float]]:
    """Chunks that had to be computed, and the latencies."""
    told = conversations(random.Random(5), users=60, turns=8)
    caches = {f"w{i}": Cache(1200) for i in range(4)}
    computed = 0

    def job(at: float, want: Want) -> Job:
        def work_s(worker_id: str) -> float:
            nonlocal computed
            missing = caches[worker_id].missing(want.chunks(256))
            computed += missing
            return 0.02 + 0.004 * missing

        return Job(at, want, work_s)

    latencies = simulate(Sender(seats_of(4), policy(name)), [job(at, want) for at, want in told])
    return computed, latencies


def test_prefixes_are_computed_less_often_where_they_are_known() -> None:
    """RT13: conversations, caches that hold a part of them; the same arrivals for each policy."""
    blind, slow = run_conversations("least_in_flight")
    for name in ("prefix_aware", "kv_cost", "sticky"):
        computed, latencies = run_conversations(name)
        assert computed < 0.6 * blind, name
        assert percentile(latencies, 0.5) < percentile(slow, 0.5), name


def test_cost_beats_count_when_requests_differ_in_size() -> None:
    """RT12: one in twenty requests is a hundred times as long."""
    waits = {}
    for name in ("round_robin", "least_in_flight", "request_cost"):
        rng = random.Random(11)
        jobs, at = [], 0.0
        for _ in range(3000):
            at += rng.expovariate(10.0)
            tokens = 20_000 if rng.random() < 0.05 else 200
            want = Want(prompt_tokens=tokens // 2, output_tokens=tokens // 2)
            jobs.append(Job(at, want, lambda _, tokens=tokens: tokens / 5000))  # type: ignore[misc]
        waits[name] = simulate(Sender(seats_of(4), policy(name)), jobs)
    mean = {name: sum(found) / len(found) for name, found in waits.items()}
    assert mean["request_cost"] < mean["least_in_flight"] < mean["round_robin"]
    assert percentile(waits["request_cost"], 0.9) < 0.8 * percentile(waits["least_in_flight"], 0.9)


def test_weighted_keeps_unequal_workers_equally_busy() -> None:
    def run(name: str) -> list[float]:
        seats = seats_of(3)
        for seat, weight in zip(seats, ("6", "3", "1"), strict=True):
            object.__setattr__(seat.worker, "labels", {"weight": weight})
        speed = {"w0": 6.0, "w1": 3.0, "w2": 1.0}
        rng, jobs, at = random.Random(2), [], 0.0
        for _ in range(2000):
            at += rng.expovariate(7.0)
            jobs.append(Job(at, Want(), lambda worker_id: 1.0 / speed[worker_id]))
        return simulate(Sender(seats, policy(name)), jobs)

    assert percentile(run("weighted"), 0.99) < 0.2 * percentile(run("round_robin"), 0.99)


def several_routers(name: str, routers: int, hear: bool = True) -> float:
    """Routers that each hear once a second what ran 0.8 s ago. The mean of the fullest worker's in-flight over the mean
    of all."""
    rng = random.Random(9)
    views = [Sender(seats_of(8), policy(name), random.Random(i)) for i in range(routers)]
    ends: dict[int, list[tuple[Sender, Seat]]] = {}
    total = {f"w{i}": 0 for i in range(8)}
    past: list[dict[str, int]] = []
    ratio = 0.0
    for tick in range(400):
        now = tick / 10
        for view, seat in ends.pop(tick, ()):
            view.end(seat, now)
            total[seat.worker.worker_id] -= 1
        for view in views * 4:
            seat = view.send(now)
            total[seat.worker.worker_id] += 1
            ends.setdefault(tick + 1 + rng.randrange(30), []).append((view, seat))
        past.append(dict(total))
        for number, view in enumerate(views):
            if tick >= 8 and tick % 10 == number * 3 % 10:
                for seat in view.seats:
                    seat.reported(past[tick - 8][seat.worker.worker_id], now)
                if hear:
                    hear_others(view.seats)
        ratio += max(total.values()) / (sum(total.values()) / 8)
    return ratio / 400


@pytest.mark.parametrize("routers", [2, 4, 8])
def test_several_routers_do_not_run_to_one_worker(routers: int) -> None:
    """Reports are old; who takes them at their word runs, with all others, to the worker that looked empty."""
    chance = several_routers("random", routers)
    heard = several_routers("least_in_flight", routers)
    assert heard < 1.12 < chance
    assert heard < 0.85 * several_routers("least_in_flight", routers, hear=False)
    assert several_routers("power_of_two", routers) < chance
    assert several_routers("round_robin", routers) < chance
