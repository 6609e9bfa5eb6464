"""Generate goes on elsewhere as HTTP streams do, by either front (RT1, RT5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.continuation.test_exact import Script
from tests.continuation.world import Cut, world

FRONTS = ("h2", "grpcio")


@dataclass
class Told:
    """What a client was told."""

    kinds: list[str] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    trailers: dict[str, str] = field(default_factory=dict)


async def generate(stub: GenerationServiceStub, request: pb.GenerateRequest) -> Told:
    told = Told()
    call = stub.Generate(request, timeout=30)
    async for response in call:
        kind = response.WhichOneof("event")
        told.kinds.append(str(kind))
        told.text += response.tokens.text
        told.ids += response.tokens.token_ids
        if kind == "finished":
            told.finished = response.finished
    for key, value in await call.trailing_metadata() or ():
        told.trailers[str(key)] = str(value)
    return told


def request(kind: str, stop: Sequence[str] = (), ids: bool = False) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=8, temperature=0, stop=stop)
    asked = pb.GenerateRequest(pool="m", sampling=sampling, return_token_ids=ids)
    if kind == "chat":
        asked.chat.messages.add(role="user", content="tide")
    elif kind == "prompt":
        asked.prompt = "tide"
    else:
        asked.token_ids.ids.extend([16777313, 16777314])
    return asked


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", ["chat", "prompt", "token_ids"])
@pytest.mark.parametrize("ids", [False, True])
async def test_cut_at_every_border(front: str, kind: str, ids: bool) -> None:
    script = Script()
    async with world(script, generate_front=front) as w, grpc.aio.insecure_channel(w.grpc_address) as channel:
        stub = GenerationServiceStub(channel)
        undisturbed = await generate(stub, request(kind, ids=ids))
        assert undisturbed.kinds == ["started", *["tokens"] * 8, "finished"]
        assert len(undisturbed.ids) == (8 if ids else 0)
        for how in ("close", "half", "error", "drained"):
            for after in range(11):
                script.cuts = [Cut(after, how)]
                told = await generate(stub, request(kind, ids=ids))
                assert (told.kinds[0], told.kinds.count("started"), told.kinds[-1]) == ("started", 1, "finished")
                assert (told.text, told.ids, told.finished) == (
                    undisturbed.text,
                    undisturbed.ids,
                    undisturbed.finished,
                )
                if how == "close" and 3 < after < 7:
                    assert told.trailers["springtide-continuation"] == "exact"
                    assert told.trailers["springtide-continuations"] == "1"
        assert w.in_flight == 0
        assert w.dispatcher.continuing.budget.left == 256 * 1024 * 1024


@pytest.mark.parametrize("front", FRONTS)
async def test_stop_strings_over_the_cut(front: str) -> None:
    script = Script()
    async with world(script, generate_front=front) as w, grpc.aio.insecure_channel(w.grpc_address) as channel:
        stub = GenerationServiceStub(channel)
        text = (await generate(stub, request("prompt"))).text
        asked = request("prompt", stop=[text[24:34]])
        undisturbed = await generate(stub, asked)
        assert undisturbed.finished is not None
        assert undisturbed.finished.finish_reason == "stop"
        for after in range(6):
            script.cuts = [Cut(after)]
            told = await generate(stub, asked)
            assert (told.text, told.finished) == (undisturbed.text, undisturbed.finished)


@pytest.mark.parametrize("front", FRONTS)
async def test_what_cannot_be_continued_is_an_explicit_error(front: str) -> None:
    script = Script()
    async with world(script, generate_front=front) as w, grpc.aio.insecure_channel(w.grpc_address) as channel:
        stub = GenerationServiceStub(channel)
        asked = request("prompt")
        asked.sampling.seed = 3
        script.cuts = [Cut(4)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, asked)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "cannot be continued: seed is set" in (caught.value.details() or "")
        assert w.count("not_continuable") == 1
        assert w.in_flight == 0
