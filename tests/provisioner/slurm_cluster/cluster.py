"""Starts and ends the daemons of a virtual cluster, breaks its nodes, and finds what its jobs left."""

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.ports import free_port
from tests.provisioner.slurm_cluster.configs import Shape, gres_conf, node_name, slurm_conf

PACKAGES = "munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
DAEMONS = {"munged", "slurmctld", "slurmd", "slurmstepd"}
START_S = 30.0


class VirtualCluster:
    """All of it is below `root` (a short path: munge's socket is in it), on loopback ports that were free.

    Clients need `environ`. `down` ends every process of the cluster and of its jobs.
    """

    def __init__(self, root: Path, shape: Shape | None = None) -> None:
        self.root = root
        self.shape = shape or Shape()
        self.conf = root / "slurm.conf"
        self.environ = {
            **os.environ,
            "SLURM_CONF": str(self.conf),
            "PATH": os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # ------------------------------------------------------------ up and down

    def up(self) -> "VirtualCluster":
        """Returns when all nodes are idle. Raises AssertionError with the logs' last words when they do not come."""
        assert shutil.which("slurmctld", path=self.environ["PATH"]), f"slurmctld is missing; install {PACKAGES}"
        self._write()
        munge = self.root / "munge"
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={munge}/munge.key", *self._munge())
        self._until("munge's socket", (self.root / "run/munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for number in range(1, self.shape.nodes + 1):
            self.start_node(number)
        self._until("all nodes", lambda: len(self.idle_nodes()) == self.shape.nodes)
        return self

    def down(self) -> None:
        """Ends daemons, steps and whatever the jobs started."""
        for name in sorted(self._daemons, key=lambda name: name == "munged"):
            process = self._daemons.pop(name)
            process.kill()
            process.wait(10)
        deadline = time.monotonic() + 10
        while (left := list(self.processes())) and time.monotonic() < deadline:
            for pid, _ in left:
                _kill(pid)
            time.sleep(0.05)
        assert not left, f"processes of the cluster do not end: {left}"

    def _write(self) -> None:
        for part in ("state", "log", "run", "dev", "munge"):
            (self.root / part).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "munge").chmod(0o700)
        for number in range(self.shape.gpus):
            device = self.root / f"dev/gpu{number}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        names = [node_name(number) for number in range(1, self.shape.nodes + 1)]
        ports = {name: free_port() for name in ("slurmctld", *names)}
        self.conf.write_text(slurm_conf(self.root, self.shape, ports))
        (self.root / "gres.conf").write_text(gres_conf(self.root, self.shape))
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.root / "munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _munge(self) -> tuple[str, ...]:
        run, munge = self.root / "run", self.root / "munge"
        return (
            f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid",
            f"--log-file={self.root}/log/munged.log",
            f"--seed-file={munge}/seed",
            "--num-threads=2",
        )

    def _start(self, name: str, *command: str) -> None:
        with (self.root / f"log/{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environ, start_new_session=True
            )

    def _until(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not there():
            dead = [name for name, process in self._daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come; ended: {dead}\n{self.last_words()}")
            time.sleep(0.05)

    def last_words(self) -> str:
        """The ends of all logs."""
        logs = sorted((self.root / "log").iterdir())
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    # ------------------------------------------------------------ nodes

    def start_node(self, number: int) -> None:
        """Also after `kill_node`."""
        name = node_name(number)
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, number: int, *, with_jobs: bool = True) -> None:
        """A host that dies: its slurmd, and (unless it is only the daemon that dies) all that its jobs run."""
        name = node_name(number)
        process = self._daemons.pop(name)
        process.kill()
        process.wait(10)
        if with_jobs:
            jobs = self.run("squeue", "-h", "-t", "R,CG", "-w", name, "-o", "%i").split()
            for pid, _ in self.processes():  # the steps first: they would tell slurmctld of the others' end
                if any(_title(pid).startswith(f"slurmstepd: [{job}.") for job in jobs):
                    _kill(pid)
            for pid, env in [*self.processes(), *self.processes()]:  # again, for what was started meanwhile
                if env.get("SLURMD_NODENAME") == name:
                    _kill(pid)

    def pause(self) -> None:
        """slurmctld falls silent: connections are taken, nothing is answered."""
        self._daemons["slurmctld"].send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends `pause`."""
        self._daemons["slurmctld"].send_signal(signal.SIGCONT)

    def idle_nodes(self) -> list[str]:
        """Names; none while slurmctld does not answer."""
        found = self.run("sinfo", "-h", "-N", "-p", "high", "-t", "idle", "-o", "%N", check=False)
        return sorted(set(found.split()))

    # ------------------------------------------------------------ clients

    def run(self, *command: str, check: bool = True, stdin: str = "") -> str:
        """One of SLURM's commands; its stdout."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=20, input=stdin, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode} {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, *options: str, script: str = "sleep 600") -> str:
        """Job id."""
        command = ("sbatch", "--parsable", f"--output={self.root}/log/job-%j.out", *options)
        return self.run(*command, stdin=f"#!/bin/bash\n{script}\n").strip()

    def jobs(self, *states: str) -> dict[str, str]:
        """State by job id, of the given states or all that slurmctld remembers."""
        found = self.run("squeue", "-h", "-t", ",".join(states) or "all", "-o", "%i %T")
        return dict(line.split() for line in found.splitlines())

    # ------------------------------------------------------------ processes

    def processes(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """(pid, environment) of every live process that carries this cluster's SLURM_CONF, tests and clients apart."""
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                raw = Path(entry.path, "environ").read_bytes()
                if f"SLURM_CONF={self.conf}".encode() not in raw.split(b"\0"):
                    continue
                if Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                    continue
                name = Path(entry.path, "comm").read_text().strip()
            except OSError:
                continue
            env = dict(part.partition("=")[::2] for part in raw.decode(errors="replace").split("\0") if part)
            if name in DAEMONS or "SLURM_JOB_ID" in env:
                yield int(entry.name), env


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
