"""The counters of the request path: what an exporter reads of them."""

from prometheus_client import CollectorRegistry, generate_latest

from router.metrics import Tally, Times


def test_a_tally_is_a_counter_and_times_are_a_histogram() -> None:
    """CM7, the metrics: the text is that of the library's own counters and histograms, cumulative buckets included."""
    registry = CollectorRegistry()
    tally = Tally("requests", "Requests.", ("pool", "outcome"), registry)
    times = Times("ttft_seconds", "First tokens.", (0.1, 1, 10), registry)
    tally.of(("a", "ok")).inc()
    tally.of(("a", "ok")).inc(2)
    tally.of(("b", "timeout")).inc()
    for seconds in (0.05, 0.1, 0.5, 100.0):
        times.observe("a", seconds)
    lines = generate_latest(registry).decode().splitlines()
    assert 'requests_total{outcome="ok",pool="a"} 3.0' in lines
    assert 'requests_total{outcome="timeout",pool="b"} 1.0' in lines
    assert "# TYPE ttft_seconds histogram" in lines
    buckets = [line.rpartition(" ")[2] for line in lines if line.startswith("ttft_seconds_bucket")]
    assert buckets == ["2.0", "3.0", "3.0", "4.0"]
    assert 'ttft_seconds_bucket{le="0.1",pool="a"} 2.0' in lines
    assert 'ttft_seconds_count{pool="a"} 4.0' in lines
    assert 'ttft_seconds_sum{pool="a"} 100.65' in lines
