"""`make bench`: the router beside its peers, in the same run, on one core.

`make bench ARGS=--quick` takes less than three minutes and writes to build/bench/quick; a full run of all figures
writes docs/benchmarks.
"""

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.engine import run_load, running_engine
from bench.figures import FIGURES, Figure
from bench.interpreter import told
from bench.machine import ROOT, choose_cores, describe, native, raise_limits
from bench.report import write
from bench.results import Row, add_ttft, row, spread, values
from bench.targets import FACTORIES, Bench, Missing, Target, opened, versions

QUICK_FIGURES = ("sse-spread", "sse-burst", "sum-burst", "short", "ttft", "grpc-8x8", "grpc-8x50", "idle-1000")
QUICK_TARGETS = frozenset(FACTORIES) - {"haproxy"}


def main() -> int:
    """Measures and writes. 0 also where a goal is missed: this is no test."""
    arguments = _parser().parse_args()
    if arguments.list:
        for figure in FIGURES:
            print(f"{figure.key:18} {figure.title}")
        return 0
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    seconds = arguments.seconds or (1.2 if arguments.quick else 4.0)
    figures = _figures(arguments)
    out = arguments.out or (ROOT / "build" / "bench" / "quick" if arguments.quick else ROOT / "docs" / "benchmarks")
    run = Run(figures, _targets(arguments), rounds, seconds, arguments.realtime, arguments.quick)
    began = time.monotonic()
    about = {
        "command": " ".join(["make bench", *([f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": _revision(),
        "rounds": rounds,
        "seconds": seconds,
    }
    paths: list[Path] = []
    for rows in run.measure():  # written after each figure: an interrupted run is not lost
        more = {"took_s": round(time.monotonic() - began), "others": _others(rows, arguments.note)}
        paths = write(out, run.about | about | more, [f for f in figures if f.key in rows], rows)
    for path in paths:
        print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer figures, one short round")
    parser.add_argument("--only", metavar="FIGURE,...", help="these figures")
    parser.add_argument("--targets", metavar="TARGET,...", help=f"these of: {', '.join(FACTORIES)}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="length of one measurement")
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument("--note", default="", help="what else loads this machine, for the report")
    parser.add_argument("--realtime", action="store_true", help="before all else on the machine (SCHED_FIFO; root)")
    parser.add_argument("--list", action="store_true", help="list the figures")
    return parser


def _figures(arguments: argparse.Namespace) -> list[Figure]:
    known = {f.key: f for f in FIGURES}
    keys = arguments.only.split(",") if arguments.only else QUICK_FIGURES if arguments.quick else tuple(known)
    if unknown := [k for k in keys if k not in known]:
        raise SystemExit(f"bench: no figure {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[k] for k in keys if native() or not known[k].shape.mode.startswith("grpc")]


def _targets(arguments: argparse.Namespace) -> frozenset[str]:
    if not arguments.targets:
        return QUICK_TARGETS if arguments.quick and not arguments.only else frozenset(FACTORIES)
    chosen = frozenset(arguments.targets.split(","))
    if unknown := chosen - FACTORIES.keys():
        raise SystemExit(f"bench: no target {', '.join(sorted(unknown))}; known: {', '.join(FACTORIES)}")
    return chosen | {"direct"}


class Run:
    """One benchmark: every round goes through all targets of a figure, then the next figure."""

    def __init__(
        self, figures: list[Figure], targets: frozenset[str], rounds: int, seconds: float, realtime: bool, quick: bool
    ) -> None:
        self._figures = figures
        self._targets = targets
        self._rounds = rounds
        self._seconds = seconds
        self._quick = quick
        self._cores = choose_cores(realtime)
        open_files = raise_limits()
        os.sched_setaffinity(0, self._cores.rest)
        self._missing: dict[str, str] = {}
        self._running: dict[str, Target] = {}
        self.about: dict[str, Any] = {
            "machine": describe(self._cores, open_files) | {"python": told()},
            "versions": versions(),
            "missing": self._missing,
        }

    def measure(self) -> Iterator[dict[str, list[Row]]]:
        """Rows by figure, as far as they are there."""
        rows: dict[str, list[Row]] = {}
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-bench-")))
            engine = stack.enter_context(running_engine(folder, self._cores))
            bench = Bench(engine, folder, self._cores)
            lasting = dict.fromkeys(t for f in self._figures if not f.fresh for t in f.targets if t in self._targets)
            for name in lasting:
                self._open(name, bench, stack)
            for figure in self._figures:
                if not figure.fresh:
                    rows[figure.key] = self._figure(figure, bench)
                    yield rows
        for figure in self._figures:
            if figure.fresh:
                rows[figure.key] = self._fresh(figure)
                yield rows

    def _open(self, name: str, bench: Bench, stack: contextlib.ExitStack) -> None:
        try:
            self._running[name] = stack.enter_context(opened(name, bench))
            print(f"started {name}", flush=True)
        except (Missing, SystemExit, OSError) as error:
            self._missing[name] = str(error)
            print(f"left out {name}: {error}", flush=True)

    def _figure(self, figure: Figure, bench: Bench) -> list[Row]:
        print(f"\n{figure.key}: {figure.title}", flush=True)
        names = [t for t in figure.targets if t in self._running]
        found: list[Row] = []
        for number in range(self._rounds):
            turn = number % max(1, len(names))
            order = names[turn:] + names[:turn]  # no target is always the first
            found += [self._run(figure, self._running[name], bench, number + 1) for name in order]
        add_ttft(found)
        self._show(figure, found)
        return found

    def _fresh(self, figure: Figure) -> list[Row]:
        print(f"\n{figure.key}: {figure.title}", flush=True)
        found: list[Row] = []
        for number in range(min(2, self._rounds)):
            for name in figure.targets:
                if name not in self._targets or name in self._missing:
                    continue
                with contextlib.ExitStack() as stack:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-bench-")))
                    engine = stack.enter_context(running_engine(folder, self._cores))
                    bench = Bench(engine, folder, self._cores)
                    try:
                        target = stack.enter_context(opened(name, bench))
                    except (Missing, SystemExit) as error:
                        self._missing[name] = str(error)
                        continue
                    found.append(self._run(figure, target, bench, number + 1, 0.5))
        self._show(figure, found)
        return found

    def _run(self, figure: Figure, target: Target, bench: Bench, number: int, seconds: float = 0.0) -> Row:
        shape = figure.shape if not self._quick else figure.shape.hurried()
        seconds = seconds or min(self._seconds, figure.seconds or self._seconds)
        port = target.grpc_port if shape.mode.startswith("grpc") else target.http_port
        target.engine.set(shape.rate, shape.burst)
        parts = target.parts()
        ours = [pid for t in {*self._running.values(), target} for pids in t.parts().values() for pid in pids]
        result = run_load(shape, port, parts, seconds, bench.folder, self._cores, sorted(set(ours)))
        found = row(figure, target.name, number, result)
        if not figure.fresh:
            with contextlib.suppress(SystemExit):
                target.engine.quiet()
        if "problem" in found:
            print(f"  {target.name}, round {number}: {found['problem']}", flush=True)
        return found

    @staticmethod
    def _show(figure: Figure, found: list[Row]) -> None:
        for name in figure.targets:
            shown = spread(list(values(found, name, figure.value).values()))
            if shown is not None:
                print(f"  {name:14} {shown.text(1):>28} {figure.unit}", flush=True)


def _others(rows: dict[str, list[Row]], note: str) -> str:
    every = [r for found in rows.values() for r in found]
    shares = spread([r["foreign"] for r in every if r.get("foreign") is not None])
    loads = spread([r["load_average"] for r in every if r.get("load_average") is not None])
    text = "unknown"
    if shares and loads:
        text = (
            f"others used {shares.mid:.0%} ({shares.low:.0%}–{shares.high:.0%}) of the router's core; load average "
            f"{loads.mid:.1f} ({loads.low:.1f}–{loads.high:.1f}), the benchmark's own part included."
        )
    return f"{text} {note}".strip()


def _revision() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "no revision"


if __name__ == "__main__":
    sys.exit(main())
