"""A prefill and a decode worker of the real vLLM, as one pair through the whole stack, on a machine without a GPU.

F40, NA4, RT3, RT6: what the pair answers is what one engine answers, the decode engine computes no prompt, and the
death of the prefill engine under load fails no request. The KV goes from engine to engine over NIXL.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import uvloop

from springtide.v1 import types_pb2 as t
from tests.system.stack import ROOT, Stack, wait_for

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ARGS = (
    *("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "8"),
    # Greedy answers must not hang on what else is in the batch, nor prompts on what was computed before.
    *("--dtype", "float32", "--no-enable-prefix-caching"),
)
ROLES = {"prefill": (t.ROLE_PREFILL, "kv_producer"), "decode": (t.ROLE_DECODE, "kv_consumer")}
PROMPTS = [f"{number} hello world, what is the capital of France? " * (1 + number) for number in range(6)]
START_S = 240.0  # generous: two cores, two engines at once

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pair")
    model = folder / "tiny"
    maker = ROOT / "tests" / "engines_real" / "tiny_model.py"
    subprocess.run([PYTHON, maker, model], check=True, capture_output=True, timeout=120)
    config = f'parallel_starts = 2\n[launch]\nallowed_interpreters = ["{PYTHON}"]\n'
    stack = Stack(folder, gpus=2, agent_config=config)
    try:
        stack.start()
        for name, (role, kv_role) in ROLES.items():
            connector = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_load_failure_policy": "recompute"}
            stack.apply(
                name=name,
                served_model_name="tiny",
                role=role,
                engine="vllm",
                model=str(model),
                interpreter=str(PYTHON),
                engine_args=(*ARGS, "--kv-transfer-config", json.dumps(connector)),
                engine_env={"TORCHDYNAMO_DISABLE": "1"},
                min_workers=1,
                max_workers=1,
                start_timeout_s=START_S,
                policy={"enable_elastic": False},
            )
        stack.wait_workers("ACTIVE", 2, START_S)
        stack.wait_routable("tiny")
        yield stack
    finally:
        stack.stop()
    assert stack.strays() == []


def _worker(stack: Stack, pool: str) -> t.Worker:
    (found,) = [worker for worker in stack.workers("ACTIVE") if worker.pool == pool]
    return found


def _engine(stack: Stack, pool: str) -> httpx.AsyncClient:
    """A client of the pool's engine itself, past shim and router."""
    folder = stack.folder / "agent" / "workers" / _worker(stack, pool).worker_id
    socket = json.loads((folder / "ledger.json").read_text())["engine_endpoint"].removeprefix("unix:")
    assert Path(socket).is_socket()
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket), base_url="http://engine", timeout=120)


async def _counts(stack: Stack, pool: str) -> dict[str, int]:
    """The engine's own counts: prompt tokens by where their KV came from, and its requests."""
    async with _engine(stack, pool) as client:
        text = (await client.get("/metrics")).text
    found = {"computed": 0, "fetched": 0}
    for line in text.splitlines():
        if line.startswith("vllm:prompt_tokens_by_source_total"):
            value = int(float(line.rpartition(" ")[2]))
            found["computed"] += value if 'source="local_compute"' in line else 0
            found["fetched"] += value if 'source="external_kv_transfer"' in line else 0
    return found


async def _ask(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """Streams one greedy answer, as a chat or not; its text and the prompt's tokens. Fails where anything does."""
    prompt = PROMPTS[number]
    chat = number % 2 == 0
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions" if chat else "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert answer.status_code == 200, lines
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    text = "".join(choice["delta"].get("content") or "" if chat else choice["text"] for choice in choices)
    return text, chunks[-1]["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def alone(stack: Stack) -> list[tuple[str, int]]:
    """What one engine answers to each prompt, one after the other, without router, shim and pair."""

    async def ask() -> list[tuple[str, int]]:
        async with _engine(stack, "prefill") as client:
            return [await _ask(client, number) for number in range(len(PROMPTS))]

    answers = uvloop.run(ask())
    assert len({text for text, _ in answers}) == len(PROMPTS)
    return answers


def _router(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.http, timeout=120)


async def _all_at_once(stack: Stack) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """All prompts through the router, and what the decode engine counts of them."""
    before = await _counts(stack, "decode")
    async with _router(stack) as client:
        answers = await asyncio.gather(*(_ask(client, number) for number in range(len(PROMPTS))))
    after = await _counts(stack, "decode")
    return answers, {name: after[name] - before[name] for name in after}


def _tokens(answers: Sequence[tuple[str, int]]) -> int:
    return sum(tokens for _, tokens in answers)


def test_each_engine_has_a_side_channel_of_its_own(stack: Stack) -> None:
    """NA4: the pools name the connector and no port."""
    ports = set()
    for pool in ROLES:
        folder = stack.folder / "agent" / "workers" / _worker(stack, pool).worker_id
        env = json.loads((folder / "launch.json").read_text())["env"]
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        ports.add(env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    assert len(ports) == 2


def test_the_pair_answers_what_one_engine_answers(stack: Stack, alone: list[tuple[str, int]]) -> None:
    """The decode engine fetches every token of every prompt and computes none."""
    answers, counted = uvloop.run(_all_at_once(stack))
    assert answers == alone
    assert counted == {"computed": 0, "fetched": _tokens(alone)}


def test_the_prefill_engines_death_fails_no_request(stack: Stack, alone: list[tuple[str, int]]) -> None:
    """F40: what was under way and what comes while it is away is answered whole, and as one engine answers it."""
    worker = _worker(stack, "prefill")
    tree = psutil.Process(stack.engine_pids(worker.worker_id)["guard"]).children(recursive=True)
    killed = asyncio.Event()
    answers: list[list[tuple[str, int]]] = [[] for _ in PROMPTS]

    async def stream_until_killed(client: httpx.AsyncClient, number: int) -> None:
        """One after the other, and a last one that begins when it is dead for sure."""
        while not killed.is_set():
            answers[number].append(await _ask(client, number))
        answers[number].append(await _ask(client, number))

    async def load_while_it_dies() -> None:
        async with _router(stack) as client, asyncio.TaskGroup() as streams:
            for number in range(len(PROMPTS)):
                streams.create_task(stream_until_killed(client, number))
            try:
                await asyncio.to_thread(wait_for, "load", lambda: all(answers), 60)
                for process in tree:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                await asyncio.to_thread(psutil.wait_procs, tree, timeout=30)
            finally:
                killed.set()

    before = uvloop.run(_counts(stack, "decode"))
    uvloop.run(load_while_it_dies())
    assert [set(told) for told in answers] == [{answer} for answer in alone]
    after = uvloop.run(_counts(stack, "decode"))
    assert after["computed"] - before["computed"] > 0  # the last ones at least: there was nobody else
