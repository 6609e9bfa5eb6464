"""A whole Springtide on this machine, as separate processes, for tests: start, kill, start again, look inside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from springtide.v1.controlplane_pb2_grpc import ControlPlaneServiceStub
from tests.ports import free_port

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float = 30.0, every_s: float = 0.05) -> T:
    """Asks `probe` until it gives something, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            found = probe()
        except (grpc.RpcError, OSError, ValueError) as error:
            found, last = None, error
        if found:
            return found
        time.sleep(every_s)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s (last error: {last})")


class Stray(int):
    """The pid of a process that a stack has left; an assertion that meets one shows its command line."""

    command: str

    def __repr__(self) -> str:
        return f"{int(self)} ({self.command})"

    __str__ = int.__repr__  # a path below /proc is made of it


class Stack:
    """Control plane, one agent and one router in `folder`. Ports stay the same over restarts."""

    def __init__(
        self,
        folder: Path,
        *,
        gpus: int = 4,
        timing: Mapping[str, float] | None = None,
        agent_config: str = "",
        router_config: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.controlplane_port, self.router_port, self.http_port = free_port(), free_port(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "STACK_UNDER_TEST": str(folder), **(environ or {})}
        config = folder / "controlplane.toml"
        config.write_text("[timing]\n" + "".join(f"{key} = {value}\n" for key, value in (timing or {}).items()))
        (folder / "nodeagent.toml").write_text(agent_config)
        (folder / "router.toml").write_text(router_config)
        control = f"127.0.0.1:{self.controlplane_port}"
        self.commands = {
            "controlplane": [
                *("-m", "controlplane", "--config", str(config), "--listen", control),
                *("--data-dir", str(folder / "cp"), "--metrics-port", "0"),
            ],
            "nodeagent": [
                *("-m", "nodeagent", "--controlplane", control, "--data-dir", str(folder / "agent")),
                *("--gpus", str(gpus), "--node-id", "node-a", "--metrics-port", "0", "--probe-interval-s", "0.2"),
                *("--config", str(folder / "nodeagent.toml")),
            ],
            "router": [
                *("-m", "router", "--controlplane", control, "--data-dir", str(folder / "router")),
                *("--listen", f"127.0.0.1:{self.router_port}", "--http-listen", f"127.0.0.1:{self.http_port}"),
                *("--metrics-port", "0", "--config", str(folder / "router.toml")),
            ],
        }
        self._channel: grpc.Channel | None = None

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.controlplane_port}"

    # ------------------------------------------------------------ processes

    def start(self, *names: str) -> "Stack":
        """Starts the named processes, or all."""
        for name in names or tuple(self.commands):
            log = (self.folder / f"{name}.log").open("ab")
            self.processes[name] = subprocess.Popen(
                [sys.executable, *self.commands[name]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environ,
                cwd=self.folder,
                start_new_session=True,
            )
            log.close()
        if "controlplane" in (names or self.commands):
            self._wait_answer()
        return self

    def _wait_answer(self) -> None:
        """Until the control plane answers; one that has ended, or never answers, is shown with what it said."""

        def probe() -> bool:
            status = self.processes["controlplane"].poll()
            assert status is None, f"the control plane ended with {status}:\n{self.log('controlplane')[-4000:]}"
            return bool(self.status().store_id)

        try:
            wait_for("the control plane's answer", probe)
        except AssertionError as failed:
            ends = {name: process.poll() for name, process in self.processes.items()}
            raise AssertionError(f"{failed}\n{ends}\n{self.log('controlplane')[-4000:]}") from failed

    def kill(self, name: str) -> None:
        """SIGKILL, and gone."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(10)

    def stop(self) -> None:
        """Ends everything; the agent first, so that it drains while a control plane is there."""
        for name, patience_s in (("nodeagent", 30.0), ("router", 10.0), ("controlplane", 10.0)):
            process = self.processes.pop(name, None)
            if process is None:
                continue
            process.terminate()
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        if self._channel is not None:
            self._channel.close()
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(AssertionError):  # a killed process is there until the kernel has freed its memory
            wait_for("the end of what was killed", lambda: not self.strays(), 10)

    def strays(self) -> list[int]:
        """Processes whose command line or environment names this stack's folder: shims, guards, engines, children."""
        found: list[int] = []
        mark = str(self.folder).encode()
        mine = {process.pid for process in self.processes.values()} | {os.getpid()}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in mine:
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                marked = mark in command or mark in (entry / "environ").read_bytes()
                if marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    stray = Stray(entry.name)
                    stray.command = command.replace(b"\0", b" ").decode(errors="replace")
                    found.append(stray)
        return found

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # ------------------------------------------------------------ looks and orders

    @property
    def operator(self) -> Any:  # the generated stub; its types know only asyncio
        if self._channel is None:
            options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
            self._channel = grpc.insecure_channel(self.address, options=options)
        return ControlPlaneServiceStub(cast(Any, self._channel))

    def status(self) -> cp.GetStatusResponse:
        found: cp.GetStatusResponse = self.operator.GetStatus(cp.GetStatusRequest(), timeout=10, wait_for_ready=True)
        return found

    def apply(self, **spec: Any) -> t.Pool:
        policy, policy_name = spec.pop("policy", {}), spec.pop("policy_name", "load_ratio")
        request = cp.ApplyPoolRequest(spec=t.PoolSpec(**spec))
        request.spec.policy.name = policy_name
        request.spec.policy.settings.update(policy)
        pool: t.Pool = self.operator.ApplyPool(request, timeout=10).pool
        return pool

    def workers(self, *states: str) -> list[t.Worker]:
        """Workers of the given states (all: none given)."""
        found = self.operator.ListWorkers(cp.ListWorkersRequest(), timeout=10, wait_for_ready=True).workers
        return [w for w in found if not states or t.WorkerState.Name(w.state).removeprefix("WORKER_STATE_") in states]

    def wait_workers(self, state: str, count: int, timeout_s: float = 30.0) -> list[t.Worker]:
        """Waits until exactly `count` workers are in `state`."""

        def probe() -> list[t.Worker] | None:
            found = self.workers(state)
            return found if len(found) == count else None

        if count == 0:
            wait_for(f"no worker {state}", lambda: not self.workers(state), timeout_s)
            return []
        return wait_for(f"{count} workers {state}", probe, timeout_s)

    def wait_routable(self, model: str, timeout_s: float = 30.0) -> None:
        """Waits until the router knows the model."""
        import urllib.request

        def probe() -> bool:
            with urllib.request.urlopen(self.http + "/v1/models", timeout=2) as answer:
                return any(entry["id"] == model for entry in json.load(answer)["data"])

        wait_for(f"model {model} at the router", probe, timeout_s)

    def events(self) -> list[t.Event]:
        return list(self.operator.ListEvents(cp.ListEventsRequest(limit=10_000), timeout=10).events)

    def decisions(self) -> list[t.Decision]:
        return list(self.operator.ListDecisions(cp.ListDecisionsRequest(limit=1000), timeout=10).decisions)

    def counted(self, process: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, at one of the three processes."""
        import urllib.request

        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"http://{self.metrics_address(process)}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def metrics_address(self, process: str) -> str:
        """Where one of the three processes shows its metrics."""
        folder = {"controlplane": "cp", "nodeagent": "agent"}.get(process, process)
        return str(json.loads((self.folder / folder / f"{process}.json").read_text())["metrics"])

    def engine_pids(self, worker_id: str) -> dict[str, int]:
        """shim, guard and engine pids of a worker, from its folder."""
        runtime = json.loads((self.folder / "agent" / "workers" / worker_id / "shim.json").read_text())
        return {"shim": int(runtime["shimPid"]), "guard": int(runtime["guardPid"])}


@contextlib.contextmanager
def running(folder: Path, **options: Any) -> Iterator[Stack]:
    """A stack that is stopped at the end, with nothing left behind."""
    stack = Stack(folder, **options)
    try:
        yield stack.start()
    finally:
        stack.stop()
