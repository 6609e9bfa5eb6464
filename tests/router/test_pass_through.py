"""What clients ask of engines passes through the router, and answers come back, as they are (RT2, RT13)."""

import json
from typing import Any

import pytest

from router.core.terms import ENGINES_WITH_IDS
from springtide.model.routing import RoutedPool
from tests.dataplane.fakes import DONE, LAST, SSE_HEAD, chunk, client, post, says, upstream
from tests.router.fakes import router, table, worker

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "<|im_start|>user\n\u2603<|im_end|>", "stop": ["<|im_end|>", "\n\n"], "stop_token_ids": [2]}),
    (TEXT, {"prompt": ["a", "b"], "n": 3, "best_of": 4, "logprobs": 5, "echo": True}),
    (TEXT, {"prompt": [1, 2, 3], "skip_special_tokens": False, "include_stop_str_in_output": True}),
    (CHAT, {"n": 2, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    (CHAT, {"logprobs": True, "top_logprobs": 4, "stream_options": {"include_usage": True}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "seed": 2**60}),
    (CHAT, {"vllm_xargs": {"a": [1, None]}, "a field of tomorrow": {"b": 1e-30}, "temperature": 0.30000000000000004}),
    (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
]


def body_of(path: str, fields: dict[str, Any], **more: Any) -> bytes:
    """JSON with blanks and escapes of its own, which nobody may tidy up."""
    asked = {"messages": [{"role": "user", "content": "tide"}], **fields} if path == CHAT else fields
    return json.dumps({"model": "m", **asked, **more}, separators=(" , ", " : ")).encode()


@pytest.mark.parametrize(("path", "fields"), ASKED)
async def test_whole_answers(path: str, fields: dict[str, Any]) -> None:
    answer = b'{"object" : "any", "choices":[ ], "data": [{"embedding":"AAA="}], "x": null}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-engine: 7\r\ncontent-length: %d\r\n\r\n" % len(
        answer
    )
    async with (
        upstream(says(head + answer)) as up,
        router(table(worker("a", up.port))) as r,
        client(r.http_port) as c,
    ):
        sent = body_of(path, fields)
        c.send(post(path, sent))
        assert b"\r\nx-engine: 7\r\n" in await c.head()
        assert await c.exactly(len(answer)) == answer
        assert up.requests[0].body == sent
        assert up.requests[0].head.startswith(b"POST %b HTTP/1.1\r\n" % path.encode())


@pytest.mark.parametrize("engine", ["sglang", *sorted(ENGINES_WITH_IDS)])
@pytest.mark.parametrize(("path", "fields"), [asked for asked in ASKED if asked[0] != EMBEDDINGS])
async def test_streams(path: str, fields: dict[str, Any], engine: str) -> None:
    """Where a stream can be continued the engine is asked for ids, and for nothing else; events come as they are."""
    told = [
        b'data: {"choices" : [{"delta":{"tool_calls":[{"index":0}]},"x":1}]}\n\n',
        b": a comment\n\n",
        b"data: {}\n\n",
    ]
    pool = RoutedPool("p", "m", max_waiting=8, waiting_timeout_s=20.0, max_workers=4, engine=engine)
    events = b"".join(map(chunk, told))
    async with (
        upstream(says(SSE_HEAD + events + chunk(DONE) + LAST)) as up,
        router(table(worker("a", up.port), pool=pool)) as r,
        client(r.http_port) as c,
    ):
        sent = body_of(path, fields, stream=True)
        c.send(post(path, sent))
        head = await c.head()
        assert await c.chunks() == b"".join(told) + DONE
        received = up.requests[0].body
        if b"x-springtide-continuation: none\r\n" in head:
            assert received == sent
        else:
            assert json.loads(received) == {**json.loads(sent), "return_token_ids": True}
            assert len(received) < len(sent) + 30
