"""What is measured, and what is asked of it."""

from dataclasses import dataclass

from bench.engine import Shape

PEERS = ("nginx", "haproxy", "envoy", "vllm-router", "sglang-router")


@dataclass(frozen=True, slots=True)
class Figure:
    """One table of the report. `value` is the column that bars and ratios are made of."""

    key: str
    title: str
    shape: Shape
    targets: tuple[str, ...]
    value: str = "cpu_us"
    unit: str = "µs CPU per token"
    seconds: float = 0.0
    """Longest measurement; 0: as long as the run says. A saturated core is no neighbour."""
    fresh: bool = False
    """Each target is started for each run: what earlier runs left in its memory is not counted."""


FIGURES = (
    Figure(
        "sse-spread",
        "HTTP SSE, 400 streams of 50 tokens/s, each at its own time",
        Shape("hold", 400),
        ("springtide", "springtide+ids", "shim", "router+shim", *PEERS),
    ),
    Figure(
        "sse-burst",
        "HTTP SSE, 400 streams of 50 tokens/s, all in the same instant (engine steps)",
        Shape("hold", 400, burst=True),
        ("springtide", "springtide+ids", "shim", "router+shim", *PEERS),
    ),
    Figure(
        "sum-spread",
        "HTTP SSE through router and shim, 200 streams of 50 tokens/s",
        Shape("hold", 200),
        ("router+shim", "router+shim (no link)", "nginx", "vllm-router", "sglang-router"),
    ),
    Figure(
        "sum-burst",
        "HTTP SSE through router and shim, 200 streams of 50 tokens/s, engine steps",
        Shape("hold", 200, burst=True),
        ("router+shim", "router+shim (no link)", "nginx", "vllm-router", "sglang-router"),
    ),
    Figure(
        "short",
        "Short request that is no stream (256-byte answer), 32 kept-alive connections in a closed loop",
        Shape("short", 32, ramp_s=0.2, warm_s=0.5),
        ("springtide", "shim", "router+shim", *PEERS),
        unit="µs CPU per request",
        seconds=2.0,
    ),
    Figure(
        "short-paced",
        "The same from 64 connections that wait up to 40 ms between requests: no core is full",
        Shape("short", 64, ramp_s=0.2, warm_s=0.5, think_ms=40),
        ("springtide", "shim", "router+shim", *PEERS),
        unit="µs CPU per request",
    ),
    Figure(
        "ttft",
        "First token on kept-alive connections, 64 streams of 16 tokens at 50 tokens/s, one after another",
        Shape("turns", 64, tokens=16),
        ("direct", "springtide", "router+shim", *PEERS),
        value="added_ttft_us",
        unit="µs added to the first token, p50",
    ),
    Figure(
        "grpc-8x50",
        "gRPC Generate, 8 connections of 50 streams of 50 tokens/s (ours: from SSE; Envoy: HTTP/2 relay)",
        Shape("grpc", 8, 50),
        ("springtide", "springtide+ids", "router+shim", "envoy"),
    ),
    Figure(
        "grpc-8x50-burst",
        "The same in engine steps (Envoy's engine writes a step of one connection at once)",
        Shape("grpc", 8, 50, burst=True),
        ("springtide", "router+shim", "envoy"),
    ),
    Figure(
        "grpc-8x8",
        "gRPC Generate, 8 connections of 8 streams of 50 tokens/s",
        Shape("grpc", 8, 8),
        ("springtide", "router+shim", "envoy", "grpc.aio"),
    ),
    Figure(
        "grpc-saturation",
        "gRPC Generate, 8 connections of 32 streams, 400 tokens/s offered to each",
        Shape("grpc", 8, 32, rate=400),
        ("springtide", "envoy", "grpc.aio", "grpc.aio (asyncio)"),
        value="per_s",
        unit="tokens/s",
        seconds=2.0,
    ),
    Figure(
        "sse-saturation",
        "HTTP SSE, 256 streams, 400 tokens/s offered to each",
        Shape("hold", 256, rate=400),
        ("springtide", "shim", "nginx", "envoy", "vllm-router", "sglang-router"),
        value="per_s",
        unit="tokens/s",
        seconds=2.0,
    ),
    Figure(
        "idle-1000",
        "Memory of 1,000 idle streams",
        Shape("hold", 1000, rate=0.01, ramp_s=1.5, warm_s=0.5),
        ("springtide", "shim", *PEERS),
        value="kb_per_stream",
        unit="KB RSS per stream",
        fresh=True,
    ),
    Figure(
        "idle-5000",
        "Memory of 5,000 idle streams",
        Shape("hold", 5000, rate=0.01, ramp_s=6, warm_s=0.5),
        ("springtide", "shim", *PEERS),
        value="kb_per_stream",
        unit="KB RSS per stream",
        fresh=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """`ours` over `peer` is at most (or at least) `bound`; without a peer the value itself is."""

    text: str
    figure: str
    ours: str
    peer: str | None
    bound: float
    at_least: bool = False
    part: str = ""
    """Only this part of `ours` (router, shim): its CPU per unit."""

    @property
    def name(self) -> str:
        """Of `ours`, with the part."""
        return f"{self.part} of {self.ours}" if self.part else self.ours

    def met(self, number: float) -> bool:
        """Whether a ratio or value is on the right side."""
        return number >= self.bound if self.at_least else number <= self.bound


_SSE = (("sse-spread", "spread"), ("sse-burst", "engine steps"))
_SSE_PEERS = (("sglang-router", 0.85), ("vllm-router", 0.92), ("envoy", 0.80), ("nginx", 1.15))
_SHORT_PEERS = (("sglang-router", 0.40), ("vllm-router", 0.55))

GOALS = (
    # Behind the router an engine, with a connection for each stream: what the peers have behind them, too.
    *(
        Goal(f"SSE CPU per token, {name}", figure, "springtide", peer, bound)
        for figure, name in _SSE
        for peer, bound in _SSE_PEERS
    ),
    *(Goal("short request, CPU", "short", "springtide", peer, bound) for peer, bound in _SHORT_PEERS),
    Goal("added first token p50 (µs)", "ttft", "springtide", None, 200),
    Goal("memory per idle stream, 1,000 (KB)", "idle-1000", "springtide", None, 8),
    Goal("memory per idle stream, 5,000 (KB)", "idle-5000", "springtide", None, 8),
    Goal("gRPC CPU per token, 8 × 50", "grpc-8x50", "springtide", "envoy", 1.30),
    Goal("gRPC CPU per token, 8 × 8", "grpc-8x8", "springtide", "grpc.aio", 0.50),
    Goal("gRPC saturation", "grpc-saturation", "springtide", "grpc.aio (asyncio)", 15, at_least=True),
    # Behind the router a shim and its link, as a deployment has it: the router's share, and then the sum.
    *(
        Goal(
            f"router's share with the link, SSE CPU per token, {name}",
            figure,
            "router+shim",
            peer,
            bound,
            part="router",
        )
        for figure, name in _SSE
        for peer, bound in _SSE_PEERS
    ),
    *(
        Goal("router's share with the link, short request, CPU", "short", "router+shim", peer, bound, part="router")
        for peer, bound in _SHORT_PEERS
    ),
    *(
        Goal(
            f"router's share with the link, gRPC CPU per token, {name}",
            figure,
            "router+shim",
            peer,
            bound,
            part="router",
        )
        for figure, name, peer, bound in (
            ("grpc-8x50", "8 × 50", "envoy", 1.30),
            ("grpc-8x8", "8 × 8", "grpc.aio", 0.50),
        )
    ),
    *(
        Goal(f"router + shim, CPU per token, {name}", figure, "router+shim", peer, bound)
        for figure, name in (("sum-spread", "spread"), ("sum-burst", "engine steps"))
        for peer, bound in (("nginx", 1.30), ("sglang-router", 1.00))
    ),
)
