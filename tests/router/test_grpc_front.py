"""GenerationService (RT1, RT3, RT5, RT8, RT10; CP21)."""

import asyncio
from collections.abc import AsyncIterable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from nodeagent.engines.sim.tokens import answer_text, encode, render_chat
from springtide.errors import Conflict, Exhausted, InvalidArgument, NotFound, SpringtideError, Unavailable
from springtide.model.routing import RoutingDelta
from springtide.rpc import decoded_errors
from springtide.v1 import generation_pb2 as pb
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, Peer, Script, chunk, says, until, upstream
from tests.router.fakes import POOL, generation_stub, router, sim_engine, table, worker
from tests.router.test_http_front import REFUSAL

PROMPT = pb.GenerateRequest(pool="p", prompt="tide", sampling=pb.Sampling(max_tokens=5))


def token(text: str, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (text.encode(), finish.encode())


ANSWER = SSE_HEAD + chunk(token("a")) + chunk(token("b", '"stop"')) + chunk(DONE) + LAST


async def generate(address: str, request: pb.GenerateRequest = PROMPT) -> list[pb.GenerateResponse]:
    async with generation_stub(address) as stub:
        with decoded_errors("router", address):
            return [response async for response in stub.Generate(request)]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    assert [r.WhichOneof("event") for r in responses].count("finished") == 1
    assert responses[0].HasField("started")
    assert responses[-1].HasField("finished")
    return "".join(r.tokens.text for r in responses)


async def test_prompt_chat_and_token_ids(tmp_path: Path) -> None:
    """RT1, RT10"""
    async with sim_engine(tmp_path) as (port, _), router(table(worker("a", port, 9, weight_version="v3"))) as r:
        responses = await generate(r.grpc_address)
        assert text_of(responses) == answer_text("tide", 5)
        started, finished = responses[0].started, responses[-1].finished
        assert (started.worker_id, started.incarnation, started.attempts) == ("a", 9, 1)
        assert started.weight_version == "v3"
        assert started.request_id
        assert finished.finish_reason == "length"
        assert finished.completion_tokens == 5
        chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
        request = pb.GenerateRequest(pool="m", chat=chat, sampling=pb.Sampling(max_tokens=4), request_id="mine")
        responses = await generate(r.grpc_address, request)
        assert text_of(responses) == answer_text(render_chat([{"role": "user", "content": "hi"}]), 4)
        assert responses[0].started.request_id == "mine"
        request = pb.GenerateRequest(
            pool="p",
            token_ids=pb.TokenIds(ids=encode("flood tide")),
            sampling=pb.Sampling(max_tokens=3),
            return_token_ids=True,
        )
        responses = await generate(r.grpc_address, request)
        text_of(responses)
        assert sum(len(x.tokens.token_ids) for x in responses) == 3
        async with generation_stub(r.grpc_address) as stub:
            [model] = (await stub.ListModels(pb.ListModelsRequest())).models
            assert (model.name, model.pool, model.active_workers) == ("m", "p", 1)
        assert r.in_flight == 0


def extra(**values: object) -> pb.Sampling:
    struct = Struct()
    struct.update(values)  # type: ignore[arg-type]
    return pb.Sampling(extra=struct)


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        (pb.GenerateRequest(pool="nope", prompt="x"), NotFound, "Known: m"),
        (pb.GenerateRequest(prompt="x"), InvalidArgument, "pool"),
        (pb.GenerateRequest(pool="p"), InvalidArgument, "prompt, chat and token_ids"),
        (pb.GenerateRequest(pool="p", chat=pb.ChatInput()), InvalidArgument, "chat.messages"),
        (pb.GenerateRequest(pool="p", token_ids=pb.TokenIds()), InvalidArgument, "token_ids"),
        (pb.GenerateRequest(pool="p", prompt="x", sampling=extra(model="y")), InvalidArgument, "extra.model"),
        (pb.GenerateRequest(pool="p", prompt="x", sampling=extra(n=2)), InvalidArgument, "extra.n"),
    ],
)
async def test_bad_requests(request_: pb.GenerateRequest, error: type[SpringtideError], match: str) -> None:
    async with upstream(says(ANSWER)) as up, router(table(worker("a", up.port))) as r:
        with pytest.raises(error, match=match):
            await generate(r.grpc_address, request_)
        assert r.in_flight == 0
        assert not up.requests


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: 29\r\n\r\n" + b'{"error":{"message":"so not"}}'[:29],
        SSE_HEAD + chunk(b'data: {"error": {"message": "so not", "code": 400}}\n\n') + chunk(DONE) + LAST,
    ],
)
async def test_the_engines_own_refusal_is_invalid_argument(answer: bytes) -> None:
    async with upstream(says(answer)) as up, router(table(worker("a", up.port))) as r:
        with pytest.raises(InvalidArgument):
            await generate(r.grpc_address)
        assert len(up.requests) == 1


@pytest.mark.parametrize(
    "broken",
    [
        says(b"", close=True),
        says(SSE_HEAD, close=True),
        says(REFUSAL % b"draining"),
        says(SSE_HEAD + chunk(b'data: {"error": {"message": "dead", "code": 500}}\n\n') + chunk(DONE) + LAST),
        says(b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\ndead"),
        says(SSE_HEAD + chunk(b"data: what?\n\n")),
    ],
)
async def test_a_fault_before_the_first_token_is_unseen(broken: Script) -> None:
    """RT5"""
    async with (
        upstream(broken) as bad,
        upstream(says(ANSWER)) as good,
        router(table(worker("a", bad.port), worker("b", good.port))) as r,
    ):
        responses = await generate(r.grpc_address)
        assert text_of(responses) == "ab"
        assert responses[0].started.worker_id == "b"
        assert (len(bad.requests), len(good.requests)) == (1, 1)
        assert r.in_flight == 0


async def test_after_the_first_token_it_is_aborted() -> None:
    """RT5: an explicit error, exactly one end."""
    async with (
        upstream(says(SSE_HEAD + chunk(token("a")), close=True)) as up,
        router(table(worker("a", up.port))) as r,
        generation_stub(r.grpc_address) as stub,
    ):
        got: list[pb.GenerateResponse] = []
        call = stub.Generate(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call, got)
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert [x.WhichOneof("event") for x in got] == ["started", "tokens"]
        with pytest.raises(Conflict, match="after 1 events"):
            await generate(r.grpc_address)
        assert r.in_flight == 0


async def collect(call: AsyncIterable[pb.GenerateResponse], got: list[pb.GenerateResponse]) -> None:
    async for response in call:
        got.append(response)  # noqa: PERF401 - what came before a failure counts


async def test_no_worker_in_time_and_a_full_queue_carry_retry_info() -> None:
    """RT3"""
    async with router(table(pool=replace(POOL, max_waiting=1, waiting_timeout_s=0.5))) as r:
        waiting = asyncio.create_task(generate(r.grpc_address))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        with pytest.raises(Exhausted) as full:
            await generate(r.grpc_address)
        assert (full.value.reason, bool(full.value.retry_after_s)) == ("QUEUE_FULL", True)
        with pytest.raises(Unavailable) as late:
            await waiting
        assert (late.value.reason, bool(late.value.retry_after_s)) == ("WAITING_TIMEOUT", True)


async def test_held_until_a_worker_comes() -> None:
    """RT4"""
    async with upstream(says(ANSWER)) as up, router(table()) as r:
        asking = asyncio.create_task(generate(r.grpc_address))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        r.dispatcher.delta(RoutingDelta("s", 2, workers=(worker("a", up.port),)))
        responses = await asking
        assert text_of(responses) == "ab"
        assert responses[0].started.waited_s > 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("when", ["held", "before", "during"])
async def test_cancellation_and_deadline_reach_the_worker(how: str, when: str) -> None:
    """RT8"""
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        if when == "during":
            await peer.send(SSE_HEAD + chunk(token("a")))
        await peer.closed()
        cut.set()

    async with upstream(script) as up:
        workers = [] if when == "held" else [worker("a", up.port)]
        async with router(table(*workers)) as r, generation_stub(r.grpc_address) as stub:
            got: list[pb.GenerateResponse] = []
            call = stub.Generate(PROMPT, timeout=0.3 if how == "deadline" else None)
            reading = asyncio.create_task(collect(call, got))
            if when == "held":
                await until(lambda: r.dispatcher.admission.waiting("p") == 1)
            else:
                await until(lambda: up.requests and (when == "before" or len(got) == 2))
            if how == "cancel":
                call.cancel()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await reading
            if when != "held":
                await asyncio.wait_for(cut.wait(), 1.0)
            await until(lambda: r.in_flight == 0 and r.dispatcher.admission.waiting("p") == 0)


async def test_health_and_reflection() -> None:
    """CP21"""
    async with router(table()) as r, grpc.aio.insecure_channel(r.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="springtide.v1.GenerationService"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING  # no control plane has spoken
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        services = {s.name async for response in call for s in response.list_services_response.service}
        assert "springtide.v1.GenerationService" in services
