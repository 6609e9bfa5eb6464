"""What the tests of the agent and the shim share: real shims on simulated engines, HTTP, and a hunt for leftovers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from nodeagent.engines.sim import tokens

ROOT = Path(__file__).resolve().parents[2]


def marked(marker: str) -> dict[int, str]:
    """Live processes that carry the marker in their environment: id and command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"SPRINGTIDE_NODE={marker}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (zombies do not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


async def eventually(condition: Callable[[], Any | Awaitable[Any]], bound_s: float = 15.0) -> Any:
    """The first true value of a condition; AssertionError when the bound passes first."""
    end = time.monotonic() + bound_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"not within {bound_s} s: {condition}"
        await asyncio.sleep(0.02)


class RunningShim:
    """One real shim process with a simulated engine."""

    def __init__(self, folder: Path, marker: str, engine_flags: Sequence[str] = (), **launch: Any) -> None:
        self.folder = folder
        self.control = folder / "c"
        self.engine = folder / "e"
        default_argv = [sys.executable, "-m", "nodeagent.engines.sim", "--uds", str(self.engine), "--startup-s", "0"]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SPRINGTIDE_NODE": marker}
        content = {
            "workerId": "w-1",
            "incarnation": "7",
            "generation": "1",
            "argv": [*default_argv, *engine_flags],
            "env": env,
            "engineEndpoint": f"unix:{self.engine}",
            "listenHost": "127.0.0.1",
            "controlPath": str(self.control),
            "maxInFlight": 256,
            "stopGraceS": 5,
            "engineLogPath": str(folder / "engine.log"),
            "marker": marker,
            "runtimeFile": str(folder / "runtime.json"),
            **launch,
        }
        (folder / "launch.json").write_text(json.dumps(content))
        with open(folder / "shim.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nodeagent.shim", "--dir", str(folder)],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.base = ""

    async def listening(self) -> "RunningShim":
        """Waits for the runtime file."""
        await eventually(lambda: (self.folder / "runtime.json").exists() or self.process.poll() is not None)
        assert self.process.poll() is None, (self.folder / "shim.log").read_text()
        self.base = f"http://127.0.0.1:{(await self.status())['port']}"
        return self

    async def serving(self) -> "RunningShim":
        """Waits for the engine and opens the shim."""
        await self.listening()

        async def healthy() -> bool:
            try:
                return (await unix_call(self.engine, "GET", "/health")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(healthy)
        await self.admission("OPEN")
        return self

    async def status(self, query: str = "") -> dict[str, Any]:
        """GET /v1/status."""
        answer = await unix_call(self.control, "GET", f"/v1/status{query}")
        fields: dict[str, Any] = answer.json()
        return fields

    async def admission(self, word: str, generation: int = 1, **more: Any) -> httpx.Response:
        """POST /v1/admission."""
        order = {"admission": f"SHIM_ADMISSION_{word}", "generation": generation, **more}
        return await unix_call(self.control, "POST", "/v1/admission", order)

    async def ended(self) -> dict[str, Any]:
        """Waits until no process of the engine is left."""

        async def check() -> dict[str, Any] | None:
            status = await self.status("?after=0")
            return status if status["process"] == "ENGINE_PROCESS_ENDED" else None

        found: dict[str, Any] = await eventually(check)
        return found

    def kill(self) -> None:
        """SIGKILL to the shim, and reaped."""
        self.process.kill()
        self.process.wait()


async def unix_call(path: Path, method: str, target: str, body: Any = None) -> httpx.Response:
    """One HTTP call over a unix socket."""
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=20) as client:
        return await client.request(method, f"http://local{target}", json=body)


async def stream_words(
    base: str, prompt: str, n: int, headers: dict[str, str] | None = None
) -> tuple[list[str], list[dict[str, Any]], bool]:
    """One streamed completion: its words, the error events in it, and whether it ended with [DONE]."""
    words: list[str] = []
    errors: list[dict[str, Any]] = []
    done = False
    body = {"prompt": prompt, "max_tokens": n, "stream": True}
    async with (
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client,
        client.stream("POST", f"{base}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        try:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        errors.append(event["error"])
                    else:
                        words.extend(choice["text"] for choice in event["choices"])
        except httpx.RemoteProtocolError:
            pass  # the end of an answer that was cut with an error
    return [word for word in words if word], errors, done


def expected(prompt: str, n: int) -> str:
    """What the simulated engine answers."""
    return tokens.answer_text(prompt, n)


def kill_marked(marker: str) -> None:
    """Ends what a test has left."""
    for pid in marked(marker):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class RunningAgent:
    """One real agent process. `start` may be called again after `kill`: it finds its folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.data_dir = folder / "data"
        self.folder = folder
        self.address = address
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def marker(self) -> str:
        """What marks this agent's processes."""
        from nodeagent.runtime import marker_of

        return marker_of(self.data_dir)

    def start(self, *flags: str, gpus: int = 4) -> "RunningAgent":
        """Starts it with simulated GPUs and fast loops."""
        self.data_dir.mkdir(exist_ok=True)
        (self.data_dir / "nodeagent.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "nodeagent", "--data-dir", str(self.data_dir), "--gpus", str(gpus)]
        command += ["--runtime-dir", str(self.folder / "run"), "--controlplane", self.address]
        command += ["--heartbeat-interval-s", "0.2", "--probe-interval-s", "0.2", "--reconnect-max-s", "0.3", *flags]
        with open(self.folder / "agent.log", "ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        return self

    async def up(self) -> "RunningAgent":
        """Waits for the discovery file."""
        assert self.process is not None
        process = self.process
        await eventually(lambda: (self.data_dir / "nodeagent.json").exists() or process.poll() is not None)
        assert process.poll() is None, self.log
        return self

    @property
    def log(self) -> str:
        """All that it has logged."""
        return (self.folder / "agent.log").read_text()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def exited(self) -> int:
        """Waits for its end; the exit code."""
        assert self.process is not None
        process = self.process
        await eventually(lambda: process.poll() is not None, 30)
        return int(process.returncode)

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
