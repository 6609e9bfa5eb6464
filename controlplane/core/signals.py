"""What the live view says about load. A missing or stale signal is unknown (None), never zero."""

from collections.abc import Iterable, Mapping
from typing import Any

from controlplane.core.snapshot import LoadSample, NodeLive, RouterLive, Snapshot
from springtide.model.enums import NodeState, State
from springtide.model.node import Node
from springtide.model.worker import Worker, WorkerReport


def fresh_report(snapshot: Snapshot, worker: Worker, now: float) -> WorkerReport | None:
    """The worker's report when it is young enough to act on and about this incarnation."""
    return fresh_reports(snapshot, (worker,), now)[0]


def fresh_reports(snapshot: Snapshot, workers: Iterable[Worker], now: float) -> list[WorkerReport | None]:
    """`fresh_report` of each worker."""
    nodes, store_id, max_age_s = snapshot.live.nodes, snapshot.store_id, snapshot.timing.signal_max_age_s
    found: list[WorkerReport | None] = []
    for worker in workers:
        live = nodes.get(worker.intent.node_id)
        report = None
        if live is not None and now - live.last_heard_at <= max_age_s:
            report = live.reports.get(worker.worker_id)
        if report is not None and (report.store_id != store_id or report.incarnation != worker.observed.incarnation):
            report = None
        found.append(report)
    return found


def in_flight_of(snapshot: Snapshot, worker: Worker, now: float) -> int | None:
    """Requests inside the worker's shim."""
    report = fresh_report(snapshot, worker, now)
    return report.in_flight if report is not None else None


def live_routers(snapshot: Snapshot, now: float) -> list[RouterLive]:
    """Routers that may still route: connected, or heard within their lease."""
    lease_s = snapshot.timing.router_lease_s
    return [r for r in snapshot.live.routers.values() if r.connected or now - r.last_heard_at <= lease_s]


def total(values: list[int | None]) -> tuple[int | None, int]:
    """(sum, or None when a part is unknown; sum of what is known)."""
    known, whole = 0, True
    for value in values:
        if value is None:
            whole = False
        else:
            known += value
    return (known if whole else None), known


def waiting_of(snapshot: Snapshot, pool: str, now: float, *, rejected: bool = True) -> tuple[int | None, int]:
    """(requests that routers hold back, known part); with `rejected`, also those refused within one Retry-After.
    Without a live router it is unknown: nobody would see a request."""
    parts: list[int | None] = []
    for router in live_routers(snapshot, now):
        demand = router.demand.get(pool)
        if demand is None or now - router.last_heard_at > snapshot.timing.signal_max_age_s:
            parts.append(None)
        else:
            parts.append(demand.waiting + (demand.rejected if rejected else 0))
    whole, known = total(parts)
    return (whole if parts else None), known


def is_leaving(worker: Worker, nodes: Mapping[str, Node]) -> bool:
    """Its node has announced that it stops: the worker serves on, but no longer counts as capacity to plan with."""
    node = nodes.get(worker.intent.node_id)
    return node is not None and node.state is NodeState.RELEASING


def leaving_nodes(workers: Iterable[Worker], nodes: Mapping[str, Node]) -> set[str]:
    """Nodes of these workers where each of them `is_leaving`."""
    found = {worker.intent.node_id for worker in workers}
    return {key for key in found if (node := nodes.get(key)) is not None and node.state is NodeState.RELEASING}


def node_end(node: Node, live: NodeLive | None) -> float | None:
    """When it is taken away, by whoever says the earliest: its agent, its provisioner, an operator."""
    told = [
        live.stop_deadline_at if live is not None else None,
        node.provided.ends_at if node.provided is not None else None,
        node.spec.ends_at,
    ]
    return min((at for at in told if at is not None), default=None)


def sample(snapshot: Snapshot, pool: str, workers: list[Worker], nodes: Mapping[str, Node], now: float) -> LoadSample:
    """The pool's load as it is known now. What runs on a leaving node is load; the worker there is not capacity."""
    leaving = leaving_nodes(workers, nodes)
    active: list[Worker] = []
    staying = starting = 0
    for worker in workers:
        intent = worker.intent
        if intent.state is State.ACTIVE:
            active.append(worker)
            staying += intent.node_id not in leaving
        elif intent.state is State.STARTING:
            starting += not intent.spare and intent.node_id not in leaving
    reports = fresh_reports(snapshot, active, now)
    in_flight, known_in_flight = total([None if report is None else report.in_flight for report in reports])
    waiting, known_waiting = waiting_of(snapshot, pool, now)
    return LoadSample(
        at=now,
        in_flight=in_flight,
        waiting=waiting,
        active=staying,
        starting=starting,
        at_least=known_in_flight + known_waiting,
        **_details(snapshot, pool, active, reports, now),
    )


def _details(
    snapshot: Snapshot, pool: str, active: list[Worker], reports: list[WorkerReport | None], now: float
) -> dict[str, Any]:
    """What rides along for policies that want it; each part is unknown when one worker's or router's is."""
    demands = [
        router.demand.get(pool) if now - router.last_heard_at <= snapshot.timing.signal_max_age_s else None
        for router in live_routers(snapshot, now)
    ]
    arrivals, _ = total([None if demand is None else demand.requests_total for demand in demands])
    kv = [report.kv_use for report in reports if report is not None and report.kv_use is not None]
    p50 = [d.ttft_p50_s for d in demands if d is not None and d.ttft_p50_s is not None]
    p99 = [d.ttft_p99_s for d in demands if d is not None and d.ttft_p99_s is not None]
    return {
        "arrivals_total": arrivals if demands else None,
        "routers": len(demands),
        "tokens_total": total([None if r is None else r.generation_tokens_total for r in reports])[0],
        "engine_waiting": total([None if r is None else r.engine_waiting for r in reports])[0],
        "kv_use": max(kv) if kv and len(kv) == len(reports) else None,
        "ttft_p50_s": max(p50, default=None),
        "ttft_p99_s": max(p99, default=None),
        "youngest_s": min((now - worker.intent.state_since for worker in active), default=None),
    }
