"""The actor that keeps one agent on its Ray node. Standard library only: it travels to the node by value."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from springtide.log_file import MAX_LOG_BYTES, bound_log  # travels along

_PR_SET_PDEATHSIG = 1
_NOT_FOR_AGENTS = ("RAY_", "OMP_NUM_THREADS", "SPRINGTIDE_")
_MARK = "SPRINGTIDE_RAY"  # of a cluster of `provisioner.ray up`: its end finds all that belongs to it
_KILL_AFTER_S = 15.0
_LAST_BYTES = 4096  # of a log that may be large


class AgentKeeper:
    """Starts the agent at once. It stays after the agent's end, to tell how that was, until it is killed."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """`plan`: node_id, flags, environ (may hold a secret), python, import_path, data_dir, host, gpus (simulated
        ones; None: the real ones that Ray gave), stop_timeout_s."""
        self._told = False
        self._began = time.monotonic()
        self._stop_timeout_s = float(plan["stop_timeout_s"])
        parent = Path(plan["data_dir"] or f"{tempfile.gettempdir()}/springtide-ray-{os.getuid()}")
        self._folder = parent / plan["node_id"]
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_FOR_AGENTS) or key == _MARK}
        env = {**kept, **plan["environ"]}
        if plan["import_path"]:
            env["PYTHONPATH"] = plan["import_path"]
        flags = [*plan["flags"], "--data-dir", str(self._folder), "--host", plan["host"]]
        if plan["gpus"] is not None:
            flags += ["--gpus", str(plan["gpus"])]
            env.pop("CUDA_VISIBLE_DEVICES", None)
        libc = ctypes.CDLL(None)

        def end_with_me() -> None:
            """Ray kills its workers when a node leaves: the agent drains then."""
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        with (self._folder / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(
                [plan["python"] or sys.executable, "-m", "nodeagent", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=self._folder,
                start_new_session=True,
                preexec_fn=end_with_me,  # noqa: PLW1509 - one call of libc, found before the fork
            )

    def status(self) -> dict[str, Any]:
        """`code` of the agent's end (None: it runs), whether it was `told` to stop, `ran_s`, and its last words.
        Bounds its log."""
        code = self._agent.poll()
        with contextlib.suppress(OSError):
            bound_log(self._folder / "agent.log", MAX_LOG_BYTES)
        return {"code": code, "told": self._told, "ran_s": time.monotonic() - self._began, "words": self._words(code)}

    def stop(self) -> None:
        """Tells the agent to drain; it is killed if it takes too long."""
        if self._told or self._agent.poll() is not None:
            return
        self._told = True
        self._agent.send_signal(signal.SIGTERM)
        threading.Thread(target=self._see_to_it, daemon=True).start()

    def _see_to_it(self) -> None:
        try:
            code = self._agent.wait(self._stop_timeout_s + _KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            code = self._agent.wait()
        if code == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _words(self, code: int | None) -> str:
        if code in (None, 0):
            return ""
        try:
            with (self._folder / "agent.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines = log.read(_LAST_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-2:])[-300:]
