"""What Prometheus sees of a provisioner."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from springtide.model.provisioning import ProvidedNode, ProvidedPhase


class ProvisionerMetrics:
    """Counters that the loops raise, and gauges read from the last listing when somebody scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.nodes: Sequence[ProvidedNode] = ()
        prefix = "springtide_provisioner_"
        self.calls = Counter(
            f"{prefix}calls",
            "Calls to the provider by what they were (start, stop) and their outcome (done, refused, unknown).",
            ["call", "outcome"],
            registry=self.registry,
        )
        self.listings = Counter(
            f"{prefix}listings", "Looks at what the provider gives, by outcome.", ["outcome"], registry=self.registry
        )
        self.sessions = Counter(f"{prefix}sessions", "Sessions opened with a control plane.", registry=self.registry)
        self.connected = Gauge(f"{prefix}connected", "1 while a session is up.", registry=self.registry)
        self.registry.register(_Nodes(self))


class _Nodes(Collector):
    def __init__(self, metrics: ProvisionerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        counts: dict[tuple[str, str], int] = {}
        for node in self._metrics.nodes:
            for phase in ProvidedPhase:
                counts.setdefault((node.capability_set, phase.value), 0)
            counts[node.capability_set, node.phase.value] += 1
        found = GaugeMetricFamily(
            "springtide_provisioner_nodes", "Nodes by set and phase.", labels=["capability_set", "phase"]
        )
        for key, number in counts.items():
            found.add_metric(list(key), number)
        yield found
