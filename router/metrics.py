"""The router's Prometheus metrics: counters where things happen, gauges read from the core when scraped."""

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.admission import Admission
from router.core.breaker import BreakerState

_BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


M = TypeVar("M", Counter, Histogram)


class Metrics:
    """One registry per router, so that several live in one process."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "springtide_router_requests",
            "Requests that ended, by pool, front (http, grpc) and outcome.",
            ("pool", "front", "outcome"),
            registry=self.registry,
        )
        self.retries = Counter(
            "springtide_router_retries",
            "Attempts before the first token that were given to another worker, by pool and cause.",
            ("pool", "cause"),
            registry=self.registry,
        )
        self.continuations = Counter(
            "springtide_router_continuations",
            "Streams that lost their worker after the first token, by pool, reason of the loss and result.",
            ("pool", "reason", "result"),
            registry=self.registry,
        )
        self.rejected = Counter(
            "springtide_router_rejected",
            "Requests refused for lack of a worker, by pool and reason.",
            ("pool", "reason"),
            registry=self.registry,
        )
        self.tokens = Counter(
            "springtide_router_events", "Stream events relayed, by pool.", ("pool",), registry=self.registry
        )
        self.ttft = Histogram(
            "springtide_router_time_to_first_token_seconds",
            "From a request's arrival to the first event of its stream, waiting and retries included.",
            ("pool",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.waited = Histogram(
            "springtide_router_waited_seconds",
            "Time held in the router, of requests that were held.",
            ("pool",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_State(admission, clock))
        self._children: dict[tuple[object, ...], object] = {}

    def of(self, metric: M, *labels: str) -> M:
        """The child of a metric, found again without the library's lock."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast(M, child)


class _State(Collector):
    """Gauges. Read in the exporter's thread: every look works on a copy."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        table = self._admission.fleet.table
        waiting = GaugeMetricFamily("springtide_router_waiting", "Requests held now, by pool.", labels=["pool"])
        workers = GaugeMetricFamily("springtide_router_workers", "Routable workers, by pool.", labels=["pool"])
        for name in list(table.pools):
            waiting.add_metric([name], self._admission.waiting(name))
            workers.add_metric([name], self._admission.fleet.active(name))
        in_flight = GaugeMetricFamily(
            "springtide_router_in_flight", "This router's requests at each worker.", labels=["pool", "worker"]
        )
        for seat in list(self._admission.fleet.all()):
            in_flight.add_metric([seat.worker.pool, seat.worker.worker_id], seat.own)
        state = GaugeMetricFamily(
            "springtide_router_breaker_state",
            "A worker's breaker: 0 closed, 1 half open (one request probes), 2 open.",
            labels=["pool", "worker"],
        )
        now = self._clock()
        for seat in list(self._admission.fleet.all()):
            labels = [seat.worker.pool, seat.worker.worker_id]
            state.add_metric(labels, _BREAKER[seat.breaker.state(now)])
        trips = CounterMetricFamily(
            "springtide_router_breaker_trips", "Times that a worker's breaker opened, by pool.", labels=["pool"]
        )
        for name in list(table.pools):
            trips.add_metric([name], self._admission.trips(name))
        revision = GaugeMetricFamily("springtide_router_table_revision", "Revision of the routing table.")
        revision.add_metric([], table.revision)
        return [waiting, workers, in_flight, state, trips, revision]
