"""Stands between a shim and its engine so that nothing of an engine outlives it. Standard library only; a few MiB.

Run as `python -I -S guard.py ORDER_FD REPORT_FD` in a session of its own. The order pipe brings one JSON line
`{"argv", "env", "cwd", "cgroup"}`, then `T SECONDS` (SIGTERM to the engine's first process, SIGKILL to all after
SECONDS) or `K` (SIGKILL to all now). Its end means that the shim is gone: everything is killed. The report pipe
answers in JSON lines: `{"event": "started", "pid"}` or `{"event": "refused", "message"}`, then `{"event": "ended",
"code", "signal"}` once no process of the engine is left. The guard is the child subreaper of all that the engine
starts, so a descendant cannot leave by forking twice or by opening a session of its own. Where `cgroup` names a control
group (version 2), the engine is in it from its first instruction, and the group is killed first.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_KILL_PAUSE_S = 0.01
_KILL_PAUSE_MAX_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphaned descendants of this process become its children. Raises OSError."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Process ids below `root`. One walk over /proc; what starts meanwhile is found by the next walk."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would triple the guard's size
        if name.isdigit():
            children.setdefault(_parent(int(name)), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def kill_below(root: int, spare: int = 0) -> None:
    """SIGKILL to every descendant of `root` but `spare`."""
    for pid in descendants(root):
        if pid != spare:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


class Guard:
    """The life of one engine, from exec to the last descendant."""

    def __init__(self, order_fd: int, report_fd: int) -> None:
        self._order_fd = order_fd
        self._report_fd = report_fd
        for fd in (order_fd, report_fd):
            os.set_inheritable(fd, False)  # an engine that held them would hide the shim's end and the guard's
        self._buffer = b""
        self._engine = 0
        self._status: int | None = None
        self._kill_at: float | None = None
        self._cgroup = ""

    def run(self) -> int:
        """Returns the guard's exit code."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        become_subreaper()
        launch = self._read_launch()
        if launch is None:
            return 0
        self._cgroup = str(launch.get("cgroup") or "")
        failure = self._spawn(launch)
        if failure:
            self._remove_cgroup()
            self._report({"event": "refused", "message": failure})
            return 1
        self._report({"event": "started", "pid": self._engine})
        self._wait(wake_read)
        self._kill_all()
        status = self._status if self._status is not None else -signal.SIGKILL
        self._report({"event": "ended", **({"code": status} if status >= 0 else {"signal": -status})})
        return 0

    def _read_launch(self) -> dict[str, object] | None:
        while b"\n" not in self._buffer:
            data = os.read(self._order_fd, 65536)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        launch: dict[str, object] = json.loads(line)
        return launch

    def _spawn(self, launch: dict[str, object]) -> str:
        """Starts the engine's first process in the guard's group; returns why it could not, or nothing."""
        argv, env = launch["argv"], launch["env"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        failure_read, failure_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                signal.set_wakeup_fd(-1)
                for number in (*_IGNORED, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                if self._cgroup:
                    self._write_cgroup("cgroup.procs", b"0")
                os.chdir(str(launch["cwd"]))
                os.execvpe(argv[0], argv, env)
            except BaseException as error:  # noqa: BLE001 - the child must end here whatever happens
                os.write(failure_write, f"{argv[0] if argv else ''}: {error}".encode()[:4000])
            os._exit(127)
        os.close(failure_write)
        failure = os.read(failure_read, 4096).decode(errors="replace")
        os.close(failure_read)
        if failure:
            os.waitpid(pid, 0)
        self._engine = pid
        return failure

    def _wait(self, wake_fd: int) -> None:
        """Until the engine's first process has ended, the grace is over, or there is nobody left to serve."""
        while True:
            self._reap()
            # Orders may have come in one read with the launch, so they are looked at before the first wait too.
            if self._status is not None or not self._obey():
                return
            timeout = None
            if self._kill_at is not None:
                timeout = self._kill_at - time.monotonic()
                if timeout <= 0:
                    return
            ready, _, _ = select.select([self._order_fd, wake_fd], [], [], timeout)
            if wake_fd in ready:
                os.read(wake_fd, 4096)
            if self._order_fd in ready:
                data = os.read(self._order_fd, 65536)
                if not data:
                    return
                self._buffer += data

    def _obey(self) -> bool:
        """Follows the orders that were read; False means: kill everything now."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line == b"K":
                return False
            if line.startswith(b"T"):
                kill_at = time.monotonic() + float(line[1:])
                self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
                try:
                    os.kill(self._engine, signal.SIGTERM)
                except ProcessLookupError:
                    pass
        return True

    def _reap(self) -> bool:
        """Collects what has ended; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._engine:
                self._status = os.waitstatus_to_exitcode(status)

    def _kill_all(self) -> None:
        """Again and again until no child is left: without children a subreaper has no descendants."""
        pause_s = _KILL_PAUSE_S
        if self._cgroup:
            self._write_cgroup("cgroup.kill", b"1")
        kill_below(os.getpid())
        while self._reap():
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _KILL_PAUSE_MAX_S)
            kill_below(os.getpid())
        self._remove_cgroup()

    def _write_cgroup(self, name: str, value: bytes) -> None:
        """What cannot be written is left out: the walk over all descendants follows anyway."""
        try:
            fd = os.open(f"{self._cgroup}/{name}", os.O_WRONLY)
            try:
                os.write(fd, value)
            finally:
                os.close(fd)
        except OSError:
            pass

    def _remove_cgroup(self) -> None:
        if self._cgroup:
            try:
                os.rmdir(self._cgroup)  # noqa: PTH106
            except OSError:
                pass

    def _report(self, event: dict[str, object]) -> None:
        try:
            os.write(self._report_fd, json.dumps(event).encode() + b"\n")
        except OSError:
            pass  # the shim is gone; the work is done all the same


if __name__ == "__main__":
    sys.exit(Guard(int(sys.argv[1]), int(sys.argv[2])).run())
