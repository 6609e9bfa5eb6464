"""From what the load client says to the columns of the report, and from those to ratios. Pure."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.figures import GOALS, Figure, Goal

Row = dict[str, Any]
"""One run of one target: the columns of the report; `parts` has the CPU of each part in µs per unit."""


def row(figure: Figure, target: str, round_number: int, result: dict[str, Any]) -> Row:
    """The columns of one run. `problem` says what makes it unusable."""
    found: Row = {"target": target, "round": round_number, "foreign": result.get("foreign")}
    found["load_average"] = result.get("load_average")
    if result.get("errors") or "window_s" not in result:
        return found | {"problem": result.get("error") or "errors"}
    if result["silent"]:
        return found | {"problem": f"{result['silent']} of {result['slots']} streams never began"}
    window_s = result["window_s"]
    units = result["finished"] if figure.shape.mode == "short" else result["tokens"]
    user_s = sum(p["user_s"] for p in result["cpu"])
    sys_s = sum(p["sys_s"] for p in result["cpu"])
    found["per_s"] = round(units / window_s, 1)
    found["core_use"] = round((user_s + sys_s) / window_s, 3)
    if figure.shape.mode in ("hold", "grpc"):
        found["delivered"] = round(units / window_s / figure.shape.offered, 3)
    if figure.value == "kb_per_stream":
        grown = sum(p["rss_kb"] - p["rss_before_kb"] for p in result["cpu"])
        return found | {"kb_per_stream": round(grown / result["slots"], 2), "rss_mb": _mb(result)}
    if units:
        found["cpu_us"] = round((user_s + sys_s) / units * 1e6, 2)
        found["user_us"] = round(user_s / units * 1e6, 2)
        parts: dict[str, float] = {}
        for process in result["cpu"]:
            share = (process["user_s"] + process["sys_s"]) / units * 1e6
            parts[process["name"]] = round(parts.get(process["name"], 0.0) + share, 2)
        found["parts"] = parts
    for name in ("ttft_us", "latency_us"):
        if result.get(name):
            found[name] = {key: result[name][key] for key in ("p50", "p99")}
    return found


def _mb(result: dict[str, Any]) -> float:
    return float(round(sum(p["rss_kb"] for p in result["cpu"]) / 1024, 1))


def add_ttft(rows: list[Row]) -> None:
    """Fills `added_ttft_us`: what a target adds to the direct way of the same round."""
    base = {r["round"]: r["ttft_us"]["p50"] for r in rows if r["target"] == "direct" and "ttft_us" in r}
    for r in rows:
        if "ttft_us" in r and r["round"] in base:
            r["added_ttft_us"] = round(r["ttft_us"]["p50"] - base[r["round"]], 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over the rounds."""

    mid: float
    low: float
    high: float
    n: int

    def text(self, digits: int) -> str:
        """`1.31 (1.21-1.38)`; the number alone where there was one round."""
        if self.n == 1:
            return f"{self.mid:,.{digits}f}"
        return f"{self.mid:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"


def spread(numbers: list[float]) -> Spread | None:
    """Median, lowest, highest; None for no number."""
    return Spread(median(numbers), min(numbers), max(numbers), len(numbers)) if numbers else None


def values(rows: list[Row], target: str, column: str) -> dict[int, float]:
    """The numbers of a column by round."""
    return {r["round"]: r[column] for r in rows if r["target"] == target and r.get(column) is not None}


def shares(rows: list[Row], target: str, part: str) -> dict[int, float]:
    """The CPU of one part of a target by round, µs per unit."""
    return {r["round"]: r["parts"][part] for r in rows if r["target"] == target and part in r.get("parts", {})}


@dataclass(slots=True)
class Verdict:
    """A goal and what came."""

    goal: Goal
    spread: Spread | None = None
    met: bool | None = None
    problems: list[str] = field(default_factory=list)


def verdicts(figures: list[Figure], rows: dict[str, list[Row]]) -> list[Verdict]:
    """One for each goal whose figure was measured. Ratios are taken within each round."""
    by_key = {f.key: f for f in figures}
    found = []
    for goal in GOALS:
        if goal.figure not in by_key:
            continue
        verdict = Verdict(goal)
        column = by_key[goal.figure].value
        measured = rows[goal.figure]
        ours = shares(measured, goal.ours, goal.part) if goal.part else values(measured, goal.ours, column)
        if goal.peer is None:
            numbers = list(ours.values())
        else:
            peer = values(measured, goal.peer, column)
            numbers = [ours[r] / peer[r] for r in ours if peer.get(r)]
        verdict.spread = spread(numbers)
        if verdict.spread is not None:
            verdict.met = goal.met(verdict.spread.mid)
        verdict.problems = sorted({r["problem"] for r in measured if r["target"] == goal.ours and "problem" in r})
        found.append(verdict)
    return found
