"""One of two real vLLM engines is killed in the middle of concurrent greedy streams: each ends as it does undisturbed.

RT5 RT6, F3 F5: over HTTP with text and token ids, and over gRPC; SIGKILL, not a modelled cut.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import grpc.aio
import psutil
import pytest
import uvloop

from springtide.v1 import generation_pb2 as g
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.continuation.world import ask
from tests.system.stack import ROOT, Stack, wait_for

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ARGS = (
    *("--enforce-eager", "--max-model-len", "1024", "--dtype", "float32", "--kv-cache-memory-bytes", "64M"),
    *("--max-num-seqs", "8", "--no-enable-prefix-caching"),
)
START_S = 420.0  # generous: about 40 s where nobody else works
TOKENS = 600
STREAMS = 6

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


class Answer(NamedTuple):
    """What a client of either front relies on."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    completion_tokens: int


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("killed")
    maker = ROOT / "tests" / "engines_real" / "tiny_model.py"
    subprocess.run([PYTHON, maker, folder / "tiny"], check=True, capture_output=True, timeout=300)
    config = f'parallel_starts = 2\n[launch]\nallowed_interpreters = ["{PYTHON}"]\n'
    stack = Stack(folder, gpus=2, agent_config=config)
    try:
        stack.start()
        stack.apply(
            name="tiny",
            engine="vllm",
            model=str(folder / "tiny"),
            interpreter=str(PYTHON),
            engine_args=ARGS,
            engine_env={"TORCHDYNAMO_DISABLE": "1"},
            min_workers=2,
            max_workers=2,
            start_timeout_s=START_S,
            policy={"enable_elastic": False},
        )
        stack.wait_workers("ACTIVE", 2, START_S)
        stack.wait_routable("tiny")
        yield stack
    finally:
        stack.stop()
    assert stack.strays() == []


Progress = Callable[[int], None]


def _nobody(events: int) -> None:
    """Nobody asks how far a stream is."""


async def _over_http(stack: Stack, number: int, progress: Progress) -> Answer:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"hello number {number}"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    told = await ask(stack.http_port, "/v1/chat/completions", body, progress=progress)
    assert not told.error, told.error
    assert told.done
    assert told.clean
    assert told.roles == 1
    assert len(told.names) == 1
    (finish,), (usage,) = told.finish, told.usage
    return Answer(told.text, tuple(told.ids), finish, usage["completion_tokens"])


async def _over_grpc(stack: Stack, number: int, progress: Progress, served_by: Callable[[str], None]) -> Answer:
    request = g.GenerateRequest(
        pool="tiny",
        prompt=f"one two {number}",
        sampling=g.Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True),
        return_token_ids=True,
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router_port}") as channel:
        events = []
        async for event in GenerationServiceStub(channel).Generate(request, timeout=120):
            events.append(event)
            if event.WhichOneof("event") == "started":
                served_by(event.started.worker_id)
            progress(len(events))
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1], kinds.count("finished")) == ("started", "finished", 1)
    ids = tuple(token_id for event in events for token_id in event.tokens.token_ids)
    finished = events[-1].finished
    text = "".join(event.tokens.text for event in events)
    return Answer(text, ids, finished.finish_reason, finished.completion_tokens)


async def _all(stack: Stack, blow: "Blow | None" = None) -> list[Answer]:
    blow = blow or Blow({})
    return await asyncio.gather(
        *(_over_http(stack, number, _nobody) for number in range(STREAMS)),
        *(_over_grpc(stack, n, partial(blow.seen, n), partial(blow.started, n)) for n in range(STREAMS)),
    )


class Blow:
    """SIGKILL of the first engine that is in the middle of at least two gRPC streams, each with another number of
    tokens; HTTP streams are hit wherever they are."""

    def __init__(self, trees: dict[str, list[psutil.Process]]) -> None:
        self.trees = trees  # by worker: its engine's processes, the server first
        self.victim = ""
        self._worker: dict[int, str] = {}
        self._events: dict[int, int] = {}

    def started(self, stream: int, worker_id: str) -> None:
        self._worker[stream] = worker_id

    def seen(self, stream: int, events: int) -> None:
        self._events[stream] = events
        if self.victim:
            return
        for worker_id, tree in self.trees.items():
            there = [n for s, n in self._events.items() if self._worker.get(s) == worker_id and 20 < n < TOKENS // 2]
            if len(there) >= 2:
                self.victim = worker_id
                os.kill(tree[0].pid, signal.SIGKILL)
                return


def test_streams_of_a_killed_engine_end_as_they_do_undisturbed(stack: Stack) -> None:
    undisturbed = uvloop.run(_all(stack))
    assert all(answer.completion_tokens == TOKENS == len(answer.ids) for answer in undisturbed)
    trees = {
        worker.worker_id: psutil.Process(stack.engine_pids(worker.worker_id)["guard"]).children(recursive=True)
        for worker in stack.workers("ACTIVE")
    }
    blow = Blow(trees)
    answers = uvloop.run(_all(stack, blow))
    assert blow.victim, "no engine was in the middle of two streams"
    assert answers == undisturbed
    wait_for(
        "the continuations among the counters",
        lambda: stack.counted("router", "springtide_router_continuations_total", result="exact") >= 2,
    )
    assert stack.counted("router", "springtide_router_continuations_total", result="failed") == 0
    _, alive = psutil.wait_procs(trees[blow.victim], timeout=30)
    assert not alive, alive
