"""Log-probabilities over gRPC, from either of OpenAI's shapes, by either front (RT10)."""

import json
from typing import Any

import grpc
import pytest

from router.generation import translate
from springtide.errors import InvalidArgument
from springtide.v1 import generation_pb2 as pb
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, chunk, says, upstream
from tests.router.fakes import generation_stub, router, table, worker

FRONTS = ("h2", "grpcio")
WAVE = " \N{WAVE DASH}"
WORDS = [(" one", -0.25, {" one": -0.25, " two": -1.5}), (WAVE, -2.0, {WAVE: -2.0}), ("!", None, {})]


def completion_events() -> list[dict[str, Any]]:
    """The first two tokens in one event."""
    found = []
    for words in (WORDS[:2], WORDS[2:]):
        told = {
            "tokens": [token for token, _, _ in words],
            "token_logprobs": [logprob for _, logprob, _ in words],
            "top_logprobs": [top or None for _, _, top in words],
            "text_offset": [0 for _ in words],
        }
        text = "".join(token for token, _, _ in words)
        found.append({"choices": [{"index": 0, "text": text, "logprobs": told, "finish_reason": None}]})
    return found


def chat_events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]}]
    for token, logprob, top in WORDS:
        others = [{"token": name, "logprob": value, "bytes": None} for name, value in top.items()]
        told = {"content": [{"token": token, "logprob": logprob, "bytes": None, "top_logprobs": others}]}
        found.append({"choices": [{"delta": {"content": token}, "logprobs": told, "finish_reason": None}]})
    return found


def stream(events: list[dict[str, Any]]) -> bytes:
    ending = {"choices": [{"index": 0, "text": "", "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    sent = [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in (*events, ending)]
    return SSE_HEAD + b"".join(chunk(event) for event in sent) + chunk(DONE) + LAST


def plain(one: pb.TokenLogprob) -> tuple[str, float | None, dict[str, float]]:
    logprob = one.logprob if one.HasField("logprob") else None
    return one.token, logprob, {other.token: other.logprob for other in one.top}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", ["prompt", "chat"])
async def test_each_token_has_its_own(front: str, kind: str) -> None:
    request = pb.GenerateRequest(pool="p", logprobs=2, sampling=pb.Sampling(max_tokens=3))
    if kind == "chat":
        request.chat.messages.add(role="user", content="tide")
    else:
        request.prompt = "tide"
    events = chat_events() if kind == "chat" else completion_events()
    async with (
        upstream(says(stream(events))) as up,
        router(table(worker("a", up.port)), generate_front=front) as r,
        generation_stub(r.grpc_address) as stub,
    ):
        responses = [response async for response in stub.Generate(request, timeout=20)]
        asked = json.loads(up.requests[0].body)
    assert asked["logprobs"] == (True if kind == "chat" else 2)
    assert asked.get("top_logprobs") == (2 if kind == "chat" else None)
    told = [response.tokens for response in responses if response.WhichOneof("event") == "tokens"]
    assert "".join(tokens.text for tokens in told) == "".join(token for token, _, _ in WORDS)
    each = [plain(one) for tokens in told for one in tokens.logprobs]
    assert each == WORDS
    assert responses[-1].finished.finish_reason == "stop"


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(
    "broken", [{"tokens": ["a", "b"], "token_logprobs": [-1.0]}, {"content": [{"logprob": -1}]}, {"content": 7}]
)
async def test_what_is_no_log_probability_is_the_workers_fault(front: str, broken: dict[str, Any]) -> None:
    events = [{"choices": [{"index": 0, "text": "a", "logprobs": broken, "finish_reason": None}]}]
    request = pb.GenerateRequest(pool="p", prompt="tide", logprobs=0)
    async with (
        upstream(says(stream(events))) as up,
        router(table(worker("a", up.port)), generate_front=front, max_attempts=1) as r,
        generation_stub(r.grpc_address) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in stub.Generate(request, timeout=20)]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert r.in_flight == 0


def test_what_is_asked_of_the_engine() -> None:
    assert translate(pb.GenerateRequest(prompt="x", logprobs=0), "m")[1]["logprobs"] == 0
    assert "logprobs" not in translate(pb.GenerateRequest(prompt="x"), "m")[1]
    with pytest.raises(InvalidArgument, match="logprobs"):
        translate(pb.GenerateRequest(prompt="x", logprobs=-1), "m")
