"""Ways to hurt a running stack, and looks at what is left of it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from springtide.v1 import types_pb2 as t
from tests.ports import free_port
from tests.system import load
from tests.system.load import Result
from tests.system.stack import Stack, wait_for
from tests.system.trace import Arrival

ENGINE = ("--startup-s", "0.1", "--decode-base-ms", "10", "--max-num-seqs", "64", "--prefill-tokens-per-s", "50000")
LIVE = ("STARTING", "ACTIVE", "DRAINING")


class FaultStack(Stack):
    """A stack with what fault tests need on top."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.options = options

    def start_only(self, name: str) -> None:
        """Starts a process and waits for nothing."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *self.commands[name]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environ,
                cwd=self.folder,
                start_new_session=True,
            )

    def add_agent(self, name: str, *, gpus: int = 4, node_id: str = "", folder: str = "") -> None:
        """One more node on this machine, not started yet."""
        command = list(self.commands["nodeagent"])
        for flag, value in (
            ("--data-dir", str(self.folder / (folder or name))),
            ("--node-id", node_id or name),
            ("--gpus", str(gpus)),
        ):
            command[command.index(flag) + 1] = value
        self.commands[name] = command

    def add_router(self, name: str) -> int:
        """One more router, not started yet; its HTTP port."""
        port = free_port()
        command = list(self.commands["router"])
        for flag, value in (
            ("--data-dir", str(self.folder / name)),
            ("--listen", f"127.0.0.1:{free_port()}"),
            ("--http-listen", f"127.0.0.1:{port}"),
        ):
            command[command.index(flag) + 1] = value
        self.commands[name] = command
        return port

    def stop(self) -> None:
        """Also what was added."""
        for name in [name for name in self.processes if name not in ("controlplane", "nodeagent", "router")]:
            process = self.processes.pop(name)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        super().stop()

    def pool(self, name: str = "demo", *, workers: int = 1, most: int = 4, wait: bool = True, **spec: Any) -> None:
        """A pool that is pinned to `workers`, so that only faults and the test move it."""
        spec = {"engine_args": ENGINE, "stop_grace_s": 5.0, "policy": {"monitoring_interval": 0.5}, **spec}
        spec.setdefault("min_workers", workers)
        self.apply(name=name, engine=spec.pop("engine", "sim"), max_workers=most, **spec)
        if wait:
            wait_for(
                f"{workers} workers of {name} ACTIVE",
                lambda: len([w for w in self.workers("ACTIVE") if w.pool == name]) == workers,
                30,
            )
            self.wait_routable(name)

    # ------------------------------------------------------------ processes

    def entry(self, worker_id: str, agent: str = "agent") -> dict[str, Any]:
        """A worker's ledger."""
        found: dict[str, Any] = json.loads((self.folder / agent / "workers" / worker_id / "ledger.json").read_text())
        return found

    def engine_process(self, worker_id: str) -> psutil.Process:
        """The engine's first process: the guard's child."""
        return psutil.Process(self.engine_pids(worker_id)["guard"]).children()[0]

    def engines(self) -> list[psutil.Process]:
        """Live simulated engines of this stack."""
        found = []
        for pid in self.strays():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                line = process.cmdline()
                if "nodeagent.engines.sim" in line and process.ppid() != 1 and "guard.py" not in " ".join(line):
                    found.append(process)
        return found

    def pid(self, name: str, worker_id: str = "") -> int:
        """Of controlplane, nodeagent, router, shim, guard or engine."""
        if name == "engine":
            return self.engine_process(worker_id).pid
        return self.engine_pids(worker_id)[name] if name in ("shim", "guard") else self.processes[name].pid

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """SIGSTOP for the length of the block."""
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def inject(self, worker_id: str, **fault: Any) -> None:
        """A fault of the simulated engine."""
        endpoint = self.entry(worker_id)["engine_endpoint"].removeprefix("unix:")
        body = json.dumps(fault)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(endpoint)
            head = f"POST /fault HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            sock.sendall(head.encode() + body.encode())
            answer = sock.recv(4096)
        assert b" 200 " in answer.split(b"\r\n")[0] or not answer, answer

    # ------------------------------------------------------------ looks

    def by_id(self) -> dict[str, t.Worker]:
        return {w.worker_id: w for w in self.workers()}

    def check_whole(self, *, active: int | None = None, timeout_s: float = 30.0) -> None:
        """It converges: no start or drain under way, nothing in flight, one engine for each worker, disjoint GPUs."""

        def converged() -> bool:
            live = self.workers(*LIVE)
            return (
                all(w.state == t.WORKER_STATE_ACTIVE for w in live)
                and all(w.HasField("in_flight") and w.in_flight == 0 for w in live)
                and all(w.condition == t.WORKER_CONDITION_HEALTHY for w in live)
                and (active is None or len(live) == active)
                and len(self.engines()) == len(live)
            )

        try:
            wait_for("convergence", converged, timeout_s)
        except AssertionError:
            print(self.describe(), file=sys.stderr)
            raise
        held = Counter((w.node_id, gpu) for w in self.workers(*LIVE) for gpu in w.gpu_ids)
        assert all(count == 1 for count in held.values()), held

    def describe(self) -> str:
        lines = [
            f"{w.worker_id} {t.WorkerState.Name(w.state)} {t.WorkerPhase.Name(w.phase)} {w.reason} {w.message} "
            f"{t.WorkerCondition.Name(w.condition)} in_flight={w.in_flight if w.HasField('in_flight') else None} "
            f"gpus={list(w.gpu_ids)} node={w.node_id}"
            for w in self.workers()
        ]
        lines += [f"engines {[p.pid for p in self.engines()]}"]
        lines += [f"event {e.action} {e.target} {e.status} {e.reason} {e.message}" for e in self.events()[-40:]]
        return "\n".join(lines)

    def actions(self, target: str = "") -> list[str]:
        return [e.action for e in self.events() if not target or e.target == target]

    def ask(self, model: str = "demo", *, tokens: int = 20, number: int = 1, timeout_s: float = 30.0) -> Result:
        return uvloop.run(load.ask(self.http, model, Arrival(number, 0, 20, tokens), salt="fault", timeout_s=timeout_s))


def engine_metrics(stack: FaultStack, worker_id: str) -> dict[str, float]:
    """What an engine shows of itself, on its own socket; labels are left out."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(stack.entry(worker_id)["engine_endpoint"].removeprefix("unix:"))
        sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    families = text_string_to_metric_families(answer.partition(b"\r\n\r\n")[2].decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def check_outcome(result: Result) -> None:
    """Exact, or an explicit error: never a clean end that is wrong, never a silent cut."""
    if result.ok:
        assert result.exact, result
    else:
        assert result.error or result.transport, result
        assert not result.done, result


def get(port: int, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """One plain GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


__all__ = ["ENGINE", "LIVE", "FaultStack", "check_outcome", "engine_metrics", "free_port", "get", "wait_for"]
