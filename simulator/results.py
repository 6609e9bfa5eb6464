"""What came of a run: a summary, one row per request, and the scaling log with the fourth seed's columns."""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from controlplane.store.store import Records
from simulator.meter import Look
from simulator.requests import Request
from simulator.world import World
from springtide.model.enums import DecisionResult
from springtide.model.record import Decision, Event

FLAP_S = 120.0  # a scale-down that is followed by a scale-up of the same pool within this time
REQUEST_COLUMNS = (
    "request_id",
    "pool",
    "arrival_s",
    "prompt_size",
    "token_size",
    "queue_s",
    "ttft_s",
    "tbt_s",
    "e2e_s",
    "worker",
    "retries",
    "error",
)
SCALING_COLUMNS = ("time", "action", "target", "status")
_SCALING = (
    "scale_up_start",
    "scale_up_complete",
    "scale_down_start",
    "scale_down_complete",
    "scale_down_invalid",
    "scale_up_server",
    "scale_down_server",
    "scale_down_server_invalid",
    "drain_cancelled",
    "start_cancelled",
    "worker_failed",
    "worker_lost",
    "adopt_start",
    "worker_adopted",
)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as attained: first token, and mean time between tokens, seconds."""

    ttft_s: float = 1.0
    tbt_s: float = 0.050

    def attained(self, request: Request) -> bool:
        ttft, tbt = request.ttft_s, request.tbt_s
        return not request.error and ttft is not None and ttft <= self.ttft_s and (tbt is None or tbt <= self.tbt_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds; None where nothing was measured."""

    requests: int
    failed: int
    slo_attainment: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None
    tbt_p90_s: float | None
    tbt_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    queue_mean_s: float
    retries: int
    worker_seconds: float
    worker_seconds_by_role: dict[str, float]
    worker_seconds_by_state: dict[str, float]
    most_workers: int
    scale_ups: int
    scale_downs: int
    flaps: int
    length_s: float
    errors: dict[str, int]


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed. `ordered` ascends."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summarize(world: World, slo: Slo | None = None) -> Summary:
    slo = slo or Slo()
    requests = world.requests
    ttft = sorted(r.ttft_s for r in requests if r.ttft_s is not None and not r.error)
    tbt = sorted(r.tbt_s for r in requests if r.tbt_s is not None)
    e2e = sorted(r.e2e_s for r in requests if r.e2e_s is not None and not r.error)
    ups, downs, flaps = moves(world.store.decisions.values(), world.load_began_at)
    by_state: Counter[str] = Counter()
    for (_, state), seconds in world.meter.seconds.items():
        by_state[state.value] += seconds  # type: ignore[assignment]  # a Counter adds floats as well
    return Summary(
        requests=len(requests),
        failed=sum(1 for r in requests if r.error or not r.ended),
        slo_attainment=sum(1 for r in requests if slo.attained(r)) / max(1, len(requests)),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        tbt_p50_s=quantile(tbt, 0.5),
        tbt_p90_s=quantile(tbt, 0.9),
        tbt_p99_s=quantile(tbt, 0.99),
        e2e_p50_s=quantile(e2e, 0.5),
        e2e_p99_s=quantile(e2e, 0.99),
        queue_mean_s=sum(r.queue_s for r in requests) / max(1, len(requests)),
        retries=sum(r.retries for r in requests),
        worker_seconds=world.meter.worker_seconds(),
        worker_seconds_by_role=seconds_by_role(world.store.records, world),
        worker_seconds_by_state=dict(by_state),
        most_workers=max((look.starting + look.active + look.draining for look in world.looks), default=0),
        scale_ups=ups,
        scale_downs=downs,
        flaps=flaps,
        length_s=world.now - world.load_began_at,
        errors=dict(Counter(r.error for r in requests if r.error)),
    )


def seconds_by_role(records: Records, world: World) -> dict[str, float]:
    """STARTING, ACTIVE and DRAINING seconds of workers by their pools' roles."""
    found: Counter[str] = Counter()
    for (pool, _), seconds in world.meter.seconds.items():
        role = records.pools[pool].spec.role.value.lower() if pool in records.pools else "unknown"
        found[role] += seconds  # type: ignore[assignment]
    return dict(found)


def moves(decisions: Iterable[Decision], since: float = -math.inf) -> tuple[int, int, int]:
    """(scale-ups, scale-downs, flaps) among decisions at or after `since`."""
    ups = downs = flaps = 0
    last_down: dict[str, float] = {}
    for decision in sorted(decisions, key=lambda d: d.at):
        if decision.at < since:
            continue
        if decision.result is DecisionResult.SCALE_UP:
            ups += 1
            flaps += decision.at - last_down.pop(decision.pool, -math.inf) <= FLAP_S
        elif decision.result is DecisionResult.SCALE_DOWN:
            downs += 1
            last_down[decision.pool] = decision.at
    return ups, downs, flaps


# ------------------------------------------------------------------ files


def write_requests(path: Path, requests: Iterable[Request], origin: float = 0.0) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(REQUEST_COLUMNS)
        for r in requests:
            times = (_s(r.queue_s), _s(r.ttft_s), _s(r.tbt_s), _s(r.e2e_s))
            row = (r.number, r.pool, _s(r.arrived_at - origin), r.prompt_tokens, r.output_tokens)
            writer.writerow((*row, *times, r.worker, r.retries, r.error))


def scaling_rows(events: Iterable[Event], origin: float = 0.0) -> list[tuple[str, str, str, str]]:
    """time, action, target, status: as the fourth seed logs them."""
    return [
        (_s(e.at - origin), e.action, e.target, e.status) for e in events if e.action in _SCALING and e.at >= origin
    ]


def write_scaling(path: Path, rows: Iterable[tuple[str, str, str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(SCALING_COLUMNS)
        writer.writerows(rows)


def write_looks(path: Path, looks: Sequence[Look]) -> None:
    """One row per look: load and workers by state."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Look.__slots__)
        for look in looks:
            writer.writerow([f"{value:g}" for value in asdict(look).values()])


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.6f}".rstrip("0").rstrip(".")
