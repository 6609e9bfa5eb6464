"""A Ray cluster of one host that grows GPU by GPU: the head has GPU 0, each further node the next one.

`up` stays in the foreground and ends everything; `add` starts one node more from another terminal. Each Ray node is one
`ray start --block` of its own. What runs is in a folder of small files, so that both agree on the next GPU.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from springtide import processes
from springtide.errors import FailedPrecondition, InvalidArgument, NotFound

STARTED = "Ray runtime started"
VARIABLE = "SPRINGTIDE_RAY"  # in the environment of every process of the cluster: how they are found at the end
SHORT = 40  # characters: Ray's unix sockets are below its temporary folder
TOO_LATE = "timed out during startup"  # Ray gives a node 30 s; a busy host needs more at times
START_ATTEMPTS = 3
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`gpus`: of this host. `port`: of the head."""

    folder: Path
    gpus: int
    port: int = 6379
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class LocalRay:
    """The cluster in a folder."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan

    @staticmethod
    def find(folder: Path) -> "LocalRay":
        """The one that `up` started there. Raises NotFound."""
        try:
            found = json.loads((folder / "cluster.json").read_text())
            os.kill(found["pid"], 0)
        except (OSError, ValueError):
            raise NotFound(kind="Ray cluster", name=str(folder)) from None
        return LocalRay(ClusterPlan(folder, found["gpus"], found["port"], found["host"]))

    def up(self, workers: int) -> None:
        """The head and so many nodes beside it. Raises SpringtideError; nothing is left then."""
        plan = self.plan
        if workers + 1 > plan.gpus:
            raise InvalidArgument(
                field="workers",
                value=workers,
                problem=f"needs {workers + 1} GPUs with the head, and this host has {plan.gpus}",
                remedy=f"Start with at most {plan.gpus - 1}." if plan.gpus else "Give --gpus N for simulated ones.",
            )
        plan.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in plan.folder.glob("node-*.json"):
            left.unlink()
        about = {"pid": os.getpid(), "gpus": plan.gpus, "port": plan.port, "host": plan.host, "address": plan.address}
        _write(plan.folder / "cluster.json", about)
        try:
            for _ in range(workers + 1):
                self.add()
        except BaseException:
            self.down()
            raise

    def add(self) -> int:
        """One node more, with the next GPU; which one. Raises FailedPrecondition when there is none left."""
        with self._locked():
            used = [self._read(path)["gpu"] for path in self._nodes()]
            free = [gpu for gpu in range(self.plan.gpus) if gpu not in used]
            if not free:
                raise FailedPrecondition(
                    f"all {self.plan.gpus} GPUs of this host are in the cluster; there is no GPU {self.plan.gpus}.",
                    reason="NO_GPU_LEFT",
                    remedy="Add a host (`ray start --address`), or end a node.",
                )
            self._start(free[0], head=not used)
            return free[0]

    def down(self) -> None:
        """Ends all nodes, the head last, and whatever of them is left."""
        marked = set(self._marked())  # a node that died may have left its pid to somebody else
        pids = [pid for path in sorted(self._nodes(), reverse=True) if (pid := self._read(path)["pid"]) in marked]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and any(processes.identify(pid) for pid in pids):
            time.sleep(0.1)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (left := list(self._marked())) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.1)
        for path in (*self._nodes(), self.plan.folder / "cluster.json"):
            path.unlink(missing_ok=True)

    def dead(self) -> list[int]:
        """GPUs of nodes whose process has ended by itself; they may be added again."""
        found = []
        for path in self._nodes():
            node = self._read(path)
            if processes.identify(node["pid"]) is None:
                found.append(int(node["gpu"]))
                path.unlink(missing_ok=True)
        return found

    def gpus_in_use(self) -> list[int]:
        return sorted(int(self._read(path)["gpu"]) for path in self._nodes())

    # ------------------------------------------------------------ inside

    def _start(self, gpu: int, *, head: bool) -> None:
        plan = self.plan
        where = [f"--address={plan.address}"]
        if head:
            where = ["--head", f"--port={plan.port}", "--include-dashboard=false"]
            if len(str(plan.folder)) < SHORT:
                where.append(f"--temp-dir={plan.folder}/session")
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--block", *where),
            *(f"--node-ip-address={plan.host}", "--num-cpus=1", "--num-gpus=1", "--disable-usage-stats"),
            *("--resources", json.dumps({"worker_unit": 1})),
        ]
        env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": str(gpu),
            VARIABLE: str(plan.folder),
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        log_path = plan.folder / f"node-{gpu}.log"
        for attempt in range(1, START_ATTEMPTS + 1):
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                )
            if _started(process, log_path):
                _write(plan.folder / f"node-{gpu:03}.json", {"gpu": gpu, "pid": process.pid})
                return
            _kill_group(process)
            words = log_path.read_text(errors="replace").strip().splitlines()[-1:]
            if attempt == START_ATTEMPTS or not any(TOO_LATE in word for word in words):
                raise FailedPrecondition(
                    f"Ray's node with GPU {gpu} did not start: {' | '.join(words) or 'it said nothing'}",
                    reason="RAY_NOT_STARTED",
                    remedy=f"Its log: {log_path}",
                )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.plan.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _nodes(self) -> list[Path]:
        return sorted(self.plan.folder.glob("node-*.json"))

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _marked(self) -> Iterator[int]:
        for found, _ in processes.with_variable(VARIABLE, str(self.plan.folder)):
            if found.pid != os.getpid():
                yield found.pid


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: `up` reads what `add` writes."""
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def _started(process: "subprocess.Popen[bytes]", log_path: Path) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if STARTED in log_path.read_text(errors="replace"):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.1)
    return False


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
