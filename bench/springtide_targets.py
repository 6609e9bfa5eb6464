"""Springtide's own processes as a deployment runs them: a router with a control plane, a shim with its launch file."""

import json
import re
import socket
import sys
import tempfile
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType

from google.protobuf import json_format

from bench.engine import INCARNATION, MANY, Engine, engine_argv, wait_for_ports
from bench.interpreter import python
from bench.machine import ROOT, Cores, Process, wait_for
from springtide.v1 import shim_pb2


class RunningRouter:
    """`python -m router` with metrics on, fed by a control plane of its own on the load core."""

    def __init__(
        self, folder: Path, name: str, cores: Cores, endpoint: str, engine: str = "", *, link: bool = True
    ) -> None:
        self._data_dir = folder / f"{name}-data"
        self._data_dir.mkdir(exist_ok=True)
        self._discovery = self._data_dir / "router.json"
        self._discovery.unlink(missing_ok=True)
        self.http_port = self.grpc_port = 0
        config = folder / f"{name}.toml"
        config.write_text(f"link = {str(link).lower()}\n")
        argv = [
            "setpriv", "--pdeathsig", "KILL", "taskset", "-c", str(cores.load),
            sys.executable, "-m", "bench.controlplane", endpoint, *([engine] if engine else []),
        ]  # fmt: skip
        self._control_plane = Process(argv, folder / f"{name}-controlplane.log")
        try:
            argv = [
                *cores.before(cores.router), python(), "-m", "router", "--config", str(config),
                "--controlplane", f"127.0.0.1:{self._control_plane_port()}",
                "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--metrics-port", "0",
                "--data-dir", str(self._data_dir), "--log-level", "warning",
            ]  # fmt: skip
            self.process = Process(argv, folder / f"{name}.log")
        except BaseException:
            self._control_plane.stop()
            raise

    def _control_plane_port(self) -> int:
        found: list[str] = []

        def look() -> bool:
            found.extend(re.findall(r"^port=(\d+)$", self._control_plane.log.read_text(), re.MULTILINE))
            return bool(found)

        wait_for(look, f"the control plane's port in {self._control_plane.log}")
        return int(found[0])

    def __enter__(self) -> "RunningRouter":
        try:
            wait_for(lambda: self._discovery.exists() or not self.process.alive, "the router's discovery file")
            found = json.loads(self._discovery.read_text())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.http_port = int(found["http"].rpartition(":")[2])
        self.grpc_port = int(found["grpc"].rpartition(":")[2])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()
        self._control_plane.stop()


class RunningShim:
    """`python -m nodeagent.shim` in front of a mock engine of its own, which listens on a unix socket."""

    def __init__(self, folder: Path, name: str, cores: Cores) -> None:
        self._dir = folder / name
        self._dir.mkdir(exist_ok=True)
        self._sockets = tempfile.TemporaryDirectory(prefix="st-bench-")  # short: a unix path has 108 bytes
        sockets = Path(self._sockets.name)
        self._control = sockets / "c"
        self._runtime = self._dir / "runtime.json"
        self._runtime.unlink(missing_ok=True)
        engine_log = self._dir / "engine.log"
        engine_log.unlink(missing_ok=True)
        launch = shim_pb2.ShimLaunch(
            worker_id="w1",
            incarnation=INCARNATION,
            generation=1,
            # The engine belongs to the load's core, the shim to the router's.
            argv=[*cores.before(cores.load), *engine_argv(), "--unix", str(sockets / "e"), "--port", "0"],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            engine_endpoint=f"unix:{sockets / 'e'}",
            listen_host="127.0.0.1",
            control_path=str(self._control),
            max_in_flight=MANY,
            engine_log_path=str(engine_log),
            runtime_file=str(self._runtime),
            marker="bench",
        )
        (self._dir / "launch.json").write_text(json_format.MessageToJson(launch))
        argv = [*cores.before(cores.router), python(), "-m", "nodeagent.shim", "--dir", str(self._dir)]
        self.process = Process(argv, self._dir / "shim.log")
        self.port = self.pid = 0
        self.engine = Engine(None, 0, 0)

    def __enter__(self) -> "RunningShim":
        try:
            wait_for(lambda: self._runtime.exists() or not self.process.alive, "the shim's runtime file")
            status = json_format.Parse(self._runtime.read_text(), shim_pb2.ShimStatus(), ignore_unknown_fields=True)
            self.port, self.pid = status.port, self.process.pids()[0]
            self.engine = Engine(None, *wait_for_ports(self._dir / "engine.log"))
            self._admit()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _admit(self) -> None:
        """What the agent does once the engine is warm."""
        order = shim_pb2.SetAdmission(admission=shim_pb2.SHIM_ADMISSION_OPEN, generation=1)
        connection = HTTPConnection("shim")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self._control))
        connection.request("POST", "/v1/admission", json_format.MessageToJson(order))
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"bench: the shim refused to open: {answer.read()!r}")
        connection.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()
        self._sockets.cleanup()
