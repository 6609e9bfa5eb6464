"""A router over simulated engines in this very process, and blades between them that cut streams where a test says.

A blade is a TCP relay in front of an engine: to the router it is a worker. For each token request it asks the test for
a `Cut`: after how many events of the answer, and how, the stream is lost.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from nodeagent.engines.sim.app import App
from nodeagent.engines.sim.engine import SimEngine
from nodeagent.engines.sim.options import parse_options
from nodeagent.engines.sim.protocol import Connection
from router.config import Timeouts
from router.grpc_port import GrpcPort
from router.http_front import HttpFront
from router.upstream import Continuing, Dispatcher
from springtide.dataplane import Limits, RelayServer
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingTable
from springtide.rpc import Security
from tests.dataplane.fakes import client, dechunk, post

ERROR = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","param":null,"code":500}}\n\n'
DRAINED = b'data: {"error":{"message":"deadline","type":"worker_drained","param":null,"code":503}}\n\n'
CLIENTS = b'data: {"error":{"message":"too long after all","type":"BadRequestError","code":400}}\n\n'
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CUTS = ("close", "reset", "half", "error", "drained", "stall")


@dataclass(frozen=True, slots=True)
class Cut:
    """`after` events of the answer (0: before the first) the stream is lost, by one of CUTS."""

    after: int
    how: str = "close"


Plan = Callable[[bytes], Cut | None]


class Blade:
    """One worker: relays to an engine, and cuts."""

    def __init__(self, engine_port: int, plan: Plan) -> None:
        self.engine_port = engine_port
        self.plan = plan
        self.port = 0
        self.cuts = 0
        self.forget_ids = False
        self.hold: asyncio.Event | None = None
        """Answers to other requests than those for tokens wait for it."""
        self.held = 0
        self.asked: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request after another."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        engine_writer: asyncio.StreamWriter | None = None
        try:
            engine, engine_writer = await asyncio.open_connection("127.0.0.1", self.engine_port)
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0
                )
                body = await reader.readexactly(length)
                if self.forget_ids:
                    body = body.replace(b'"return_token_ids":true', b'"return_token_idz":true')
                engine_writer.write(head + body)
                tokens = head.startswith((b"POST /v1/chat", b"POST /v1/completions"))
                if tokens:
                    self.asked.append(body)
                cut = self.plan(body) if tokens else None
                if self.hold is not None and not tokens:
                    self.held += 1
                    await self.hold.wait()
                if not await self._answer(engine, reader, writer, cut):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for side in (writer, engine_writer):
                if side is not None:
                    side.close()

    async def _answer(
        self, engine: asyncio.StreamReader, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: Cut | None
    ) -> bool:
        head = await engine.readuntil(b"\r\n\r\n")
        if b"chunked" not in head.lower():
            length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if b"content-length" in x)
            writer.write(head + await engine.readexactly(length))
            return True
        writer.write(head)
        seen = 0
        while True:
            line = await engine.readuntil(b"\r\n")
            size = int(line, 16)
            payload = (await engine.readexactly(size + 2))[:-2]
            if not size:
                writer.write(b"0\r\n\r\n")
                return True
            events = [event + b"\n\n" for event in payload.split(b"\n\n")[:-1]]
            if cut is not None and seen + len(events) > cut.after:
                self._send(writer, b"".join(events[: cut.after - seen]))
                await self._lose(reader, writer, cut.how, events[cut.after - seen])
                return False
            seen += len(events)
            self._send(writer, payload)

    async def _lose(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str, following: bytes
    ) -> None:
        self.cuts += 1
        if how == "half":
            self._send(writer, following[: len(following) // 2])
        elif how == "error":
            self._send(writer, ERROR + b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        elif how == "bad request":
            self._send(writer, CLIENTS)
        elif how == "drained":
            self._send(writer, DRAINED)
        elif how == "stall":
            await reader.read()  # until the router gives up
        if how == "reset":
            await asyncio.sleep(0)
            writer.transport.abort()
        else:
            await writer.drain()

    @staticmethod
    def _send(writer: asyncio.StreamWriter, payload: bytes) -> None:
        if payload:
            writer.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class World:
    """Ports and parts of what runs."""

    http_port: int
    grpc_address: str
    dispatcher: Dispatcher
    blades: list[Blade]

    def count(self, result: str) -> float:
        """Continuations counted with a result."""
        return sum(
            sample.value
            for metric in self.dispatcher.metrics.continuations.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["result"] == result
        )

    @property
    def in_flight(self) -> int:
        return sum(seat.own for seat in self.dispatcher.admission.fleet.all())


@contextlib.asynccontextmanager
async def world(
    plan: Plan,
    *engine_args: str,
    workers: int = 12,
    continuing: Continuing | None = None,
    timeouts: Timeouts | None = None,
    engine_name: str = "sim",
    generate_front: str = "h2",
    engine_port: int = 0,
) -> AsyncIterator[World]:
    """One engine (`engine_port`: a running one) behind `workers` blades, and a router whose table they are."""
    async with contextlib.AsyncExitStack() as stack:
        if not engine_port:
            engine_port = await _sim(stack, engine_args)
        blades = [Blade(engine_port, plan) for _ in range(workers)]
        for blade in blades:
            front = await asyncio.start_server(blade.serve, "127.0.0.1", 0, limit=4 * 1024 * 1024)
            blade.port = front.sockets[0].getsockname()[1]
            stack.push_async_callback(blade.close)
            stack.callback(front.close)
        dispatcher = Dispatcher(timeouts or Timeouts(), 20, continuing=continuing or Continuing(max_continuations=100))
        pool = RoutedPool("p", "m", max_waiting=1000, waiting_timeout_s=20.0, max_workers=workers, engine=engine_name)
        table = {
            f"w{number}": RoutedWorker(f"w{number}", "p", 1, f"127.0.0.1:{blade.port}")
            for number, blade in enumerate(blades)
        }
        dispatcher.snapshot(RoutingTable("s", 1, {"p": pool}, table))
        relay = RelayServer(HttpFront(dispatcher))
        dispatcher.pools.append(relay.pool)
        http_port = await relay.start("127.0.0.1", 0)
        grpc_port = GrpcPort(dispatcher, Limits(), Security(), generate_front)
        address = grpc_port.listen("127.0.0.1:0")
        await grpc_port.start()
        try:
            yield World(http_port, address, dispatcher, blades)
        finally:
            await grpc_port.stop(0)
            grpc_port.close()
            await relay.close()
            dispatcher.close()


async def _sim(stack: contextlib.AsyncExitStack, arguments: tuple[str, ...]) -> int:
    loop = asyncio.get_running_loop()
    options = parse_options(["--model", "m", "--startup-s", "0", "--decode-base-ms", "0.5", *arguments])
    connections: set[Connection] = set()
    app = App(SimEngine(options, loop))
    server = await loop.create_server(lambda: Connection(app, connections), "127.0.0.1", 0)

    def close() -> None:
        server.close()
        for connection in list(connections):
            connection.close()

    stack.callback(close)
    return int(server.sockets[0].getsockname()[1])


@dataclass
class Told:
    """What a client was told: all of a stream that it may rely on."""

    status: int = 0
    text: str = ""
    roles: int = 0
    finish: list[str] = field(default_factory=list)
    stop_reason: object = None
    usage: list[dict[str, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    done: bool = False
    clean: bool = False
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""


async def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    headers: bytes = b"",
    progress: Callable[[int], None] = lambda events: None,
) -> Told:
    """One streamed request over HTTP, read to its end. `progress` hears how many blank lines there have been."""
    told = Told()
    async with client(port) as c:
        fields = b"content-type: application/json\r\nconnection: close\r\n"
        c.send(post(path, json.dumps({"stream": True, **body}).encode(), fields + headers))
        raw = b""
        async with asyncio.timeout(60):
            while piece := await c.reader.read(65536):
                raw += piece
                progress(raw.count(b"\n\n"))
    head, _, rest = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    told.status = int(lines[0].split()[1])
    told.headers = dict(line.split(": ", 1) for line in lines[1:])
    if told.status != 200:
        told.error = rest.decode()
        return told
    told.raw, told.clean = dechunk(rest)
    for event in told.raw.split(b"\n\n"):
        if event.startswith(b"data: "):
            read(told, event[6:])
    return told


def read(told: Told, data: bytes) -> None:
    """Adds one event."""
    assert not told.done, "an event after [DONE]"
    if data == b"[DONE]":
        told.done = True
        return
    event = json.loads(data)
    if "error" in event:
        told.error = event["error"]["message"]
        return
    told.names.add(event["id"])
    told.kinds.add(event["object"])
    told.created.add(event["created"])
    if event.get("usage") and not event["choices"]:
        told.usage.append(event["usage"])
    for choice in event["choices"]:
        part = choice.get("delta", choice)
        told.roles += "role" in part
        told.text += part.get("content" if "delta" in choice else "text") or ""
        told.ids += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            told.finish.append(choice["finish_reason"])
            told.stop_reason = choice.get("stop_reason")


def same(disturbed: Told, undisturbed: Told) -> None:
    """The disturbed stream tells what the undisturbed one tells, once."""
    assert not disturbed.error, disturbed.error
    assert disturbed.done
    assert disturbed.clean
    assert disturbed.text == undisturbed.text
    assert disturbed.finish == undisturbed.finish
    assert disturbed.stop_reason == undisturbed.stop_reason
    assert disturbed.usage == undisturbed.usage
    assert disturbed.ids == undisturbed.ids
    assert disturbed.roles == undisturbed.roles
    assert disturbed.kinds == undisturbed.kinds
    assert len(disturbed.names) == 1
    assert len(disturbed.created) == 1
