"""One metrics endpoint for the processes of a router: what each of them shows, added up."""

import logging
import urllib.request
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_SAME_IN_ALL = frozenset(("springtide_router_workers", "springtide_router_table_revision"))
"""Gauges of the table, which every process has."""
_WORST = frozenset(("springtide_router_breaker_state", "springtide_router_table_age_seconds"))
_ALL = frozenset(("springtide_router_connected",))
"""1 where it is so in each process."""
_TIMEOUT_S = 2.0


class Merged(Collector):
    """`addresses` are the processes' own endpoints, on loopback. One that does not answer is left out."""

    def __init__(self, addresses: Callable[[], Iterable[str]]) -> None:
        self._addresses = addresses

    def collect(self) -> Iterable[Metric]:
        texts = []
        for address in self._addresses():
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
                    texts.append(answer.read().decode())
            except OSError as error:
                log.warning("metrics of the process at %s: %s", address, error)
        return merged(texts)


def merged(texts: Iterable[str]) -> list[Metric]:
    """Counters, histograms and loads are added; of what all have alike, the greatest; of what all should be, the
    least."""
    families: dict[str, Metric] = {}
    found: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            values = found.setdefault(family.name, {})
            greatest = family.name in _SAME_IN_ALL or family.name in _WORST
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = (sample.name, tuple(sorted(sample.labels.items())))
                old = values.get(key)
                if old is None:
                    values[key] = sample.value
                elif family.name in _ALL:
                    values[key] = min(old, sample.value)
                else:
                    values[key] = max(old, sample.value) if greatest else old + sample.value
    for name, metric in families.items():
        for (sample_name, labels), value in found[name].items():
            metric.add_sample(sample_name, dict(labels), value)
    return list(families.values())
