"""The load client of native/load.c in Python: same arguments, same line of JSON; no gRPC."""

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path
from statistics import quantiles
from typing import cast

import uvloop

from bench.machine import cpu_split_s, rss_kb

PATIENCE_S = 30.0


class Load:
    """What all connections count."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.single = arguments.mode == "short"
        self.turns = arguments.mode != "hold"
        self.think_s = arguments.think_ms / 1000
        body = Path(arguments.body).read_bytes()
        self.request = (
            f"POST {arguments.path} HTTP/1.1\r\nhost: {arguments.host}:{arguments.port}\r\nuser-agent: bench\r\n"
            f"accept: */*\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.measuring = False
        self.firsts = self.tokens = self.finished = self.errors = 0
        self.error = ""
        self.ttft_us: list[float] = []
        self.latency_us: list[float] = []

    def failed(self, what: str) -> None:
        """Counts an error; the first one is told."""
        self.errors += 1
        self.error = self.error or what


class Connection(asyncio.Protocol):
    """One slot."""

    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self._load = load
        self._head = b""
        self._need: int | None = None
        self._in_body = self._waiting = self._ever = self._over = False
        self._tail = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self) -> None:
        """Sends the request."""
        self._in_body, self._waiting, self._tail = False, True, b""
        self._sent_at = time.monotonic()
        self.transport.write(self._load.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over:
            self._load.failed(f"connection lost: {exc or 'end of file'}")

    def close(self) -> None:
        """The run is over."""
        self._over = True
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        load = self._load
        if not self._in_body:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head, data, self._head = self._head[:end].lower(), self._head[end:], b""
            if not head.startswith(b"http/1.1 200"):
                load.failed(f"answer: {(head + data)[:300]!r}")
                self.close()
                return
            at = head.find(b"\ncontent-length:")
            self._need = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else None
            self._in_body = True
            if not data:
                return
        now = time.monotonic_ns()
        if self._waiting:
            self._waiting = False
            load.firsts += not self._ever
            self._ever = True
            if load.measuring:
                load.ttft_us.append((now / 1e9 - self._sent_at) * 1e6)
        if load.measuring and not load.single:
            load.tokens += data.count(b"\n\n")
            at = data.find(b" t0")
            if at >= 0 and len(data) >= at + 18:
                load.latency_us.append((now - int(data[at + 2 : at + 18], 16)) / 1e3)
        if self._need is None:
            self._tail = (self._tail + data)[-5:]
            done = self._tail == b"0\r\n\r\n"
        else:
            self._need -= len(data)
            done = self._need <= 0
        if done:
            load.finished += load.measuring
            if not load.turns:
                load.failed("a stream ended that should go on")
            elif load.think_s:
                asyncio.get_running_loop().call_later(load.think_s / 2, self.ask)
            else:
                self.ask()


def percentiles(values: list[float]) -> dict[str, float] | None:
    """As the native client prints them."""
    if len(values) < 2:
        return None
    cuts = quantiles(values, n=100)
    return {"n": len(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The whole run; the result."""
    loop, load = asyncio.get_running_loop(), Load(arguments)
    pids = [(name, int(pid)) for name, pid in (item.split("=") for item in arguments.pid)]
    before_kb = {pid: rss_kb(pid) for _, pid in pids}
    connections = []
    for _ in range(arguments.conns):
        _, connection = await loop.create_connection(lambda: Connection(load), arguments.host, arguments.port)
        connection.ask()
        connections.append(connection)
        await asyncio.sleep(arguments.ramp / arguments.conns)
    end = loop.time() + PATIENCE_S
    while load.firsts < arguments.conns and loop.time() < end and not load.errors:
        await asyncio.sleep(0.01)
    silent = arguments.conns - load.firsts
    await asyncio.sleep(arguments.warm)
    cpu = {pid: cpu_split_s(pid) for _, pid in pids}
    mine = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    load.measuring, began = True, time.monotonic()
    await asyncio.sleep(arguments.seconds)
    window_s, load.measuring = time.monotonic() - began, False
    shares = []
    for name, pid in pids:
        user_s, sys_s = (after - before for after, before in zip(cpu_split_s(pid), cpu[pid], strict=True))
        shares.append(
            {
                "name": name,
                "pid": pid,
                "user_s": round(user_s, 2),
                "sys_s": round(sys_s, 2),
                "rss_before_kb": before_kb[pid],
                "rss_kb": rss_kb(pid),
            }
        )
    mine = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - mine
    for connection in connections:
        connection.close()
    return {
        "mode": arguments.mode,
        "slots": arguments.conns,
        "window_s": window_s,
        "tokens": load.tokens,
        "finished": load.finished,
        "errors": load.errors,
        "silent": silent,
        "cpu": shares,
        "load_cpu_s": mine,
        "ttft_us": percentiles(load.ttft_us),
        "latency_us": percentiles(load.latency_us),
        "error": load.error,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("--mode", "--path", "--body"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--conns", "--streams"):
        parser.add_argument(name, type=int, default=1)
    for name in ("--ramp", "--warm", "--seconds", "--think-ms"):
        parser.add_argument(name, type=float, default=0.0)
    parser.add_argument("--pid", action="append", default=[])
    print(json.dumps(uvloop.run(run(parser.parse_args()))))
