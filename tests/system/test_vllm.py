"""The real vLLM, tensor-parallel size 2, through the whole stack on a machine without a GPU.

NA4 NA7 NA8 NA11 RT1 RT2 RT6 RT8, F1 F30 F34: streams over gRPC and HTTP, 1 -> 2 -> 1 workers, a drain under load, an
engine killed with SIGKILL, and no process left behind.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import grpc
import openai
import psutil
import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import generation_pb2 as g
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.system.stack import ROOT, Stack, wait_for

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ARGS = (
    *("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M"),
    *("--max-num-seqs", "8", "--shutdown-timeout", "3"),
)
START_S = 240.0  # generous: two cores, four ranks

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "tiny"
    maker = ROOT / "tests" / "engines_real" / "tiny_model.py"
    subprocess.run([PYTHON, maker, model], check=True, capture_output=True, timeout=120)
    config = f'[launch]\nallowed_interpreters = ["{PYTHON}"]\n'
    stack = Stack(folder, gpus=4, agent_config=config)
    try:
        stack.start()
        stack.apply(
            name="tiny",
            engine="vllm",
            model=str(model),
            tensor_parallel_size=2,
            interpreter=str(PYTHON),
            engine_args=ARGS,
            min_workers=1,
            max_workers=2,
            start_timeout_s=START_S,
            drain_timeout_s=60,
            policy={"enable_elastic": False},
        )
        stack.wait_workers("ACTIVE", 1, START_S)
        stack.wait_routable("tiny")
        yield stack
    finally:
        stack.stop()
    assert stack.strays() == []


def _scale(stack: Stack, workers: int) -> None:
    stack.operator.ScalePool(cp.ScalePoolRequest(pool="tiny", workers=workers), timeout=5)
    stack.wait_workers("ACTIVE", workers, START_S)


async def _over_grpc(stack: Stack, tokens: int) -> list[g.GenerateResponse]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router_port}") as channel:
        request = g.GenerateRequest(pool="tiny", sampling=g.Sampling(max_tokens=tokens, ignore_eos=True))
        request.chat.messages.add(role="user", content="hello world")
        return [response async for response in GenerationServiceStub(channel).Generate(request, timeout=60)]


async def _over_http(stack: Stack, tokens: int, number: int = 0) -> int:
    """Streams one chat with the official client; the number of completion tokens that the engine counted."""
    async with openai.AsyncOpenAI(base_url=stack.http + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"hello {number}"}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        counted, reason = 0, None
        async for chunk in stream:
            counted = chunk.usage.completion_tokens if chunk.usage else counted
            reason = next((c.finish_reason for c in chunk.choices if c.finish_reason), reason)
        assert reason == "length"
        return counted


def test_streams_over_grpc_and_http(stack: Stack) -> None:
    responses = uvloop.run(_over_grpc(stack, 40))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert kinds.count("finished") == 1
    assert responses[-1].finished.completion_tokens == 40
    assert uvloop.run(_over_http(stack, 40)) == 40


def test_a_client_that_leaves_frees_the_engine(stack: Stack) -> None:
    """RT8: the engine itself says that nothing runs any more."""

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=stack.http + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny", prompt="hello", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    uvloop.run(leave())
    wait_for("the shim's count", lambda: all(w.in_flight == 0 for w in stack.workers("ACTIVE")), 10)
    wait_for("the engine's own count", lambda: all(w.engine_running == 0 for w in stack.workers("ACTIVE")), 10)


def test_one_two_one_with_a_drain_under_load(stack: Stack) -> None:
    _scale(stack, 2)
    held = [gpu for worker in stack.workers("ACTIVE") for gpu in worker.gpu_ids]
    assert len(set(held)) == 4

    ordered = asyncio.Event()

    async def stream_until_ordered(number: int) -> list[int]:
        """One stream after the other, so that there is load at the order on fast machines and on slow ones."""
        counted = [await _over_http(stack, 400, number)]
        while not ordered.is_set():
            counted.append(await _over_http(stack, 400, number))
        return counted

    async def load_while_draining() -> list[list[int]]:
        sent = [asyncio.create_task(stream_until_ordered(number)) for number in range(12)]
        try:

            def load_on_both() -> bool:
                for stream in sent:
                    if stream.done():
                        stream.result()  # it ended before the order: with an error, and that is what to see
                return all(w.in_flight > 0 for w in stack.workers("ACTIVE"))

            await asyncio.to_thread(wait_for, "load on both", load_on_both, 60)
            await asyncio.to_thread(
                lambda: stack.operator.ScalePool(cp.ScalePoolRequest(pool="tiny", workers=1), timeout=5)
            )
        finally:
            ordered.set()
        return await asyncio.gather(*sent)

    counted = uvloop.run(load_while_draining())
    assert {tokens for stream in counted for tokens in stream} == {400}
    assert len(counted) == 12
    stack.wait_workers("ACTIVE", 1, 60)
    stack.wait_workers("DRAINING", 0, 60)
    assert not [e for e in stack.events() if e.action == "worker_failed"]


def test_a_killed_engine_is_replaced_whole(stack: Stack) -> None:
    stack.wait_workers("ACTIVE", 1, START_S)
    (worker,) = stack.workers("ACTIVE")
    guard = psutil.Process(stack.engine_pids(worker.worker_id)["guard"])
    tree = guard.children(recursive=True)
    assert len(tree) >= 3  # the server, its engine core and the ranks
    os.kill(tree[0].pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(tree, timeout=30)
    assert not alive, alive
    assert len(gone) == len(tree)
    wait_for(
        "a new incarnation",
        lambda: [w for w in stack.workers("ACTIVE") if w.incarnation > worker.incarnation],
        START_S,
    )
    assert uvloop.run(_over_http(stack, 20)) == 20
    failed = [e for e in stack.events() if e.action == "worker_failed"]
    assert [e.target for e in failed] == [worker.worker_id]
    assert failed[0].reason in ("ENGINE_KILLED", "ENGINE_EXITED")
