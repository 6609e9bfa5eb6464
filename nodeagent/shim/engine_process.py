"""The engine as the shim holds it: a guard process with two pipes, and what to do when the guard itself is killed."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nodeagent import guard
from nodeagent.shim import cgroup
from springtide.v1 import shim_pb2

log = logging.getLogger(__name__)

_OVERDUE_S = 10.0
"""How long after the last moment of a stop's grace the guard may take before the shim does its work."""


class EngineProcess:
    """Starts the engine under its guard. `on_end(code, signal)` is called once, when no process of it is left."""

    def __init__(
        self,
        launch: shim_pb2.ShimLaunch,
        folder: Path,
        on_end: Callable[[int | None, int | None], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._launch = launch
        self._folder = folder
        self._on_end = on_end
        self._on_start = on_start
        self._buffer = b""
        self._ended = False
        self._order_fd = -1
        self._report_fd = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._cgroup: Path | None = None
        self.confinement = "guard"
        self.guard_pid = 0
        self.engine_pid = 0

    def start(self) -> None:
        """Spawns the guard, which spawns the engine. Raises OSError."""
        guard.become_subreaper()  # what a killed guard leaves behind becomes a child of this process
        order_read, self._order_fd = os.pipe()
        self._report_fd, report_write = os.pipe()
        os.set_blocking(self._report_fd, False)
        with open(self._launch.engine_log_path, "ab") as engine_log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(order_read), str(report_write)],
                stdin=subprocess.DEVNULL,
                stdout=engine_log,
                stderr=engine_log,
                pass_fds=(order_read, report_write),
                start_new_session=True,
                env=dict(self._launch.env),  # for the marker: a guard must be found as a stray too
                cwd=self._folder,
            )
        os.close(order_read)
        os.close(report_write)
        self.guard_pid = process.pid
        process.returncode = 0  # reaped below, not by Popen
        asyncio.get_running_loop().add_reader(self._report_fd, self._readable)
        self._cgroup = cgroup.create(f"{self._launch.marker[:12]}-{self._launch.worker_id}", self._launch.incarnation)
        launch = {
            "argv": list(self._launch.argv),
            "env": dict(self._launch.env),
            "cwd": str(self._folder),
            "cgroup": str(self._cgroup or ""),
        }
        self._order(json.dumps(launch).encode() + b"\n")

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL after `grace_s` seconds; 0: SIGKILL now. May be called again with less grace."""
        self._order(b"T%f\n" % grace_s if grace_s > 0 else b"K\n")
        asyncio.get_running_loop().call_later(max(grace_s, 0.0) + _OVERDUE_S, self._overdue)

    def _overdue(self) -> None:
        if not self._ended:
            log.warning("guard %d did not end the engine in time; it is killed", self.guard_pid)
            self._kill_guard()

    def _kill_guard(self) -> None:
        try:
            os.kill(self.guard_pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _order(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._order_fd, line) :]
        except OSError as error:
            log.warning("guard %d takes no orders: %s", self.guard_pid, error)

    def _readable(self) -> None:
        try:
            data = os.read(self._report_fd, 65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._report_fd)
            os.close(self._report_fd)
            if not self._ended:
                log.warning("guard %d was killed; its engine is killed too", self.guard_pid)
                self._end(None, int(signal.SIGKILL))
            return
        self._buffer += data
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            self._event(json.loads(line))

    def _event(self, event: dict[str, object]) -> None:
        match event:
            case {"event": "started", "pid": int(pid)}:
                self.engine_pid = pid
                if self._cgroup is not None and cgroup.holds(self._cgroup, pid):
                    self.confinement = "cgroup"
                log.info("engine started as process %d under guard %d (%s)", pid, self.guard_pid, self.confinement)
                self._on_start()
            case {"event": "refused", "message": str(message)}:
                with open(self._launch.engine_log_path, "a") as engine_log:
                    engine_log.write(f"cannot start the engine: {message}\n")
                self._end(127, None)
            case {"event": "ended"}:
                code, number = event.get("code"), event.get("signal")
                self._end(code if isinstance(code, int) else None, number if isinstance(number, int) else None)

    def _end(self, code: int | None, number: int | None) -> None:
        if not self._ended:
            self._ended = True
            task = asyncio.get_running_loop().create_task(self._finish(code, number))
            self._tasks.add(task)

    async def _finish(self, code: int | None, number: int | None) -> None:
        """Reaps the guard, and kills whatever it left behind if it was killed itself."""
        pause_s = 0.005
        if self._cgroup is not None:
            cgroup.kill(self._cgroup)  # of a guard that was killed itself; else nothing is left in it
        while self._reap():
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.2)
            # A guard that has reported leaves by itself; one that was killed leaves its children to this process.
            guard.kill_below(os.getpid(), spare=self.guard_pid if pause_s < 0.2 else 0)
        if self._cgroup is not None:
            cgroup.remove(self._cgroup)
        os.close(self._order_fd)
        self._on_end(code, number)

    @staticmethod
    def _reap() -> bool:
        """Collects what has ended; False when no child is left."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
