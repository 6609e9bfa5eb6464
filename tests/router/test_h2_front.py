"""What our own HTTP/2 front of Generate has to prove: stock clients, hostile messages, TLS, back-pressure, its end."""

import asyncio
import gzip
import ssl
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import orjson
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engines.sim.tokens import answer_text
from router.generation import Progress
from router.h2 import wire
from router.h2.messages import Messages
from springtide.dataplane import ShapeError
from springtide.dataplane.events import event_data, split_events
from springtide.errors import InvalidArgument, Unavailable
from springtide.http2 import frames
from springtide.http2.headers import Headers
from springtide.rpc import ChannelSecurity, Security, channel, decoded_errors
from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.dataplane.fakes import SSE_HEAD, Peer, chunk, says, until, upstream
from tests.http2.fakes import Client, client
from tests.router.fakes import Router, generation_stub, router, sim_engine, table, worker
from tests.router.test_grpc_front import ANSWER, PROMPT, generate, text_of, token

PEMS = Path(__file__).parent.parent / "rpc"
METHOD = "/springtide.v1.GenerationService/Generate"
HEADERS: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", METHOD.encode()),
    (b":authority", b"t"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]
FRAMED = wire.frame_message(PROMPT.SerializeToString())


def port_of(r: Router) -> int:
    return int(r.grpc_address.rpartition(":")[2])


def ask(i: int, tokens: int = 40) -> pb.GenerateRequest:
    return pb.GenerateRequest(pool="p", prompt=f"tide {i}", sampling=pb.Sampling(max_tokens=tokens))


def with_(*changes: tuple[bytes, bytes], without: tuple[bytes, ...] = ()) -> Headers:
    names = {name for name, _ in changes} | set(without)
    return sorted([*[h for h in HEADERS if h[0] not in names], *changes], key=lambda h: h[0][:1] != b":")


async def raw(c: Client, stream: int, body: bytes, fields: Headers = HEADERS) -> tuple[dict[bytes, bytes], bytes]:
    """Trailers and body of one call."""
    c.request(stream, fields, end=False)
    c.data(stream, body, end=True)
    head, answer, trailers = await c.answer(stream)
    return {**dict(head), **dict(trailers)}, answer


# ------------------------------------------------------------ stock clients


async def test_twenty_parallel_streams_of_an_asyncio_client(tmp_path: Path) -> None:
    """RT1: one channel, one connection."""
    async with sim_engine(tmp_path) as (port, _), router(table(worker("a", port))) as r:
        async with generation_stub(r.grpc_address) as stub:

            async def one(i: int) -> str:
                return text_of([x async for x in stub.Generate(ask(i))])

            assert await asyncio.gather(*[one(i) for i in range(20)]) == [
                answer_text(f"tide {i}", 40) for i in range(20)
            ]
        assert r.in_flight == 0


async def test_twenty_parallel_streams_of_a_blocking_client(tmp_path: Path) -> None:
    """RT1: threads share one channel."""
    found: dict[int, str] = {}

    def run(address: str) -> None:
        with grpc.insecure_channel(address) as ch:
            stub: Any = GenerationServiceStub(ch)  # type: ignore[arg-type]  # the stubs know the asyncio channel only

            def one(i: int) -> None:
                found[i] = text_of(list(stub.Generate(ask(i))))

            threads = [threading.Thread(target=one, args=(i,)) for i in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    async with sim_engine(tmp_path) as (port, _), router(table(worker("a", port))) as r:
        await asyncio.to_thread(run, r.grpc_address)
        assert found == {i: answer_text(f"tide {i}", 40) for i in range(20)}
        assert r.in_flight == 0


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests(compression: grpc.Compression) -> None:
    async with upstream(says(ANSWER)) as up, router(table(worker("a", up.port))) as r:
        async with grpc.aio.insecure_channel(r.grpc_address, compression=compression) as ch:
            long = pb.GenerateRequest(pool="p", prompt="x" * 10_000)
            assert text_of([x async for x in GenerationServiceStub(ch).Generate(long)]) == "ab"
        assert b"x" * 10_000 in up.requests[0].body


async def test_long_prompts_up_to_the_bound() -> None:
    async with upstream(says(ANSWER)) as up, router(table(worker("a", up.port))) as r:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(r.grpc_address, options=options) as ch:
            stub = GenerationServiceStub(ch)
            prompt = "y" * (16 * 1024 * 1024 - 100)
            assert text_of([x async for x in stub.Generate(pb.GenerateRequest(pool="p", prompt=prompt))]) == "ab"
            assert prompt.encode() in up.requests[0].body
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Generate(pb.GenerateRequest(pool="p", prompt=prompt + "z" * 200)).read()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_reflection_and_channelz_answer_on_the_same_connection() -> None:
    """CP21"""
    async with (
        upstream(says(ANSWER)) as up,
        router(table(worker("a", up.port))) as r,
        grpc.aio.insecure_channel(r.grpc_address) as ch,
    ):
        text_of([x async for x in GenerationServiceStub(ch).Generate(PROMPT)])
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="springtide.v1.GenerationService")
        reflection = reflection_pb2_grpc.ServerReflectionStub(ch).ServerReflectionInfo(iter([request]))
        [answer] = [x async for x in reflection]
        assert b"Generate" in answer.file_descriptor_response.file_descriptor_proto[0]
        servers = await channelz_pb2_grpc.ChannelzStub(ch).GetServers(channelz_pb2.GetServersRequest())
        assert servers.server
        nope: Any = ch.unary_unary("/springtide.v1.GenerationService/Nope")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await nope(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        text_of([x async for x in GenerationServiceStub(ch).Generate(PROMPT)])


async def test_errors_carry_their_details() -> None:
    async with router(table()) as r, generation_stub(r.grpc_address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(pb.GenerateRequest(prompt="x")).read()
        trailers = dict(error.value.trailing_metadata() or ())
        raw_status = trailers["grpc-status-details-bin"]
        assert isinstance(raw_status, bytes)
        status = status_pb2.Status.FromString(raw_status)
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.domain, info.metadata["field"]) == ("springtide", "pool")
        assert status.message == error.value.details()


async def test_an_endless_message_of_an_engine_fits_into_the_trailers() -> None:
    for text in ("no " * 5000, "ü%" * 4000):
        body = b'{"error":{"message":"%b"}}' % text.encode()
        answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        async with upstream(says(answer)) as up, router(table(worker("a", up.port))) as r:
            with pytest.raises(InvalidArgument, match="the engine refused it"):
                await generate(r.grpc_address)


# ------------------------------------------------------------ TLS


@asynccontextmanager
async def secured(tmp_path: Path, up_port: int, client_ca: bool = False) -> AsyncIterator[Router]:
    (tmp_path / "tokens").write_text("first\nsecond\n")
    security = Security(
        tls_cert=str(PEMS / "localhost.pem"),
        tls_key=str(PEMS / "localhost-key.pem"),
        tls_client_ca=str(PEMS / "localhost.pem") if client_ca else "",
        token_file="" if client_ca else str(tmp_path / "tokens"),
    )
    async with router(table(worker("a", up_port)), security=security) as r:
        yield r


async def test_tls_with_tokens(tmp_path: Path) -> None:
    ca = str(PEMS / "localhost.pem")
    async with upstream(says(ANSWER)) as up, secured(tmp_path, up.port) as r:
        address = f"localhost:{port_of(r)}"
        async with channel(address, ChannelSecurity(tls_ca=ca, token="second")) as ch:
            stub = GenerationServiceStub(ch)
            for _ in range(2):
                assert text_of([x async for x in stub.Generate(PROMPT)]) == "ab"
            assert (await stub.ListModels(pb.ListModelsRequest())).models
        for wrong in ("", "third"):
            async with channel(address, ChannelSecurity(tls_ca=ca, token=wrong)) as ch:
                stub = GenerationServiceStub(ch)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.Generate(PROMPT).read()
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.ListModels(pb.ListModelsRequest())
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(up.requests) == 2


async def test_mutual_tls(tmp_path: Path) -> None:
    ca, key = str(PEMS / "localhost.pem"), str(PEMS / "localhost-key.pem")
    async with upstream(says(ANSWER)) as up, secured(tmp_path, up.port, client_ca=True) as r:
        address = f"localhost:{port_of(r)}"
        async with channel(address, ChannelSecurity(tls_ca=ca, tls_cert=ca, tls_key=key)) as ch:
            assert text_of([x async for x in GenerationServiceStub(ch).Generate(PROMPT)]) == "ab"
        async with channel(address, ChannelSecurity(tls_ca=ca)) as ch:
            with pytest.raises(Unavailable), decoded_errors("router", address):
                await GenerationServiceStub(ch).Generate(PROMPT, timeout=5).read()


async def test_only_h2_is_agreed_on(tmp_path: Path) -> None:
    async with upstream(says(ANSWER)) as up, secured(tmp_path, up.port) as r:
        context = ssl.create_default_context(cafile=str(PEMS / "localhost.pem"))
        context.set_alpn_protocols(["http/1.1", "h2"])
        _, writer = await asyncio.open_connection("localhost", port_of(r), ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()


# ------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (with_((b":method", b"GET")), b"405"),
        (with_((b"content-type", b"application/json")), b"415"),
        (with_(without=(b"content-type",)), b"415"),
        (with_((b"content-type", b"application/grpc-web")), b"415"),
    ],
)
async def test_what_is_no_grpc_call(fields: Headers, status: bytes) -> None:
    async with router(table()) as r, client(port_of(r)) as c:
        c.request(1, fields, end=True)
        head, _, _ = await c.answer(1)
        assert dict(head)[b":status"] == status


@pytest.mark.parametrize("kind", [b"application/grpc+proto", b"application/grpc; charset=utf-8", b"Application/gRPC"])
async def test_content_types_of_clients(kind: bytes) -> None:
    async with upstream(says(ANSWER)) as up, router(table(worker("a", up.port))) as r, client(port_of(r)) as c:
        trailers, body = await raw(c, 1, FRAMED, with_((b"content-type", kind)))
        assert trailers[b"grpc-status"] == b"0"
        assert body


CODES = {
    "invalid": b"3", "exhausted": b"8", "unimplemented": b"12", "internal": b"13",
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "internal"),
        (b"\0\0", "internal"),
        (FRAMED[:-1], "internal"),
        (FRAMED + b"x", "internal"),
        (FRAMED + FRAMED, "internal"),
        (wire.frame_message(b"\xff\xff"), "internal"),
        (wire.frame_message(b""), "invalid"),
        (b"\1" + FRAMED[1:], "internal"),
        (b"\7" + FRAMED[1:], "internal"),
        (b"\0\xff\xff\xff\xff", "exhausted"),
    ],
)
async def test_malformed_messages(body: bytes, code: str) -> None:
    async with upstream(says(ANSWER)) as up, router(table(worker("a", up.port))) as r, client(port_of(r)) as c:
        trailers, _ = await raw(c, 1, body)
        assert (trailers[b":status"], trailers[b"grpc-status"]) == (b"200", CODES[code])
        assert trailers[b"grpc-message"]
        trailers, _ = await raw(c, 3, FRAMED)  # the connection goes on
        assert trailers[b"grpc-status"] == b"0"
        assert len(up.requests) == 1


async def test_encodings_that_are_not_known_are_named() -> None:
    async with router(table()) as r, client(port_of(r)) as c:
        trailers, _ = await raw(c, 1, b"\1" + FRAMED[1:], with_((b"grpc-encoding", b"snappy")))
        assert trailers[b"grpc-status"] == CODES["unimplemented"]
        assert trailers[b"grpc-accept-encoding"] == b"identity,deflate,gzip"


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
async def test_compressed_bombs(pack) -> None:
    name = b"gzip" if pack is gzip.compress else b"deflate"
    bomb = wire.frame_message(pack(b"\0" * 64_000_000))
    async with router(table()) as r, client(port_of(r)) as c:
        trailers, _ = await raw(c, 1, b"", with_((b"grpc-encoding", name)))
        assert trailers[b"grpc-status"] == CODES["internal"]
        c.request(3, with_((b"grpc-encoding", name)), end=False)
        for at in range(0, len(bomb), 16000):
            piece = bomb[at : at + 16000]
            c.data(3, b"\1" + piece[1:] if at == 0 else piece, end=at + 16000 >= len(bomb))
        assert dict((await c.answer(3))[0])[b"grpc-status"] == CODES["exhausted"]
        trailers, _ = await raw(c, 5, b"\1" + wire.frame_message(b"junk")[1:], with_((b"grpc-encoding", name)))
        assert trailers[b"grpc-status"] == CODES["internal"]


async def test_requests_that_never_end_are_bounded() -> None:
    """All that is held for requests on their way, together and in time."""
    async with router(table()) as r, client(port_of(r)) as c:
        front = r.port.front
        assert front is not None
        front.max_buffered_bytes = 50_000
        for stream in (1, 3, 5, 7):
            c.request(stream, HEADERS, end=False)
            c.data(stream, b"\0\0\1\0\0" + b"x" * 15_000)
        head, _, _ = await c.answer(7)
        assert dict(head)[b"grpc-status"] == CODES["exhausted"]
        await until(lambda: front.buffered == 3 * 15_005)
        c.send(frames.reset_frame(1, 8), frames.reset_frame(3, 8), frames.reset_frame(5, 8))
        await until(lambda: front.buffered == 0)
        assert not front.relay.connections


# ------------------------------------------------------------ running calls


async def test_a_slow_reader_holds_back_the_engine() -> None:
    """RT9: bounded memory, nothing lost."""
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.send(SSE_HEAD)
        for i in range(4000):
            await peer.send(chunk(token("x" * 5000 + str(i % 10))))
            sent += 1
        await peer.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with upstream(script) as up, router(table(worker("a", up.port))) as r, client(port_of(r)) as c:
        c.request(1, HEADERS, end=False)
        c.data(1, FRAMED, end=True)
        front = r.port.front
        assert front is not None
        await until(lambda: front.relay.exchanges and front.server.streams and sent > 0)
        before = -1
        while before != sent:  # until the sender is held back for good
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 4000
        [connection] = front.server.connections
        assert sum(s.pending_bytes for s in connection.backlog) < 1_500_000
        c.send(frames.window_frame(0, 2**30), frames.window_frame(1, 2**30))
        _, body, trailers = await c.answer(1)
        assert dict(trailers)[b"grpc-status"] == b"0"
        messages = [x async for x in unframed(body)]
        assert "".join(m.tokens.text[-1:] for m in messages if m.HasField("tokens")) == "0123456789" * 400
        assert messages[-1].HasField("finished")


async def unframed(body: bytes) -> AsyncIterator[pb.GenerateResponse]:
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at + 1 : at + 5], "big")
        yield pb.GenerateResponse.FromString(body[at + 5 : at + 5 + size])
        at += 5 + size


async def test_a_connection_that_breaks_cuts_all_its_engines() -> None:
    """RT8"""
    cut = 0

    async def script(peer: Peer) -> None:
        nonlocal cut
        await peer.send(SSE_HEAD + chunk(token("a")))
        await peer.closed()
        cut += 1

    async with upstream(script) as up, router(table(worker("a", up.port))) as r:
        async with client(port_of(r)) as c:
            for stream in range(1, 21, 2):
                c.request(stream, HEADERS, end=False)
                c.data(stream, FRAMED, end=True)
            await until(lambda: len(up.requests) == 10)
            await c.next(frames.DATA)
        await until(lambda: cut == 10, 1.0)
        assert r.in_flight == 0


async def test_running_calls_finish_and_the_rest_is_told() -> None:
    gate = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(token("a")))
        await gate.wait()
        await peer.send(chunk(token("b", '"stop"')) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def hang(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(token("a")))
        await peer.closed()

    async with upstream(script, hang) as up, router(table(worker("a", up.port))) as r:
        async with generation_stub(r.grpc_address) as stub:
            call: Any = stub.Generate(PROMPT)
            assert (await call.read()).HasField("started")
            hanging: Any = stub.Generate(PROMPT)
            assert (await hanging.read()).HasField("started")
            front = r.port.front
            assert front is not None
            closing = asyncio.create_task(front.close(1.0))
            gate.set()
            kinds = [response.WhichOneof("event") for response in await rest_of(call)]
            assert kinds == ["tokens", "tokens", "finished"]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rest_of(hanging)
            assert error.value.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
            await closing
        assert r.in_flight == 0


async def rest_of(call: Any) -> list[pb.GenerateResponse]:
    found = []
    while (response := await call.read()) is not grpc.aio.EOF:
        found.append(response)
    return found


async def test_deadlines_are_kept_by_the_router_itself() -> None:
    """RT8: also for a client that does not look at the clock."""
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(token("a")))
        await peer.closed()
        cut.set()

    async with upstream(script) as up, router(table(worker("a", up.port))) as r, client(port_of(r)) as c:
        trailers, body = await raw(c, 1, FRAMED, with_((b"grpc-timeout", b"200m")))
        assert trailers[b"grpc-status"] == b"4"
        assert body
        await asyncio.wait_for(cut.wait(), 1.0)
        assert r.in_flight == 0
    async with router(table()) as r, client(port_of(r)) as c:
        trailers, body = await raw(c, 1, FRAMED, with_((b"grpc-timeout", b"50m")))
        assert (trailers[b"grpc-status"], body) == (b"4", b"")
        assert r.dispatcher.admission.waiting("p") == 0


# ------------------------------------------------------------ bytes


@pytest.mark.parametrize("text", ["", "a", "x" * 125, "x" * 126, "x" * 127, "ü" * 62, "ü" * 63, "y" * 20_000, "€\0"])
@pytest.mark.parametrize("ids", [[], [0], [1, 127, 128, 16384, 2**31 - 1], [-1, -(2**31)]])
def test_tokens_are_encoded_as_protobuf_does(text: str, ids: list[int]) -> None:
    expected = pb.GenerateResponse(tokens=pb.Tokens(text=text, token_ids=ids)).SerializeToString()
    assert wire.tokens_message(text, ids) == wire.frame_message(expected)


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], ["a"]])
def test_token_ids_that_are_none(ids: list[int]) -> None:
    with pytest.raises((ValueError, TypeError)):
        wire.tokens_message("a", ids)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"1S", 1.0), (b"20m", 0.02), (b"99999999H", 99999999 * 3600.0), (b"5u", 5e-6), (b"7n", 7e-9), (b"2M", 120.0),
     (b"", None), (b"S", None), (b"123456789S", None), (b"1s", None), (b"-1S", None), (b"1.5S", None)],
)  # fmt: skip
def test_timeouts(value: bytes, expected: float | None) -> None:
    found = wire.timeout_s(value)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    "events", [b"data: what?\n\n", b"data: [1]\n\n", b'data: {"choices": 3}\n\n', b'data: {"choices": [3]}\n\n']
)
def test_events_that_are_none(events: bytes) -> None:
    with pytest.raises(ShapeError):
        Messages(chat=False).attempt(pb.Started, None).feed(events)


def test_events_however_they_are_joined() -> None:
    events = (
        token("a")
        + b": comment\n\n"
        + token("b").replace(b"\n\n", b"\r\n\r\n")
        + token("c", '"stop"')
        + b"data: [DONE]\n\n"
    )
    shaper = Messages(chat=False).attempt(pb.Started, None)
    assert Progress(chat=False).read(b'{"choices": []}') is None
    joined = shaper.feed(events)
    kinds = []
    at = 0
    while at < len(joined):
        size = int.from_bytes(joined[at + 1 : at + 5], "big")
        kinds.append(pb.GenerateResponse.FromString(joined[at + 5 : at + 5 + size]).WhichOneof("event"))
        at += 5 + size
    assert kinds == ["started", "tokens", "tokens", "tokens", "finished"]


_hard = ['"text":"x"', '"content":"', '","finish_reason":null', "ü" * 70, "x" * 125, "x" * 126, "\\", "\n\n", ""]
_texts = st.one_of(st.text(max_size=8), st.sampled_from(_hard))


@st.composite
def engine_events(draw: st.DrawFn, chat: bool) -> bytes:
    """Events as engines write them, and unusual ones."""
    text, finish = draw(_texts), draw(st.sampled_from([None, None, None, "stop", ""]))
    part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    if chat and draw(st.booleans()):
        part["delta"]["reasoning_content"] = draw(_texts)
    choice: dict[str, Any] = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
    if draw(st.booleans()):
        choice["token_ids"] = draw(st.lists(st.integers(0, 200_000), max_size=3))
    event: dict[str, Any] = {"id": draw(_texts), "choices": [choice] * draw(st.sampled_from([1, 1, 1, 0, 2]))}
    if draw(st.booleans()):
        event["usage"] = draw(st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 4}]))
    border = draw(st.sampled_from([b"\n\n", b"\n\n", b"\r\n\r\n"]))
    return b"data: " + orjson.dumps(event) + border


@settings(max_examples=300, deadline=None)
@given(chat=st.booleans(), data=st.data())
def test_unparsed_events_give_what_parsed_ones_give(chat: bool, data: st.DataObject) -> None:
    reads = data.draw(st.lists(st.lists(engine_events(chat), min_size=1, max_size=4).map(b"".join), max_size=5))
    reads.append(b"data: [DONE]\n\n")
    shaper, progress = Messages(chat).attempt(pb.Started, None), Progress(chat)
    expected = [pb.GenerateResponse(started=pb.Started())]
    for read in reads[:-1]:
        for event in split_events(read):
            tokens = progress.read(event_data(event))
            if tokens is not None:
                expected.append(pb.GenerateResponse(tokens=tokens))
    expected.append(pb.GenerateResponse(finished=progress.finished()))
    found = b"".join(shaper.feed(read) for read in reads)
    assert found == b"".join(wire.frame_message(message.SerializeToString()) for message in expected)


@settings(max_examples=200, deadline=None)
@given(chat=st.booleans(), texts=st.lists(_texts, min_size=1, max_size=8), odd=st.integers(0, 7))
def test_events_that_differ_in_their_text_alone(chat: bool, texts: list[str], odd: int) -> None:
    """What surrounds the text of one event is looked for around the next: the messages are those of parsed events."""
    shaper, progress = Messages(chat).attempt(pb.Started, None), Progress(chat)
    reads = []
    for number, text in enumerate(texts):
        part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        choice = {"index": 0, **part, "finish_reason": "stop" if number == odd else None}
        event = {"id": "cmpl-1", "choices": [choice], "note": text if number % 3 == 2 else ""}
        reads.append(b"data: " + orjson.dumps(event) + b"\n\n")
    expected = [pb.GenerateResponse(started=pb.Started())]
    for read in reads:
        tokens = progress.read(event_data(read))
        if tokens is not None:
            expected.append(pb.GenerateResponse(tokens=tokens))
    expected.append(pb.GenerateResponse(finished=progress.finished()))
    found = b"".join(shaper.feed(read) for read in (*reads, b"data: [DONE]\n\n"))
    assert found == b"".join(wire.frame_message(message.SerializeToString()) for message in expected)


async def test_health_says_so_at_once_when_the_router_stops() -> None:
    """A watcher of health does not keep the router from ending, a running call does."""
    gate = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(token("a")))
        await gate.wait()
        await peer.send(chunk(token("b", '"stop"')) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with upstream(script) as up, router(table(worker("a", up.port))) as r:
        await r.port.server.set_all_serving(True)
        async with grpc.aio.insecure_channel(r.grpc_address) as ch:
            call: Any = GenerationServiceStub(ch).Generate(PROMPT)
            await call.read()
            watch: Any = health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.create_task(r.port.stop(20.0))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            gate.set()
            assert (await rest_of(call))[-1].HasField("finished")
            assert r.port.front is not None
            await until(lambda: not r.port.front.server.connections)  # type: ignore[union-attr]
            await asyncio.wait_for(stopping, 10)
