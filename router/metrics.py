"""The router's Prometheus metrics: counters where things happen, gauges read from the core when scraped."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.core.admission import Admission
from router.core.breaker import BreakerState
from springtide.link.counts import Seen
from springtide.link.exposed import LinkFamilies

_BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Count:
    """One number of a Tally."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def inc(self, amount: int = 1) -> None:
        """Adds."""
        self.total += amount


class Tally(Collector):
    """A counter for the path of every request: plain numbers that one thread adds to and the exporter's reads, where
    the library takes a lock each time. Looked up by its labels' values as a tuple."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._family = name, documentation, labels
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def of(self, labels: tuple[str, ...]) -> Count:
        """The number with these labels."""
        found = self._counts.get(labels)
        if found is None:
            found = self._counts[labels] = Count()
        return found

    def collect(self) -> Iterable[Metric]:
        name, documentation, labels = self._family
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, count in list(self._counts.items()):
            family.add_metric(values, count.total)
        return [family]


class Times(Collector):
    """A histogram of seconds by pool; see Tally."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._family = name, documentation
        self._bounds = bounds
        self._pools: dict[str, tuple[list[int], list[float]]] = {}
        registry.register(self)

    def observe(self, pool: str, seconds: float) -> None:
        """Adds one."""
        found = self._pools.get(pool)
        if found is None:
            found = self._pools[pool] = ([0] * (len(self._bounds) + 1), [0.0])
        found[0][bisect_left(self._bounds, seconds)] += 1
        found[1][0] += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._family, labels=("pool",))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for pool, (counts, total) in list(self._pools.items()):
            family.add_metric((pool,), list(zip(names, accumulate(counts), strict=True)), total[0])
        return [family]


class Metrics:
    """One registry per router, so that several live in one process."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Tally(
            "springtide_router_requests",
            "Requests that ended, by pool, front (http, grpc) and outcome.",
            ("pool", "front", "outcome"),
            self.registry,
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
        self.pairs = Counter(
            "springtide_router_pairs",
            "Requests of models with prefill and decode pools, by decode pool and outcome: paired, prefill_retried, "
            "decode_alone, partner_lost.",
            ("pool", "outcome"),
            registry=self.registry,
        )
        self.rejected = Counter(
            "springtide_router_rejected",
            "Requests refused for lack of a worker, by pool and reason.",
            ("pool", "reason"),
            registry=self.registry,
        )
        self.tokens = Tally("springtide_router_events", "Stream events relayed, by pool.", ("pool",), self.registry)
        self.ttft = Times(
            "springtide_router_time_to_first_token_seconds",
            "From a request's arrival to the first event of its stream, waiting and retries included.",
            _TTFT_BUCKETS,
            self.registry,
        )
        self.waited = Histogram(
            "springtide_router_waited_seconds",
            "Time held in the router, of requests that were held.",
            ("pool",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_State(admission, clock))
        self._clock = clock

    def follow(self, contact: "Contact") -> None:
        """Shows the contact with the control plane."""
        self.registry.register(_Contact(contact, self._clock))

    def links(self, seen: Callable[[], Seen]) -> None:
        """Shows the links to shims."""
        self.registry.register(_Links(seen))


class Contact(Protocol):
    """With the control plane."""

    connected: bool
    confirmed_at: float | None
    """When it last said something that confirms the table in use; None: not yet in this life."""


class _Contact(Collector):
    """Read in the exporter's thread."""

    def __init__(self, contact: Contact, clock: Callable[[], float]) -> None:
        self._contact = contact
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        connected = GaugeMetricFamily("springtide_router_connected", "1 while the control plane gives the table.")
        connected.add_metric([], self._contact.connected)
        told = "Since the control plane last confirmed the table that is routed by. Absent: not yet in this life."
        age = GaugeMetricFamily("springtide_router_table_age_seconds", told)
        confirmed_at = self._contact.confirmed_at
        if confirmed_at is not None:
            age.add_metric([], max(0.0, self._clock() - confirmed_at))
        return [connected, age]


class _Links(Collector):
    """Read in the exporter's thread."""

    def __init__(self, seen: Callable[[], Seen]) -> None:
        self._seen = seen

    def collect(self) -> Iterable[Metric]:
        families = LinkFamilies("springtide_router_")
        families.add((), self._seen())
        return families


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
