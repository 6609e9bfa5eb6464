"""What Prometheus sees of an agent."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from springtide.link.counts import Carried, Seen
from springtide.link.exposed import LinkFamilies
from springtide.model.worker import WorkerReport
from springtide.v1 import shim_pb2


class AgentMetrics:
    """Counters that the loops raise, and gauges read from the workers when somebody scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reports: tuple[WorkerReport, ...] = ()
        self.links: dict[tuple[str, str], shim_pb2.LinkCounts] = {}
        """Of the shims, by pool and worker."""
        counter = "springtide_agent_"
        self.starts = Counter(f"{counter}engine_starts", "Engine starts.", ["pool"], registry=self.registry)
        self.ends = Counter(
            f"{counter}engine_ends", "Engine ends that nobody asked for.", ["pool", "reason"], registry=self.registry
        )
        self.probe_failures = Counter(
            f"{counter}probe_failures", "Health probes that failed.", ["pool"], registry=self.registry
        )
        self.heartbeats = Counter(f"{counter}heartbeats", "Heartbeats sent.", registry=self.registry)
        self.sessions = Counter(f"{counter}sessions", "Sessions opened with a control plane.", registry=self.registry)
        self.connected = Gauge(f"{counter}connected", "1 while a session is up.", registry=self.registry)
        self.registry.register(_Workers(self))


class _Workers(Collector):
    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        reports = self._metrics.reports
        phases = GaugeMetricFamily("springtide_agent_workers", "Workers by phase.", labels=["pool", "phase"])
        for key, count in _count((report.pool, report.phase.value.lower()) for report in reports).items():
            phases.add_metric(list(key), count)
        yield phases
        in_flight = GaugeMetricFamily("springtide_agent_in_flight", "Requests in shims.", labels=["pool", "worker"])
        for report in reports:
            if report.in_flight is not None:
                in_flight.add_metric([report.pool, report.worker_id], report.in_flight)
        yield in_flight
        told = "Bytes that a worker's last sleep gave back, measured on its GPUs (simulated ones: at its processes)."
        freed = GaugeMetricFamily("springtide_agent_freed_bytes", told, labels=["pool", "worker"])
        told = "Bytes that a worker's last wake took again, measured alike."
        taken = GaugeMetricFamily("springtide_agent_reoccupied_bytes", told, labels=["pool", "worker"])
        for report in reports:
            for family, value in ((freed, report.freed_bytes), (taken, report.reoccupied_bytes)):
                if value is not None:
                    family.add_metric([report.pool, report.worker_id], value)
        yield freed
        yield taken
        links = LinkFamilies("springtide_agent_", ("pool", "worker"))
        for labels, counts in self._metrics.links.items():
            links.add(labels, _seen(counts))
        yield from links


def _seen(counts: shim_pb2.LinkCounts) -> Seen:
    carried = Carried(
        frames_in=counts.frames_in,
        bytes_in=counts.bytes_in,
        frames_out=counts.frames_out,
        bytes_out=counts.bytes_out,
        opened=counts.streams_opened,
        refused=counts.streams_refused,
    )
    return Seen(counts.links, counts.streams, carried, dict(counts.ended))


def _count(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return counts
