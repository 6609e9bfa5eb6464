"""The benchmark runs and its figures parse. What it measures is nobody's test."""

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench.figures import FIGURES, GOALS, Figure
from bench.machine import ROOT, Busy, foreign
from bench.report import write
from bench.results import add_ttft, row, spread, verdicts
from bench.targets import FACTORIES

BY_KEY = {figure.key: figure for figure in FIGURES}
ABOUT: dict[str, Any] = {
    "machine": {
        "cpu": "c", "cores": 2, "router_core": 1, "load_core": 0, "kernel": "k", "python": "3",
        "load_and_engine": "C", "realtime": False,
    },
    "versions": {"nginx": "1"}, "missing": {"haproxy": "not here"}, "command": "make bench", "date": "d",
    "revision": "r", "rounds": 2, "seconds": 1.0, "took_s": 1, "others": "nothing",
}  # fmt: skip


def _result(tokens: int, cpu_s: float, **more: object) -> dict[str, Any]:
    user_s = cpu_s / 4
    memory = {"rss_before_kb": 100, "rss_kb": 900}
    share = {"name": "router", "pid": 1, "user_s": user_s, "sys_s": cpu_s - user_s, **memory}
    found = {"window_s": 2.0, "tokens": tokens, "finished": 0, "errors": 0, "silent": 0, "slots": 400, "cpu": [share]}
    return {
        **found, "ttft_us": None, "latency_us": {"p50": 1.0, "p99": 2.0}, "foreign": 0.1, "load_average": 1.0, **more
    }  # fmt: skip


def _rows(figure: Figure) -> list[dict[str, Any]]:
    """Two rounds; ours costs 1.5 times the peers' in the first, 2 times in the second."""
    found = []
    for number, factor in ((1, 1.5), (2, 2.0)):
        for target in figure.targets:
            ours = target in ("springtide", "router+shim")
            found.append(row(figure, target, number, _result(20_000, 0.5 * (factor if ours else 1.0))))
    return found


def test_figures_and_goals_fit_together() -> None:
    """Every goal names a figure and targets that this figure measures; every target can be started."""
    for figure in FIGURES:
        assert set(figure.targets) <= FACTORIES.keys()
    for goal in GOALS:
        assert {goal.ours, *([goal.peer] if goal.peer else [])} <= set(BY_KEY[goal.figure].targets)


def test_cpu_per_token_and_ratios_within_a_round() -> None:
    """CPU is divided by what came in the window; a ratio never mixes rounds."""
    figure = BY_KEY["sse-spread"]
    rows = _rows(figure)
    assert rows[0]["cpu_us"] == 37.5
    assert rows[0]["parts"] == {"router": 37.5}
    assert rows[0]["delivered"] == 0.5
    judged = {v.goal.peer: v for v in verdicts([figure], {figure.key: rows}) if not v.goal.part}
    nginx = judged["nginx"].spread
    assert nginx is not None
    assert (nginx.low, nginx.mid, nginx.high) == (1.5, 1.75, 2.0)
    assert judged["nginx"].met is False


def test_the_share_of_a_part_is_compared_alone() -> None:
    """The router's share of router and shim: 20 of 50 µs against a peer's 25, in each round with the peer's own."""
    figure = BY_KEY["sse-spread"]
    rows = []
    for number, peer_s in ((1, 0.5), (2, 0.25)):
        both = _result(20_000, 0.4)
        both["cpu"].append({**both["cpu"][0], "name": "shim", "user_s": 0.3, "sys_s": 0.3})
        rows += [row(figure, "router+shim", number, both), row(figure, "nginx", number, _result(20_000, peer_s))]
    (found,) = [v for v in verdicts([figure], {figure.key: rows}) if v.goal.part and v.goal.peer == "nginx"]
    assert found.goal.name == "router of router+shim"
    assert found.spread is not None
    assert (found.spread.low, found.spread.high) == (0.8, 1.6)
    assert found.met is False


def test_a_run_that_failed_is_no_figure() -> None:
    """Errors and streams that never began are told, not averaged in."""
    figure = BY_KEY["grpc-8x8"]
    rows = [
        row(figure, "springtide", 1, _result(1, 1.0, errors=3, error="a call ended without a token")),
        row(figure, "springtide", 2, {"error": "load client: exit 1", "errors": 1}),
        row(figure, "envoy", 1, _result(20_000, 0.5)),
        row(figure, "grpc.aio", 1, _result(1, 1.0, silent=7)),
    ]
    assert rows[3]["problem"] == "7 of 400 streams never began"
    found = verdicts([figure], {figure.key: rows})[0]
    assert (found.spread, found.met) == (None, None)
    assert found.problems == ["a call ended without a token", "load client: exit 1"]


def test_added_first_token_is_over_the_direct_way_of_the_same_round() -> None:
    figure = BY_KEY["ttft"]
    rows = [
        row(figure, name, 1, _result(100, 0.1, ttft_us={"p50": p50, "p99": 9.0}))
        for name, p50 in (("springtide", 250.0), ("direct", 40.0))
    ]
    add_ttft(rows)
    assert rows[0]["added_ttft_us"] == 210.0


def test_memory_is_what_the_streams_added() -> None:
    assert row(BY_KEY["idle-1000"], "nginx", 1, _result(0, 0.0))["kb_per_stream"] == 2.0


def test_share_of_others_on_the_core() -> None:
    assert foreign(Busy(10.0, 4.0, 0.0), Busy(11.0, 4.5, 2.0)) == 0.25
    assert spread([]) is None


def test_report_is_whole(tmp_path: Path) -> None:
    """Markdown, JSON and drawing of every figure can be read again."""
    rows = {figure.key: _rows(figure) for figure in FIGURES}
    write(tmp_path, ABOUT, list(FIGURES), rows)
    text = (tmp_path / "results.md").read_text()
    for figure in FIGURES:
        assert f'make bench ARGS="--only {figure.key}"' in text
    assert "haproxy was left out: not here." in text
    read = json.loads((tmp_path / "results.json").read_text())
    assert len(read["goals"]) == len(GOALS)
    assert read["figures"]["sse-spread"]["rows"] == rows["sse-spread"]
    assert ET.parse(tmp_path / "results.svg").getroot().tag.endswith("svg")


def _compiled(folder: Path) -> list[str]:
    for name in ("engine", "load"):
        source = ROOT / "bench" / "native" / f"{name}.c"
        subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", folder / name, source], check=True)
    return [str(folder / "engine"), str(folder / "load")]


@pytest.mark.parametrize("kind", ["python", *(["native"] if shutil.which("gcc") else [])])
def test_engine_and_load_agree(kind: str, tmp_path: Path) -> None:
    """All tokens that the engine made in the window are counted; short answers and turns come through."""
    if kind == "native":
        engine, load = ([program] for program in _compiled(tmp_path))
    else:
        engine, load = ([sys.executable, "-m", f"bench.fallback.{name}"] for name in ("engine", "load"))
    with subprocess.Popen([*engine, "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().split()[0].removeprefix("http=")
            body = tmp_path / "body"
            for mode, stream, tokens in (("hold", "true", 1_000_000), ("turns", "true", 4), ("short", "false", 4)):
                body.write_text(f'{{"model":"m","prompt":"p","max_tokens":{tokens},"stream":{stream}}}')
                argv = [
                    "--port", port, "--mode", mode, "--conns", "8", "--path", "/v1/completions", "--body", str(body),
                    "--ramp", "0.05", "--warm", "0.05", "--seconds", "0.3", "--pid", f"engine={process.pid}",
                ]  # fmt: skip
                done = subprocess.run([*load, *argv], capture_output=True, text=True, cwd=ROOT, check=True)
                result = json.loads(done.stdout)
                assert (result["errors"], result["silent"], result["slots"]) == (0, 0, 8), result
                assert result["finished" if mode != "hold" else "tokens"] > 0
                assert (result["ttft_us"] is None) == (mode == "hold")
                assert result["cpu"][0]["rss_kb"] > 0
        finally:
            process.kill()


@pytest.mark.slow
def test_the_harness_measures_router_and_shim(tmp_path: Path) -> None:
    """One short figure with our own processes: numbers for router, shim and their sum, and a report."""
    argv = ["--only", "ttft", "--targets", "springtide,router+shim", "--rounds", "1", "--seconds", "0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *argv, "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "BENCH_FALLBACK": "1"},
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "results.json").read_text())
    rows = {r["target"]: r for r in read["figures"]["ttft"]["rows"]}
    assert rows["springtide"]["cpu_us"] > 0, rows
    assert set(rows["router+shim"]["parts"]) == {"router", "shim"}, rows
    assert rows["direct"]["added_ttft_us"] == 0
