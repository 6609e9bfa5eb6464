"""docs/telemetry.md names every metric and every span that the code has."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from controlplane.metrics import Metrics
from nodeagent.metrics import AgentMetrics
from provisioner.metrics import ProvisionerMetrics
from springtide.link.exposed import LinkFamilies

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "telemetry.md").read_text()
PACKAGES = ("controlplane", "nodeagent", "provisioner", "router")
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def names(registry: CollectorRegistry) -> set[str]:
    """Names as Prometheus shows them."""
    return {m.name + ("_total" if m.type == "counter" else "") for m in registry.collect()}


def test_every_span_and_attribute_is_documented():
    """CM7: attributes documented."""
    found = {
        name for path in SOURCES for name in re.findall(r'"(springtide\.[a-z_]+(?:\.[a-z_]+)?)"', path.read_text())
    }
    found -= {"springtide.engines", "springtide.policies", "springtide.provisioners"}  # entry point groups
    assert "springtide.scale_up" in found
    assert {name for name in found if f"`{name}`" not in PAGE} == set()


def test_every_metric_is_documented():
    named = {n for path in SOURCES for n in re.findall(r'"(springtide_[a-z_]+)"', path.read_text())}
    named -= {"springtide_agent_", "springtide_provisioner_", "springtide_router_"}
    known = names(Metrics().registry) | names(AgentMetrics().registry) | names(ProvisionerMetrics().registry)
    known |= {m.name + ("_total" if m.type == "counter" else "") for m in LinkFamilies("springtide_router_")}
    assert "springtide_router_waiting" in named
    assert len(known) > 5
    assert {n for n in named if f"`{n}`" not in PAGE and f"`{n}_total`" not in PAGE} == set()
    assert {n for n in known if f"`{n}`" not in PAGE} == set()
