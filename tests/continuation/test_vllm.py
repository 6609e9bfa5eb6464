"""The real vLLM on a CPU: greedy streams cut at every few tokens end with the text that they have undisturbed (RT5)."""

import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.continuation.test_exact import CHAT, TEXT, Script
from tests.continuation.test_explicit import explicit
from tests.continuation.world import Cut, ask, same, world
from tests.ports import free_port
from tests.system.stack import ROOT, wait_for

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ARGS = ("--enforce-eager", "--max-model-len", "512", "--dtype", "float32", "--kv-cache-memory-bytes", "64M")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one engine with a tiny random model."""
    folder = tmp_path_factory.mktemp("vllm")
    maker = ROOT / "tests" / "engines_real" / "tiny_model.py"
    subprocess.run([PYTHON, maker, folder / "tiny"], check=True, capture_output=True, timeout=300)
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--max-num-seqs", "4")
    command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "tiny"), *ARGS, *where]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with Path(folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder, start_new_session=True)
    try:

        def healthy() -> bool:
            assert process.poll() is None, (folder / "log").read_text(errors="replace")[-3000:]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return bool(answer.status == 200)

        wait_for("a healthy vLLM", healthy, 600, 0.5)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


# Text that was held back is not known where special tokens are in it: an explicit error, not asked for here.
PLAIN = {"logit_bias": {str(token_id): -100 for token_id in range(6)}}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"max_tokens": None}),
    (CHAT, {"stop": ["never comes"], "return_token_ids": True, **PLAIN}),
    (TEXT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (TEXT, {"prompt": [7, 300, 301], "min_tokens": 20}),
    (TEXT, {"stop": "STOP", "min_tokens": 3, **PLAIN}),
    (TEXT, {"stop": "STOP", "include_stop_str_in_output": True}),
]


async def test_cut_streams_are_whole(vllm: int) -> None:
    """Each variant cut at random events, once and several times over."""
    rng = random.Random(3)
    script = Script()
    async with world(script, engine_name="vllm", engine_port=vllm) as w:
        for path, fields in VARIANTS:
            asked = (
                {"prompt": "one two"} if path == TEXT else {"messages": [{"role": "user", "content": "hello world"}]}
            )
            common = {"model": "m", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            body: dict[str, Any] = {**common, "stream_options": {"include_usage": True}, **asked, **fields}
            if body.get("stop") == "STOP":  # a piece of the answer itself, over the border of tokens
                text = (await ask(w.http_port, path, {**body, "stop": None})).text
                body["stop"] = [text[len(text) // 2 : len(text) // 2 + 8], "never comes"]
            undisturbed = await ask(w.http_port, path, body)
            assert undisturbed.done, undisturbed.error
            assert undisturbed.headers["x-springtide-continuation"] == "exact"
            events = undisturbed.raw.count(b"\n\n")
            assert events > 4
            once = [[Cut(rng.randrange(1, events), rng.choice(("close", "half", "drained")))] for _ in range(6)]
            for script.cuts in [*once, [Cut(rng.randrange(2, 9)) for _ in range(4)]]:
                told = await ask(w.http_port, path, body)
                if "stop" in body:  # over a cut, what an event has behind the stop string is counted
                    assert 0 <= told.usage[0]["completion_tokens"] - undisturbed.usage[0]["completion_tokens"] < 8
                    told.usage = undisturbed.usage
                same(told, undisturbed)
        assert w.count("exact") > 40
        assert w.count("failed") == 0
        assert w.in_flight == 0


BARRED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"n": 2, "temperature": 0.7}, "n is set"),
    (TEXT, {"seed": 7, "temperature": 0.7}, "seed is set"),
    (TEXT, {"logprobs": 1}, "logprobs is set"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty is set"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format is set"),
    (TEXT, {"structured_outputs": {"choice": ["one two three four five six seven"]}}, "structured_outputs is set"),
]


async def test_what_cannot_be_continued_says_why(vllm: int) -> None:
    """F31: features of which the first engine held more than the token ids, as the real engine answers them."""
    script = Script()
    async with world(script, engine_name="vllm", engine_port=vllm) as w:
        for path, fields, why in BARRED:
            asked = {"prompt": "one"} if path == TEXT else {"messages": [{"role": "user", "content": "hello"}]}
            body: dict[str, Any] = {"model": "m", "max_tokens": 60, "temperature": 0, **asked, **fields}
            whole = await ask(w.http_port, path, body)
            assert whole.done, (fields, whole.error)
            await explicit(w, script, path, body, f"cannot be continued: {why}")
        assert w.count("not_continuable") == len(BARRED)


@pytest.mark.parametrize("kind", ["prompt", "chat"])
async def test_log_probabilities_over_grpc(vllm: int, kind: str) -> None:
    """RT10: one for each token, as the real engine says them; greedy tokens are the likeliest ones."""
    request = pb.GenerateRequest(pool="m", logprobs=2, return_token_ids=True)
    request.sampling.CopyFrom(pb.Sampling(max_tokens=12, temperature=0, ignore_eos=True))
    if kind == "chat":
        request.chat.messages.add(role="user", content="hello")
    else:
        request.prompt = "one two"
    async with (
        world(Script(), engine_name="vllm", engine_port=vllm) as w,
        grpc.aio.insecure_channel(w.grpc_address) as channel,
    ):
        events = [event async for event in GenerationServiceStub(channel).Generate(request, timeout=60)]
    told = [event.tokens for event in events if event.WhichOneof("event") == "tokens"]
    each = [one for tokens in told for one in tokens.logprobs]
    assert len(each) == sum(len(tokens.token_ids) for tokens in told) == 12
    for one in each:
        assert one.logprob <= 0
        assert len(one.top) >= 2
        assert one.logprob == max(other.logprob for other in one.top)
