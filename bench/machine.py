"""The machine: which core is whose, what else ran, and processes that always end."""

import contextlib
import os
import platform
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Cores:
    """One core for what is measured, the others for load, engine and control plane."""

    router: int
    rest: frozenset[int]
    realtime: bool = False
    """What is measured, the load and the engine run before everything else on their cores (SCHED_FIFO)."""

    @property
    def load(self) -> int:
        """The core of the load client and the mock engine."""
        return min(self.rest)

    def before(self, core: int) -> list[str]:
        """What to put before a command so that it stays on a core, and does not outlive its parent."""
        priority = ["chrt", "-f", "1"] if self.realtime else []
        return ["setpriv", "--pdeathsig", "KILL", *priority, "taskset", "-c", str(core)]


def choose_cores(realtime: bool = False) -> Cores:
    """The last core is the router's. Raises SystemExit where there is only one, or where real time is not allowed."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("bench: two cores are needed: one for the router, one for load and engine")
    cores = Cores(usable[-1], frozenset(usable[:-1]), realtime)
    if subprocess.run([*cores.before(cores.router), "true"], capture_output=True, check=False).returncode != 0:
        raise SystemExit(
            "bench: " + ("--realtime needs root" if realtime else "taskset and setpriv are needed (util-linux)")
        )
    return cores


def raise_limits() -> int:
    """Raises the limit of open files as far as it goes; gives it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 65536 and os.geteuid() == 0:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))
            return 65536
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Polls. Raises SystemExit that names what did not come."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"bench: {what} did not come within {timeout_s:g} s")
        time.sleep(0.02)


class Process:
    """A process with its output in a file; `stop` ends it and all that it started."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self._child.poll() is None

    def pids(self) -> list[int]:
        """The process and its descendants."""
        try:
            process = psutil.Process(self._child.pid)
            return [process.pid, *(p.pid for p in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after two seconds."""
        pids = self.pids()
        if self.alive:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(2)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


@dataclass(frozen=True, slots=True)
class Busy:
    """CPU seconds so far: of one core, and of the processes that are ours on it."""

    core_s: float
    ours_s: float
    at: float


def busy(core: int, pids: list[int]) -> Busy:
    """Reads /proc/stat and /proc/PID/stat."""
    tick = os.sysconf("SC_CLK_TCK")
    core_s = 0.0
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            user, nice, system, _, _, irq, softirq, steal = (int(x) for x in line.split()[1:9])
            core_s = (user + nice + system + irq + softirq + steal) / tick
    return Busy(core_s, sum(cpu_s(pid) for pid in pids), time.monotonic())


def cpu_s(pid: int) -> float:
    """User and system seconds of a process; 0 when it is gone."""
    return sum(cpu_split_s(pid))


def cpu_split_s(pid: int) -> tuple[float, float]:
    """User and system seconds of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def rss_kb(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE") // 1024


def foreign(before: Busy, after: Busy) -> float:
    """Share of the core that others used in between, 0 to 1."""
    passed_s = max(1e-9, after.at - before.at)
    used_s = (after.core_s - before.core_s) - (after.ours_s - before.ours_s)
    return min(1.0, max(0.0, used_s / passed_s))


@contextlib.contextmanager
def ending(process: Process) -> Iterator[Process]:
    """Stops the process at the end of the block."""
    try:
        yield process
    finally:
        process.stop()


def describe(cores: Cores, open_files: int) -> dict[str, object]:
    """What to know of the machine beside the figures."""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "router_core": cores.router,
        "load_core": cores.load,
        "kernel": platform.release(),
        "open_files": open_files,
        "realtime": cores.realtime,
        "load_and_engine": "C" if native() else "Python on uvloop",
    }


def native() -> bool:
    """True where the compiled load client and engine are there, and `BENCH_FALLBACK` is not set."""
    built = (NATIVE / "engine").exists() and (NATIVE / "load").exists()
    return built and not os.environ.get("BENCH_FALLBACK")
