"""Real engine processes for tests, and a plain client that reads event streams."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nodeagent.engines.adapter import EngineAdapter, EngineCommand, EngineLaunch
from nodeagent.engines.http import EngineHttp
from springtide.dataplane.messages import UnixAddress, parse_address


@dataclass
class Engine:
    """One started engine: its process (in a group of its own), command, adapter and client."""

    adapter: EngineAdapter
    launch: EngineLaunch
    command: EngineCommand
    process: "subprocess.Popen[bytes]"
    http: EngineHttp
    log: Path

    async def until_ready(self, bound_s: float = 30.0) -> None:
        """Wait until the adapter calls it ready; AssertionError with its log otherwise."""

        async def ready() -> bool:
            assert self.process.poll() is None, f"engine left with {self.process.returncode}: {self.log.read_text()}"
            return (await self.adapter.ready(self.http)).ready

        await eventually(ready, bound_s, self.log.read_text)

    @property
    def socket(self) -> Path:
        """Its unix socket."""
        return Path(self.launch.uds_path)

    def stop(self) -> None:
        """Kill its whole group and reap it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@dataclass
class Streamed:
    """An event stream as it came. `ended`: "done" ([DONE]), "closed" (without it), "refused" (no 200)."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    body: bytes = b""
    ended: str = "closed"

    @property
    def text(self) -> str:
        """All text of all chunks, completion or chat."""
        choices = [event["choices"][0] for event in self.events if event.get("choices")]
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
        )

    @property
    def finish_reason(self) -> str | None:
        """Of the last chunk that names one."""
        reasons = [event["choices"][0]["finish_reason"] for event in self.events if event.get("choices")]
        return next((reason for reason in reversed(reasons) if reason), None)


def start(adapter: EngineAdapter, launch: EngineLaunch, folder: Path) -> Engine:
    """Start an engine as the agent does: its command, its environment, a group of its own, a log file."""
    command = adapter.command(launch)
    log = folder / f"engine-{time.monotonic_ns()}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Engine(adapter, launch, command, process, EngineHttp(command.endpoint), log)


async def eventually(condition: Callable[[], Any], bound_s: float = 15.0, detail: Callable[[], str] = str) -> Any:
    """The first true value of a condition (plain or awaitable); AssertionError when the bound passes first."""
    end = time.monotonic() + bound_s
    while True:
        value = condition()
        value = await value if asyncio.iscoroutine(value) else value
        if value:
            return value
        assert time.monotonic() < end, f"not within {bound_s} s. {detail()}"
        await asyncio.sleep(0.02)


class Stream:
    """One POST, read event by event. Close it early to leave as a client does."""

    def __init__(self, endpoint: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._endpoint = endpoint
        self._path = path
        self._body = orjson.dumps(body)
        self._headers = headers or {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._events: list[dict[str, Any]] = []
        self._buffer = b""
        self.seen = Streamed()

    async def open(self) -> "Stream":
        """Send the request and read the head."""
        address = parse_address(self._endpoint)
        if isinstance(address, UnixAddress):
            self._reader, self._writer = await asyncio.open_unix_connection(address.path)
        else:
            self._reader, self._writer = await asyncio.open_connection(address.host, address.port)
        extra = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        extra += f"content-type: application/json\r\ncontent-length: {len(self._body)}\r\n"
        head = f"POST {self._path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{extra}\r\n"
        self._writer.write(head.encode() + self._body)
        raw = await self._reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        self.seen.status = int(lines[0].split()[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.seen.headers = {name.lower(): value.strip() for name, _, value in pairs}
        return self

    async def next(self) -> dict[str, Any] | None:
        """The next event; None at the end, however it came."""
        assert self._reader is not None
        while True:
            event, found, rest = self._buffer.partition(b"\n\n")
            if found:
                self._buffer = rest
                line = next((part for part in event.split(b"\n") if part.startswith(b"data: ")), b"")
                if line == b"data: [DONE]":
                    self.seen.ended = "done"
                    return None
                if line:
                    self.seen.events.append(json.loads(line[6:]))
                    return self.seen.events[-1]
                continue
            try:
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                data = await self._reader.readexactly(size + 2)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            if size == 0:
                return None
            self._buffer += data[:-2]

    async def finish(self) -> Streamed:
        """Read to the end and close."""
        assert self._reader is not None
        if "text/event-stream" in self.seen.headers.get("content-type", ""):
            while await self.next() is not None:
                pass
        else:
            try:
                self.seen.body = await self._reader.readexactly(int(self.seen.headers.get("content-length", "0")))
                self.seen.ended = "done" if self.seen.status == 200 else "refused"
            except asyncio.IncompleteReadError as error:
                self.seen.body = error.partial
        self.close()
        return self.seen

    def close(self) -> None:
        """Leave."""
        if self._writer is not None:
            self._writer.close()


async def stream(
    endpoint: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, bound_s: float = 30.0
) -> Streamed:
    """A whole POST and its answer; a broken connection shows as `ended == "closed"` with status 0."""
    request = Stream(endpoint, path, body, headers)
    async with asyncio.timeout(bound_s):
        try:
            await request.open()
        except (ConnectionError, asyncio.IncompleteReadError):
            return request.seen
        return await request.finish()


def short_folder() -> Path:
    """A new folder whose path leaves room for socket names."""
    return Path(tempfile.mkdtemp(prefix="ste-", dir="/tmp"))
