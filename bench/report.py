"""The report: Markdown for people, JSON for programs."""

import json
from pathlib import Path
from typing import Any

from bench.figures import Figure
from bench.plot import draw
from bench.results import Row, Verdict, spread, values, verdicts

_COLUMNS = {
    "cpu_us": ("CPU, µs", 1),
    "user_us": ("of it user", 1),
    "per_s": ("per second", 0),
    "delivered": ("delivered", 2),
    "core_use": ("of one core", 2),
    "added_ttft_us": ("added first token p50, µs", 0),
    "kb_per_stream": ("KB per stream", 1),
    "rss_mb": ("RSS, MB", 0),
    "foreign": ("others on the core", 2),
}


def write(folder: Path, about: dict[str, Any], figures: list[Figure], rows: dict[str, list[Row]]) -> list[Path]:
    """`results.md`, `results.json`, `results.svg`; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    judged = verdicts(figures, rows)
    contents = {
        "results.md": markdown(about, figures, rows, judged),
        "results.json": json.dumps(as_json(about, figures, rows, judged), indent=1, ensure_ascii=False) + "\n",
        "results.svg": draw(figures, rows),
    }
    paths = []
    for name, text in contents.items():
        path = folder / name
        path.write_text(text)
        paths.append(path)
    return paths


def as_json(
    about: dict[str, Any], figures: list[Figure], rows: dict[str, list[Row]], judged: list[Verdict]
) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "about": about,
        "goals": [
            {
                "goal": v.goal.text,
                "figure": v.goal.figure,
                "ours": v.goal.name,
                "peer": v.goal.peer,
                "bound": v.goal.bound,
                "at_least": v.goal.at_least,
                "median": v.spread and round(v.spread.mid, 3),
                "low": v.spread and round(v.spread.low, 3),
                "high": v.spread and round(v.spread.high, 3),
                "met": v.met,
            }
            for v in judged
        ],
        "figures": {
            f.key: {"title": f.title, "unit": f.unit, "command": command(f), "rows": rows[f.key]} for f in figures
        },
    }


def command(figure: Figure) -> str:
    """Measures this figure alone."""
    return f'make bench ARGS="--only {figure.key}"'


def markdown(about: dict[str, Any], figures: list[Figure], rows: dict[str, list[Row]], judged: list[Verdict]) -> str:
    """The report."""
    machine, versions = about["machine"], about["versions"]
    peers = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    written = f"Written by `{about['command']}` on {about['date']} at {about['revision']}, in {about['took_s']} s."
    cores = (
        f"router on core {machine['router_core']}, load client and mock engine ({machine['load_and_engine']}) "
        f"on core {machine['load_core']}{', before all else (SCHED_FIFO)' if machine['realtime'] else ''}"
    )
    here = (
        f"{machine['cpu']}, {machine['cores']} cores, kernel {machine['kernel']}, Python {machine['python']}; {cores}; "
        f"{about['rounds']} rounds of {about['seconds']:g} s; {peers}."
    )
    lines = [
        "# Benchmark results",
        "",
        f"{written} What is measured and how: [README.md](README.md).",
        "",
        here,
        "",
        f"What else ran: {about['others']}",
        "",
        "![The figures as bars](results.svg)",
        "",
        "## Against the goals",
        "",
        "Ratios are taken within each round: median (lowest–highest).",
        "",
        "| figure | ours | peer | goal | measured | met |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for v in judged:
        sign, unit = ("≥" if v.goal.at_least else "≤"), ("×" if v.goal.peer else "")
        measured = (
            v.spread.text(2 if v.goal.peer else 1) + unit if v.spread else "; ".join(v.problems) or "not measured"
        )
        met = {True: "yes", False: "**no**", None: "–"}[v.met]
        cells = (v.goal.text, v.goal.name, v.goal.peer or "", f"{sign} {v.goal.bound:g}{unit}", measured, met)
        lines.append(f"| {' | '.join(cells)} |")
    for figure in figures:
        lines += ["", f"## {figure.title}", "", f"`{command(figure)}`", "", *_table(figure, rows[figure.key])]
    for name, why in about.get("missing", {}).items():
        lines += ["", f"{name} was left out: {why}."]
    return "\n".join(lines) + "\n"


def _table(figure: Figure, measured: list[Row]) -> list[str]:
    columns = [c for c in _COLUMNS if any(c in r and r[c] is not None for r in measured)]
    if figure.value == "kb_per_stream":
        columns = [c for c in columns if c in ("kb_per_stream", "rss_mb")]
    latency = figure.value != "kb_per_stream" and any("latency_us" in r for r in measured)
    ttft = any("ttft_us" in r for r in measured) and figure.key == "ttft"
    head = ["target", *(_COLUMNS[c][0] for c in columns)]
    head += ["first token p50 / p99, µs"] if ttft else []
    head += ["token latency p50 / p99, µs"] if latency else []
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for target in figure.targets:
        mine = [r for r in measured if r["target"] == target]
        if not mine:
            continue
        problems = sorted({r["problem"] for r in mine if "problem" in r})
        if len([r for r in mine if "problem" in r]) == len(mine):
            lines.append(f"| {target} | {'; '.join(problems)}{' |' * (len(head) - 1)}")
            continue
        cells = [target]
        for column in columns:
            found = spread(list(values(measured, target, column).values()))
            cells.append(found.text(_COLUMNS[column][1]) if found else "")
        if ttft:
            cells.append(_percentiles(mine, "ttft_us"))
        if latency:
            cells.append(_percentiles(mine, "latency_us"))
        lines.append(f"| {' | '.join(cells)} |")
        parts = {name for r in mine for name in r.get("parts", {})}
        if len(parts) > 1 and "cpu_us" in columns:
            for name in sorted(parts):
                share = spread([r["parts"][name] for r in mine if name in r.get("parts", {})])
                cells = ["" for _ in head]
                cells[0] = f"of it {name}"
                cells[head.index("CPU, µs")] = share.text(1) if share else ""
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _percentiles(mine: list[Row], column: str) -> str:
    halves = []
    for key in ("p50", "p99"):
        found = spread([r[column][key] for r in mine if column in r])
        halves.append(f"{found.mid:,.0f}" if found else "")
    return " / ".join(halves)
