"""One process of the stack: in a session of its own, found by its discovery file, started again when it dies."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import springtide
from springtide.cli.processes import module_command
from springtide.errors import SpringtideError

MAX_LOG_BYTES = 32 * 1024 * 1024
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
HEALTHY_AFTER_S = 30.0
POLL_S = 0.05
CANNOT_START = 2  # what our processes end with when their configuration cannot work

# A stack under systemd answers for itself, its children do not; and their configuration is in their files alone.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
_IN_THE_FILES = ("SPRINGTIDE_ADDRESS", "SPRINGTIDE_LISTEN", "SPRINGTIDE_DATA_DIR", "SPRINGTIDE_RUNTIME_DIR")


class ChildFailed(SpringtideError):
    """A process ended instead of starting."""

    default_reason = "PROCESS_FAILED"


class Child:
    """`module` is run with `--config CONFIG`; `discovery` is the file that it writes when it listens."""

    def __init__(self, name: str, module: str, *, config: Path, discovery: Path, log_path: Path, cwd: Path) -> None:
        self.name = name
        self.discovery = discovery
        self.log_path = log_path
        self.stopping = False
        self._command = [*module_command(module), "--config", str(config)]
        self._cwd = cwd
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        self.discovery.unlink(missing_ok=True)
        with self._open_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                cwd=self._cwd,
                start_new_session=True,
            )

    def _open_log(self) -> BinaryIO:
        if self.log_path.exists() and self.log_path.stat().st_size > MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        return open(self.log_path, "ab")

    async def listening(self, timeout_s: float) -> dict[str, Any]:
        """Its discovery file once it listens. Raises ChildFailed with the last words of its log."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            found = read_discovery(self.discovery)
            if found is not None and found.get("pid") == self.pid:
                return found
            if not self.alive:
                code = self._process.returncode if self._process is not None else None
                raise ChildFailed(
                    f"The {self.name} ended with exit code {code} while starting: {last_words(self.log_path)}",
                    remedy=f"Its log: {self.log_path}",
                    reason="CONFIGURATION_REFUSED" if code == CANNOT_START else None,
                )
            if asyncio.get_running_loop().time() > deadline:
                raise ChildFailed(
                    f"The {self.name} did not listen within {timeout_s:.0f} s.", remedy=f"Its log: {self.log_path}"
                )
            await asyncio.sleep(POLL_S)

    async def keep(self, say: Callable[[str], None], timeout_s: float) -> None:
        """Starts it again, with back-off, whenever it ends; until cancelled or `stopping`."""
        loop, backoff_s = asyncio.get_running_loop(), FIRST_BACKOFF_S
        while True:
            since = loop.time()
            code = await self.wait()
            if self.stopping:
                return
            if loop.time() - since > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            say(f"the {self.name} ended ({exit_words(code)}); starting it again in {backoff_s:.1f} s  {self.log_path}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
            await self.start()
            try:
                await self.listening(timeout_s)
                say(f"the {self.name} is back (process {self.pid})")
            except ChildFailed as error:
                say(str(error))
                self.signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code; negative for a signal."""
        return await self._process.wait() if self._process is not None else 0

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what is only for us, and able to import a source tree that is not installed."""
    left_out = (*_NOT_INHERITED, *_IN_THE_FILES)
    env = {k: v for k, v in (os.environ if environ is None else environ).items() if k not in left_out}
    root = str(Path(springtide.__file__).resolve().parents[1])
    if "site-packages" not in root:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env


def read_discovery(path: Path) -> dict[str, Any] | None:
    """The addresses that a process wrote; None when there is no whole file yet."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def last_words(log_path: Path, lines: int = 3) -> str:
    """The end of a log: what was printed for people, else the messages of its last lines."""
    try:
        tail = log_path.read_bytes()[-16_384:].decode(errors="replace").splitlines()
    except OSError:
        return "it wrote no log"
    words = [_message(line) for line in tail if line.strip()][-lines:]
    return " | ".join(words) or "it wrote nothing"


def exit_words(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _message(line: str) -> str:
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line.strip()
