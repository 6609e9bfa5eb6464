"""Seats, wants and a small simulated pool for tests of routing; virtual time only."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router.core.pick import pick
from router.core.policies import make_policy
from router.core.policies.policy import Policy
from router.core.seat import Seat
from router.core.want import NO_NEEDS, NOTHING, Needs, Want
from springtide.model.pool import RoutingSpec
from springtide.model.routing import RoutedWorker


def worker(name: str, incarnation: int = 1, **fields: Any) -> RoutedWorker:
    return RoutedWorker(name, "p", incarnation, "127.0.0.1:1", **fields)


def seats_of(count: int, **fields: Any) -> list[Seat]:
    return [Seat(worker(f"w{i}", **fields), -1000.0) for i in range(count)]


def policy(name: str, **settings: int | float | str) -> Policy:
    return make_policy(RoutingSpec(name, settings))


def prompt(text: str, output_tokens: int | None = None, session: str = "", needs: Needs = NO_NEEDS) -> Want:
    raw = text.encode()
    return Want(
        prompt=lambda: raw,
        prompt_tokens=len(raw) // 4,
        output_tokens=output_tokens,
        session=session,
        needs=needs,
    )


@dataclass
class Sender:
    """One router's view of a pool: picks, and keeps the counts as admission does."""

    seats: list[Seat]
    policy: Policy
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def send(self, now: float = 0.0, want: Want = NOTHING, hold: bool = True) -> Seat:
        """The seat that takes it; with `hold` it stays there."""
        seat = pick(self.policy, self.seats, (), now, self.rng, want)
        assert seat is not None
        seat.enter(now)
        tokens, prefill = self.policy.cost(want)
        seat.own_tokens += tokens
        seat.own_prefill += prefill
        if not hold:
            self.end(seat, now, want)
        return seat

    def end(self, seat: Seat, now: float, want: Want = NOTHING) -> None:
        tokens, prefill = self.policy.cost(want)
        seat.leave(now)
        seat.own_tokens -= tokens
        seat.own_prefill -= prefill


@dataclass
class Job:
    """One request of a simulation: the seconds of work that it is for a worker."""

    at: float
    want: Want
    work_s: Callable[[str], float]


def simulate(sender: Sender, jobs: list[Job]) -> list[float]:
    """Latencies of jobs on workers that each do one thing after another, in order of arrival."""
    free_at = {seat.worker.worker_id: 0.0 for seat in sender.seats}
    ends: list[tuple[float, int, Seat, Want]] = []
    latencies = []
    for number, job in enumerate(sorted(jobs, key=lambda job: job.at)):
        while ends and ends[0][0] <= job.at:
            at, _, seat, want = heapq.heappop(ends)
            sender.end(seat, at, want)
        seat = sender.send(job.at, job.want)
        name = seat.worker.worker_id
        free_at[name] = max(free_at[name], job.at) + job.work_s(name)
        heapq.heappush(ends, (free_at[name], number, seat, job.want))
        latencies.append(free_at[name] - job.at)
    return sorted(latencies)


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
