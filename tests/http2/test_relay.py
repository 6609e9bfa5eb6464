"""Streams that are passed on to another server: grpc.aio behind a unix socket, and scripted ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from springtide.http2 import Http2Limits, Http2Server, ServerConnection, Stream, StreamHandler, StreamRelay
from springtide.http2.headers import Headers
from tests.dataplane.fakes import until


class Methods(grpc.GenericRpcHandler):
    """Bytes in, bytes out."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.received = 0

    def service(self, handler_call_details: Any) -> Any:
        kinds: dict[str, Any] = {
            "/t/Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "/t/Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "/t/Chat": grpc.stream_stream_rpc_method_handler(self.chat),
            "/t/Many": grpc.unary_stream_rpc_method_handler(self.many),
            "/t/Sum": grpc.stream_unary_rpc_method_handler(self.sum),
            "/t/Hang": grpc.unary_unary_rpc_method_handler(self.hang),
        }
        return kinds.get(handler_call_details.method)

    async def echo(self, request: bytes, context: Any) -> bytes:
        await context.send_initial_metadata((("x-head", "1"), ("x-bin", b"\0\xff")))
        context.set_trailing_metadata((("x-tail", "2"),))
        return request

    async def fail(self, request: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "so not: ü%")

    async def chat(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield b"x" * 10_000

    async def sum(self, requests: Any, context: Any) -> bytes:
        async for request in requests:
            self.received += len(request)
        return b"%d" % self.received

    async def hang(self, request: bytes, context: Any) -> bytes:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b""


@asynccontextmanager
async def relayed(folder: Path, serve: bool = True) -> AsyncIterator[tuple[Any, Methods, Http2Server]]:
    path = str(folder / "grpc")
    methods = Methods()
    behind = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    behind.add_generic_rpc_handlers((methods,))
    if serve:
        behind.add_insecure_port(f"unix:{path}")
        await behind.start()
    relays: dict[ServerConnection, StreamRelay] = {}

    def accept(stream: Stream, fields: Headers) -> StreamHandler:
        connection = stream.conn
        assert isinstance(connection, ServerConnection)
        if connection not in relays:
            relays[connection] = StreamRelay(server.joiner, path, server.limits)
        return relays[connection].accept(stream, fields)

    def gone(connection: ServerConnection) -> None:
        if relay := relays.pop(connection, None):
            relay.close()

    server = Http2Server(accept, Http2Limits(), gone)
    port = await server.start("127.0.0.1", 0)
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield channel, methods, server
    finally:
        await server.close()
        await behind.stop(0)


async def test_calls_of_every_kind(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (channel, _, server):
        call = channel.unary_unary("/t/Echo")(b"hello", metadata=(("x-mine", "1"),))
        assert await call == b"hello"
        assert dict(await call.initial_metadata())["x-head"] == "1"
        assert dict(await call.initial_metadata())["x-bin"] == b"\0\xff"
        assert dict(await call.trailing_metadata())["x-tail"] == "2"
        chat = channel.stream_stream("/t/Chat")()
        for i in range(3):
            await chat.write(b"%d" % i)
            assert await chat.read() == b"%d" % i
        await chat.done_writing()
        assert await chat.read() is grpc.aio.EOF
        assert await chat.code() is grpc.StatusCode.OK
        await until(lambda: not server.streams)


async def test_errors_pass_unchanged(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (channel, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/t/Fail")(b"")
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.DATA_LOSS, "so not: ü%")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/t/None")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_more_than_all_windows_both_ways(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (channel, methods, _):
        big = bytes(range(256)) * 40_000  # 10 MB
        assert await channel.unary_unary("/t/Echo")(big) == big
        got = [len(x) async for x in channel.unary_stream("/t/Many")(b"500")]
        assert got == [10_000] * 500

        async def requests() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b"x" * 20_000

        assert await channel.stream_unary("/t/Sum")(requests()) == b"4000000"
        assert methods.received == 4_000_000


async def test_a_slow_reader_holds_back_the_server_behind(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (channel, _, server):
        call = channel.unary_stream("/t/Many")(b"5000")  # 50 MB
        await call.read()
        await until(lambda: any(c.backlog for c in server.connections), 10)
        await asyncio.sleep(0.3)
        waiting = sum(s.pending_bytes for c in server.connections for s in c.backlog)
        assert waiting < 4_000_000
        count = 1
        while await call.read() is not grpc.aio.EOF:
            count += 1
        assert count == 5000


async def test_cancellation_and_deadlines_reach_it(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (channel, methods, server):
        call = channel.unary_unary("/t/Hang")(b"")
        await until(lambda: server.streams)
        await channel.unary_unary("/t/Echo")(b"")  # it has arrived there, too
        call.cancel()
        await until(lambda: methods.cancelled == 1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/t/Hang")(b"", timeout=0.2)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: methods.cancelled == 2)
        await until(lambda: not server.streams)


async def test_nobody_behind_is_unavailable(tmp_path: Path) -> None:
    async with relayed(tmp_path, serve=False) as (channel, _, _):
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary("/t/Echo")(b"")
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_many_at_once(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (channel, _, _):
        sent = [b"%d" % i * (i * 100) for i in range(100)]
        assert await asyncio.gather(*[channel.unary_unary("/t/Echo")(x) for x in sent]) == sent
