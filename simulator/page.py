"""A run as one HTML page that needs nothing else: picture, summary, scaling log."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from simulator.results import SCALING_COLUMNS, Summary

_MOST_ROWS = 2000
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em .8em .15em 0; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums } svg { max-width: 100%; height: auto }
details > summary { cursor: pointer }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } svg { background: #fff } }
"""


def write_page(
    path: Path, title: str, summary: Summary, scaling: Sequence[tuple[str, str, str, str]], svg: str, command: str
) -> None:
    """`svg` may be empty: the page is then without a picture."""
    rows = "".join(f"<tr><th>{name}</th><td class=n>{value}</td></tr>" for name, value in summary_rows(summary))
    shown = scaling[:_MOST_ROWS]
    head = "".join(f"<th>{name}</th>" for name in SCALING_COLUMNS)
    log = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in shown)
    more = f"<p>{len(scaling) - len(shown)} more rows in scaling.csv.</p>" if len(scaling) > len(shown) else ""
    path.write_text(
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n<p><code>{escape(command)}</code></p>\n{svg}\n<table>{rows}</table>\n"
        f"<details><summary>Scaling log, {len(scaling)} rows</summary><table><tr>{head}</tr>{log}</table>{more}"
        "</details></html>\n",
        encoding="utf-8",
    )


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Names and values for people."""

    def seconds(*values: float | None) -> str:
        return " / ".join("none" if value is None else f"{value:.3f} s" for value in values)

    rows = [
        ("requests", str(summary.requests)),
        ("failed", str(summary.failed)),
        ("SLO attainment", f"{100 * summary.slo_attainment:.2f} %"),
        ("TTFT p50 / p90 / p99", seconds(summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s)),
        ("TBT p50 / p90 / p99", seconds(summary.tbt_p50_s, summary.tbt_p90_s, summary.tbt_p99_s)),
        ("E2E p50 / p99", seconds(summary.e2e_p50_s, summary.e2e_p99_s)),
        ("mean wait in routers", seconds(summary.queue_mean_s)),
        ("retries", str(summary.retries)),
        ("worker-seconds", f"{summary.worker_seconds:.0f}"),
    ]
    rows += [(f"worker-seconds, {role}", f"{value:.0f}") for role, value in summary.worker_seconds_by_role.items()]
    rows += [
        ("most workers at once", str(summary.most_workers)),
        ("scale-ups / scale-downs / flaps", f"{summary.scale_ups} / {summary.scale_downs} / {summary.flaps}"),
    ]
    return rows + [(f"errors, {name}", str(count)) for name, count in sorted(summary.errors.items())]
