"""vLLM's metric names in Prometheus text, from plain counters."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from nodeagent.engines.sim.kv import KvCounts

_LATENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


@dataclass(slots=True)
class Histogram:
    """A Prometheus histogram in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_LATENCY_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count one value `times` times."""
        self.counts[bisect_left(_LATENCY_BUCKETS, seconds)] += times
        self.total += seconds * times


@dataclass(slots=True)
class SimMetrics:
    """What the engine counts beside its batch."""

    ttft: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine's state when it is asked."""

    model: str
    running: int
    waiting: int
    kv_use: float
    sleep_state: str
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    block_size: int
    kv_blocks: int


def render(gauges: Gauges, metrics: SimMetrics, kv: KvCounts | None = None) -> bytes:
    """The /metrics body. `kv`: of an engine with a KV connector; vLLM has no such counters."""
    labels = f'engine="0",model_name="{gauges.model}"'
    lines: list[str] = []

    def put(kind: str, name: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{{{labels}{extra}}} {value}" for extra, value in samples)

    put("gauge", "num_requests_running", [("", float(gauges.running))])
    put("gauge", "num_requests_waiting", [("", float(gauges.waiting))])
    by_reason = [(',reason="capacity"', float(gauges.waiting)), (',reason="deferred"', 0.0)]
    put("gauge", "num_requests_waiting_by_reason", by_reason)
    put("gauge", "kv_cache_usage_perc", [("", gauges.kv_use)])
    states = [(f',sleep_state="{state}"', float(state == gauges.sleep_state)) for state in _SLEEP_STATES]
    put("gauge", "engine_sleep_state", states)
    put("counter", "prefix_cache_queries_total", [("", 0.0)])
    put("counter", "prefix_cache_hits_total", [("", 0.0)])
    put("counter", "num_preemptions_total", [("", float(gauges.preemptions))])
    put("counter", "prompt_tokens_total", [("", float(gauges.prompt_tokens))])
    put("counter", "generation_tokens_total", [("", float(gauges.generation_tokens))])
    finished = [(f',finished_reason="{reason}"', float(count)) for reason, count in metrics.finished.items()]
    put("counter", "request_success_total", finished)
    cache = f',block_size="{gauges.block_size}",num_gpu_blocks="{gauges.kv_blocks}"'
    cache += f',kv_cache_size_tokens="{gauges.block_size * gauges.kv_blocks}"'
    put("gauge", "cache_config_info", [(cache, 1.0)])
    for name, histogram in (
        ("time_to_first_token_seconds", metrics.ttft),
        ("inter_token_latency_seconds", metrics.inter_token),
        ("request_queue_time_seconds", metrics.queue),
        ("e2e_request_latency_seconds", metrics.e2e),
    ):
        _histogram(lines, name, labels, histogram)
    if kv is not None:
        for what in ("held", "pulling"):
            lines += [f"# TYPE sim_kv_{what} gauge", f"sim_kv_{what} {float(getattr(kv, what))}"]
        for what in ("sent", "received", "failed", "recomputed", "expired"):
            lines += [f"# TYPE sim_kv_{what}_total counter", f"sim_kv_{what}_total {float(getattr(kv, what))}"]
    return ("\n".join(lines) + "\n").encode()


def _histogram(lines: list[str], name: str, labels: str, histogram: Histogram) -> None:
    lines.append(f"# TYPE vllm:{name} histogram")
    reached = 0
    for bound, count in zip((*_LATENCY_BUCKETS, "+Inf"), histogram.counts, strict=True):
        reached += count
        lines.append(f'vllm:{name}_bucket{{{labels},le="{bound}"}} {float(reached)}')
    lines.append(f"vllm:{name}_sum{{{labels}}} {histogram.total}")
    lines.append(f"vllm:{name}_count{{{labels}}} {float(reached)}")
