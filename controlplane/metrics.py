"""Prometheus metrics of the control plane. Gauges are read from the published snapshot at each scrape; what is unknown
is left out, never zero. The first document's seven names are the `springtide_pool_*` gauges named after them."""

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from controlplane.assembly import ControlPlane
from controlplane.core import views
from controlplane.core.snapshot import Put, Snapshot
from controlplane.loops.leader import LeaderStats, Step
from springtide.model.enums import NodeState, State
from springtide.model.worker import Worker

log = logging.getLogger(__name__)

_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)


class Metrics(Collector):
    """Called with each commit of the leader, and by each scrape (in the endpoint's thread)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._control: ControlPlane | None = None
        self._decisions = Counter(
            "springtide_decisions", "Decisions recorded.", ["pool", "result", "reason"], registry=self.registry
        )
        self._events = Counter("springtide_events", "Events recorded.", ["pool", "action"], registry=self.registry)
        self._durations = Histogram(
            "springtide_worker_transition_seconds",
            "Time that a worker spent STARTING or DRAINING, by where it went.",
            ["pool", "state", "to"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def attach(self, control: ControlPlane) -> None:
        """What to read at a scrape."""
        self._control = control

    def __call__(self, step: Step) -> None:
        for decision in step.plan.decisions:
            if decision.count == 1:
                self._decisions.labels(decision.pool, decision.result.value, decision.reason).inc()
        for event in step.plan.events:
            self._events.labels(event.pool, event.action).inc()
        for write in step.plan.writes:
            if isinstance(write, Put) and isinstance(write.record, Worker):
                self._moved(step.before.workers.get(write.record.worker_id), write.record, step.now)

    def _moved(self, before: Worker | None, after: Worker, now: float) -> None:
        if before is None or before.state is after.state or before.state not in (State.STARTING, State.DRAINING):
            return
        spent_s = max(0.0, now - before.intent.state_since)
        self._durations.labels(after.pool, before.state.value, after.state.value).observe(spent_s)

    def collect(self) -> Iterator[Metric]:
        """Runs in another thread: reads immutable snapshots and plain numbers only."""
        control = self._control
        if control is None or not control.hub.snapshot.store_id:
            return
        snapshot, now = control.hub.snapshot, control.clock.now()
        yield from _pools(snapshot, now)
        yield from _cluster(snapshot, now)
        yield from _leader(control.leader.stats)

    def describe(self) -> list[Metric]:
        return []


def _pools(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    names = {
        "desired_workers": "STARTING and ACTIVE workers that the pool converges to.",
        "starting_workers": "Workers STARTING.",
        "active_workers": "Workers ACTIVE.",
        "draining_workers": "Workers DRAINING.",
        "total_workers": "Workers recorded, INACTIVE ones included.",
        "sleeping_workers": "Workers asleep: memory released, process kept.",
        "weights_behind": "ACTIVE workers that do not serve the pool's weights yet.",
        "active_requests": "Requests in flight in the pool's shims. Absent: unknown.",
        "pending_requests": "Requests that wait in routers. Absent: unknown.",
        "load_ratio": "Load by capacity. Absent: unknown.",
        "total_capacity": "Requests that the ACTIVE workers are expected to hold.",
    }
    gauges = {name: GaugeMetricFamily(f"springtide_pool_{name}", text, labels=["pool"]) for name, text in names.items()}
    states = GaugeMetricFamily("springtide_workers", "Workers by state.", labels=["pool", "state"])
    for pool in snapshot.pools:
        status = views.pool_status(snapshot, pool, now)
        values = {
            "desired_workers": status.desired_workers,
            "starting_workers": status.starting,
            "active_workers": status.active,
            "draining_workers": status.draining,
            "total_workers": status.total,
            "sleeping_workers": status.sleeping,
            "weights_behind": status.weights_behind,
            "active_requests": status.in_flight,
            "pending_requests": status.waiting,
            "load_ratio": status.load_ratio,
            "total_capacity": status.total_capacity,
        }
        for name, value in values.items():
            if value is not None:
                gauges[name].add_metric([pool], value)
        counts = (status.starting, status.active, status.draining, status.inactive)
        for state, number in zip(State, counts, strict=True):
            states.add_metric([pool, state.value], number)
    yield from gauges.values()
    yield states


def _cluster(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("springtide_nodes", "Nodes by state.", labels=["state"])
    for state in NodeState:
        nodes.add_metric([state.value], sum(1 for node in snapshot.nodes.values() if node.state is state))
    yield nodes
    yield _provided(snapshot)
    live = snapshot.live
    agents = sum(1 for node in live.nodes.values() if node.connected)
    routers = sum(1 for router in live.routers.values() if router.connected)
    yield GaugeMetricFamily("springtide_agent_sessions", "Agents connected.", value=agents)
    yield GaugeMetricFamily("springtide_router_sessions", "Routers connected.", value=routers)
    givers = sum(1 for provisioner in live.provisioners.values() if provisioner.connected)
    yield GaugeMetricFamily("springtide_provisioner_sessions", "Provisioners connected.", value=givers)
    yield GaugeMetricFamily("springtide_store_revision", "The store's commit counter.", value=snapshot.revision)
    grace_s = max(0.0, snapshot.grace_until - now)
    yield GaugeMetricFamily("springtide_grace_seconds", "No lease expires for so long.", value=grace_s)


def _provided(snapshot: Snapshot) -> Metric:
    counts: dict[tuple[str, str, str], int] = {}
    for provisioner_id, provisioner in snapshot.live.provisioners.items():
        for name in provisioner.sets:
            counts |= {(provisioner_id, name, state.value): 0 for state in NodeState}
    for node in snapshot.nodes.values():
        if node.provided is not None:
            key = (node.provided.provisioner_id, node.provided.capability_set, node.state.value)
            counts[key] = counts.get(key, 0) + 1
    labels = ["provisioner", "capability_set", "state"]
    found = GaugeMetricFamily("springtide_provided_nodes", "Nodes of provisioners by set and state.", labels=labels)
    for key, number in counts.items():
        found.add_metric(list(key), number)
    return found


def _leader(stats: LeaderStats) -> Iterator[Metric]:
    plans = SummaryMetricFamily("springtide_plan_seconds", "Time spent planning, and looks.")
    plans.add_metric([], count_value=stats.looks, sum_value=stats.plan_seconds)
    yield plans
    yield CounterMetricFamily("springtide_commits", "Commits of the leader.", value=stats.commits)
    yield CounterMetricFamily("springtide_commit_conflicts", "Commits that another was before.", value=stats.conflicts)
    yield CounterMetricFamily("springtide_leader_errors", "Looks that failed.", value=stats.errors)
    writable = float(stats.store_error is None)
    yield GaugeMetricFamily("springtide_store_writable", "1: the last commit was written.", value=writable)
