"""The mock engine and one run of the load client against something in front of it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.machine import NATIVE, ROOT, Cores, Process, busy, ending, foreign, native, wait_for
from springtide.v1 import generation_pb2 as pb

FOREVER = 1_000_000
"""Tokens that no run lives to see."""
MANY = 100_000
"""In-flight bound that no run reaches."""
INCARNATION = 7
GENERATE = "/springtide.v1.GenerationService/Generate"
COMPLETIONS = "/v1/completions"


def engine_argv() -> list[str]:
    """Command of the mock engine, without its arguments."""
    return [str(NATIVE / "engine")] if native() else [sys.executable, "-m", "bench.fallback.engine"]


def load_argv() -> list[str]:
    """Command of the load client, without its arguments."""
    return [str(NATIVE / "load")] if native() else [sys.executable, "-m", "bench.fallback.load"]


@dataclass(frozen=True, slots=True)
class Engine:
    """A running mock engine."""

    process: Process | None
    http_port: int
    grpc_port: int

    def set(self, rate: float, burst: bool = False) -> dict[str, int]:
        """Tokens a second and stream; all streams at once or each at its own time. Gives the engine's counts."""
        url = f"http://127.0.0.1:{self.http_port}/bench?rate={rate}&burst={int(burst)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            counts: dict[str, int] = json.loads(answer.read())
        return counts

    def quiet(self) -> None:
        """Waits until no stream is left from the last run."""
        wait_for(lambda: self.set(50)["streams"] == 0, "the end of the last run's streams")


@contextlib.contextmanager
def running_engine(folder: Path, cores: Cores) -> Iterator[Engine]:
    """A mock engine on the load core."""
    argv = [*cores.before(cores.load), *engine_argv(), "--port", "0", "--grpc-port", "0"]
    with ending(Process(argv, folder / "engine.log")) as process:
        http, grpc = wait_for_ports(process.log)
        yield Engine(process, http, grpc)


def wait_for_ports(log: Path) -> tuple[int, int]:
    """The ports that an engine prints."""
    found: list[tuple[int, int]] = []

    def look() -> bool:
        match = re.search(r"http=(-?\d+) grpc=(-?\d+)", log.read_text(errors="replace"))
        if match:
            found.append((int(match[1]), int(match[2])))
        return bool(found)

    wait_for(look, f"the engine's ports in {log}")
    return found[0]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a load run does; see native/load.c."""

    mode: str
    conns: int
    streams: int = 1
    rate: float = 50.0
    burst: bool = False
    ramp_s: float = 1.0
    warm_s: float = 1.0
    think_ms: float = 0.0
    tokens: int = FOREVER

    @property
    def offered(self) -> float:
        """Tokens a second that the engine makes when nobody holds it back."""
        return self.conns * self.streams * self.rate

    def hurried(self) -> "Shape":
        """The same with half the time to settle."""
        return replace(self, ramp_s=self.ramp_s / 2, warm_s=self.warm_s / 2)

    def body(self, folder: Path) -> Path:
        """The request's body as a file."""
        if self.mode.startswith("grpc"):
            path = folder / f"{self.mode}-{self.tokens}.pb"
            message = pb.GenerateRequest(pool="m", prompt="hi", sampling=pb.Sampling(max_tokens=self.tokens))
            path.write_bytes(message.SerializeToString())
        else:
            path = folder / f"{self.mode}-{self.tokens}.json"
            body = {"model": "m", "prompt": "Say hello.", "max_tokens": self.tokens, "stream": self.mode != "short"}
            path.write_text(json.dumps(body, separators=(",", ":")))
        return path


def run_load(
    shape: Shape, port: int, pids: dict[str, list[int]], seconds: float, folder: Path, cores: Cores, ours: list[int]
) -> dict[str, object]:
    """One run; the load client's JSON with `foreign` and `load_average` added. `ours`: all our pids on the core."""
    argv = [
        *cores.before(cores.load), *load_argv(), "--port", str(port), "--mode", shape.mode, "--conns", str(shape.conns),
        "--streams", str(shape.streams), "--body", str(shape.body(folder)), "--ramp", str(shape.ramp_s),
        "--warm", str(shape.warm_s), "--seconds", str(seconds), "--think-ms", str(shape.think_ms),
        "--path", GENERATE if shape.mode.startswith("grpc") else COMPLETIONS,
    ]  # fmt: skip
    for name, numbers in pids.items():
        for pid in numbers:
            argv += ["--pid", f"{name}={pid}"]
    before = busy(cores.router, ours)
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=seconds + shape.ramp_s + shape.warm_s + 90,
        cwd=ROOT,
        check=False,
    )
    after = busy(cores.router, ours)
    if done.returncode != 0 or not done.stdout.strip():
        return {"error": f"load client: exit {done.returncode}: {done.stderr.strip()[-300:]}", "errors": 1}
    result: dict[str, object] = json.loads(done.stdout)
    result["foreign"] = round(foreign(before, after), 3)
    result["load_average"] = round(os.getloadavg()[0], 2)
    return result
