"""A run as a picture: load, workers by state, and time to first token; as PNG, and as SVG for the page."""

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from simulator.meter import Look
from simulator.requests import Request
from simulator.results import Slo, quantile
from springtide.errors import FailedPrecondition

_POINTS = 400
_COLORS = {"active": "#2f7d5b", "starting": "#e0a030", "draining": "#b0553a"}


def draw(looks: Sequence[Look], requests: Sequence[Request], origin: float, slo: Slo, title: str) -> Any:
    """A matplotlib figure. Raises FailedPrecondition without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FailedPrecondition(
            "pictures need matplotlib, which is not installed.",
            reason="NO_MATPLOTLIB",
            remedy="pip install 'springtide[simulate]', or give --no-picture.",
        ) from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    load, workers, ttft = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)
    times = [look.at_s for look in looks]
    _draw_load(load, looks, times)
    counts = [[getattr(look, state) for look in looks] for state in _COLORS]
    workers.stackplot(times, counts, labels=list(_COLORS), colors=list(_COLORS.values()), step="post")
    workers.set_ylabel("workers")
    workers.legend(loc="upper left", fontsize="small")
    _draw_ttft(ttft, requests, origin, slo)
    ttft.set_xlabel("seconds after the begin of the load")
    return figure


def _draw_load(axes: Any, looks: Sequence[Look], times: list[float]) -> None:
    width = max(1, len(looks) // _POINTS)
    picked = looks[::width]
    rates = [
        (later.arrived - earlier.arrived) / max(later.at_s - earlier.at_s, 1e-9) for earlier, later in pairwise(picked)
    ]
    axes.plot([look.at_s for look in picked[1:]], rates, color="#3a6ea5", label="arrivals per second", linewidth=1)
    axes.plot(times, [look.in_flight for look in looks], color="#777777", label="in flight", linewidth=1)
    axes.plot(times, [look.waiting for look in looks], color="#b0553a", label="waiting", linewidth=1)
    axes.set_ylabel("requests")
    axes.legend(loc="upper left", fontsize="small")


def _draw_ttft(axes: Any, requests: Sequence[Request], origin: float, slo: Slo) -> None:
    """p50 and p99 of all that arrived within each of some hundred spans."""
    begun = [(r.arrived_at - origin, r.ttft_s) for r in requests if r.ttft_s is not None]
    axes.axhline(slo.ttft_s, color="#999999", linestyle="--", linewidth=1, label=f"target {slo.ttft_s:g} s")
    if begun:
        span = max(1.0, begun[-1][0] / 150)
        spans: dict[int, list[float]] = {}
        for at, seconds in begun:
            spans.setdefault(int(at / span), []).append(seconds)
        times = [index * span for index in sorted(spans)]
        for share, color in ((0.5, "#3a6ea5"), (0.99, "#b0553a")):
            values = [quantile(sorted(spans[index]), share) for index in sorted(spans)]
            axes.plot(times, values, color=color, linewidth=1, label=f"p{share * 100:g}")
        axes.set_yscale("log")
    axes.set_ylabel("time to first token, s")
    axes.legend(loc="upper left", fontsize="small")


def write_png(path: Path, figure: Any) -> None:
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def to_svg(figure: Any) -> str:
    """The figure as an SVG element."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
