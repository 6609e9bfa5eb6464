"""Prefill and decode pairs whose halves fail: real processes, one stack for all of the module (F40).

No time-out of the router is shorter than any test may last: what ends a wait here is that somebody was seen to be gone.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc.aio
import pytest
import uvloop

from nodeagent.engines.sim.tokens import answer_text
from springtide.v1 import generation_pb2 as pb
from springtide.v1 import types_pb2 as t
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.continuation.world import CHAT, Told, ask
from tests.faults.blows import FaultStack, engine_metrics, wait_for
from tests.faults.conftest import TIMING
from tests.system import load
from tests.system.trace import Arrival

PAIRS = "springtide_router_pairs_total"
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
ENGINE = (
    *("--startup-s", "0.1", "--decode-base-ms", "10", "--decode-per-request-ms", "0.05", "--max-num-seqs", "512"),
    *("--prefill-tokens-per-s", "50000", "--kv-transfer-config", CONNECTOR),
)
NO_TIME_OUTS = "[timeouts]\ntotal_timeout_s = 3600.0\nfirst_byte_timeout_s = 3600.0\nidle_timeout_s = 3600.0\n"
PREFILL, DECODE = "reads", "writes"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def prefill_pool(stack: FaultStack, workers: int) -> None:
    role = t.ROLE_PREFILL
    spec = {"role": role, "served_model_name": "demo", "engine_args": ENGINE, "max_start_attempts": 50}
    stack.pool(PREFILL, workers=workers, most=workers, wait=False, **spec)


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    folder = tmp_path_factory.mktemp("pairs")
    stack = FaultStack(folder, gpus=4, timing=TIMING, router_config=NO_TIME_OUTS)
    try:
        stack.start()
        prefill_pool(stack, 2)
        spec = {"role": t.ROLE_DECODE, "served_model_name": "demo", "engine_args": ENGINE, "max_start_attempts": 50}
        stack.pool(DECODE, workers=2, most=2, wait=False, **spec)
        yield stack
    finally:
        stack.stop()
        assert stack.strays() == []


def routable(stack: FaultStack, pool: str) -> float:
    return stack.counted("router", "springtide_router_workers", pool=pool)


@pytest.fixture
def pairs(module_stack: FaultStack) -> Iterator[FaultStack]:
    """Two workers of each role; what a test took is replaced before the next one."""
    module_stack.check_whole(active=4, timeout_s=90)
    wait_for("both pools at the router", lambda: [routable(module_stack, p) for p in (PREFILL, DECODE)] == [2, 2], 60)
    yield module_stack
    assert module_stack.counted("router", "springtide_router_in_flight") == 0


def of(stack: FaultStack, pool: str) -> list[t.Worker]:
    return [worker for worker in stack.workers("ACTIVE") if worker.pool == pool]


def total(stack: FaultStack, pool: str, name: str) -> float:
    return sum(engine_metrics(stack, worker.worker_id).get(name, 0.0) for worker in of(stack, pool))


def counted(stack: FaultStack, outcome: str) -> float:
    return stack.counted("router", PAIRS, outcome=outcome)


def lift_faults(stack: FaultStack, worker_id: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(stack.entry(worker_id)["engine_endpoint"].removeprefix("unix:"))
        sock.sendall(b"DELETE /fault HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 200 " in sock.recv(4096)


def starts_of(stack: FaultStack) -> dict[str, int]:
    """The decode workers' incarnations: another one would be a restart."""
    return {worker.worker_id: worker.incarnation for worker in of(stack, DECODE)}


def trips(stack: FaultStack) -> float:
    return stack.counted("router", "springtide_router_breaker_trips_total", pool=DECODE)


async def many(stack: FaultStack, count: int, salt: str, at_a_time: int = 16) -> list[load.Result]:
    """Every third one is not streamed."""
    gate = asyncio.Semaphore(at_a_time)

    async def one(number: int) -> load.Result:
        async with gate:
            arrival = Arrival(number, 0, 200, 10)
            return await load.ask(stack.http, "demo", arrival, salt=salt, stream=number % 3 > 0, timeout_s=120)

    return await asyncio.gather(*(one(number) for number in range(count)))


def chat(tokens: int = 400) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": "tide"}],
        "max_tokens": tokens,
        "temperature": 0,
    }


async def until(what: str, probe: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """`wait_for` beside what runs in this loop."""
    await asyncio.to_thread(wait_for, what, probe, timeout_s, 0.02)


async def beside(work: Awaitable[Any], then: Callable[[], Awaitable[None]]) -> Any:
    task = asyncio.ensure_future(work)
    try:
        await then()
        return await task
    finally:
        task.cancel()


def test_prompts_are_computed_here_and_answers_there(pairs: FaultStack) -> None:
    """F40: what pairs are without faults: exact answers, every prompt's KV fetched from a prefill engine."""
    received, computed = (
        total(pairs, DECODE, "sim_kv_received_total"),
        total(pairs, PREFILL, "vllm:prompt_tokens_total"),
    )
    paired = counted(pairs, "paired")
    results = uvloop.run(many(pairs, 60, "plain"))
    assert all(result.exact for result in results), next(r for r in results if not r.exact)
    assert counted(pairs, "paired") - paired == 60
    assert total(pairs, DECODE, "sim_kv_received_total") - received == 60
    assert total(pairs, PREFILL, "vllm:prompt_tokens_total") - computed > 60 * 100
    assert pairs.counted("router", "springtide_router_requests_total", pool=PREFILL, front="pair", outcome="ok") >= 60


def test_prefill_engines_killed_under_load(pairs: FaultStack) -> None:
    """F40: no request fails, and no decode worker is blamed or restarted."""
    before, tripped = starts_of(pairs), trips(pairs)

    async def kill_both() -> None:
        for worker in of(pairs, PREFILL):
            done = counted(pairs, "paired") + counted(pairs, "decode_alone")
            await until("some more answers", partial(answered, done + 20))
            os.kill(pairs.pid("engine", worker.worker_id), signal.SIGKILL)

    def answered(so_many: float) -> bool:
        return counted(pairs, "paired") + counted(pairs, "decode_alone") > so_many

    async def loaded() -> list[load.Result]:
        """Load for as long as engines are killed, and a while longer."""
        killing = asyncio.ensure_future(kill_both())
        results: list[load.Result] = []
        while not killing.done():
            results += await many(pairs, 50, f"killed {len(results)}")
        await killing
        return results + await many(pairs, 100, "afterwards")

    results = uvloop.run(loaded())
    assert all(result.exact for result in results), next(r for r in results if not r.exact)
    assert starts_of(pairs) == before
    assert trips(pairs) == tripped
    assert all(worker.condition == t.WORKER_CONDITION_HEALTHY for worker in of(pairs, DECODE))


@pytest.mark.parametrize("stream", [True, False])
def test_a_pull_that_hangs_ends_with_its_partner(pairs: FaultStack, stream: bool) -> None:
    """F40: the decode engine would wait for ever, and the router for an hour: the partner's death ends both."""
    before, tripped = starts_of(pairs), trips(pairs)
    lost = counted(pairs, "partner_lost")
    for name in before:
        pairs.inject(name, kind="pull_hangs")
    at_work: list[str] = []

    def hangs() -> bool:
        """Whose KV is waited for."""
        at_work[:] = [w.worker_id for w in of(pairs, PREFILL) if engine_metrics(pairs, w.worker_id)["sim_kv_held"] > 0]
        return len(at_work) == 1

    async def kill() -> None:
        await until("a pull that hangs", lambda: total(pairs, DECODE, "sim_kv_pulling") == 1)
        await until("KV that nobody fetches", hangs)
        for name in before:
            lift_faults(pairs, name)  # what hangs already goes on hanging
        os.kill(pairs.pid("engine", at_work[0]), signal.SIGKILL)

    arrival = Arrival(1, 0, 200, 10)
    asking = load.ask(pairs.http, "demo", arrival, salt=f"hangs {stream}", stream=stream, timeout_s=120)

    async def run() -> load.Result:
        result: load.Result = await beside(asking, kill)
        return result

    result = uvloop.run(run())
    assert result.exact, result
    assert counted(pairs, "partner_lost") - lost >= 1
    assert (starts_of(pairs), trips(pairs)) == (before, tripped)


def test_a_decode_worker_killed_in_mid_stream(pairs: FaultStack) -> None:
    """F40: its stream goes on at the other decode worker from the tokens that the client has; the prefill pool is not
    concerned."""
    seen = [0] * 6
    victim = of(pairs, DECODE)[0].worker_id
    prefill = {worker.worker_id: worker.incarnation for worker in of(pairs, PREFILL)}
    continued = pairs.counted("router", "springtide_router_continuations_total", result="exact")

    def progress(at: int) -> Callable[[int], None]:
        return lambda events: seen.__setitem__(at, events)

    async def killed() -> tuple[Told, list[Told]]:
        undisturbed = await ask(pairs.http_port, CHAT, chat())
        asking = [asyncio.ensure_future(ask(pairs.http_port, CHAT, chat(), progress=progress(n))) for n in range(6)]
        async with asyncio.timeout(60):
            while min(seen) < 4 and not any(task.done() for task in asking):
                await asyncio.sleep(0.01)
        os.kill(pairs.pid("engine", victim), signal.SIGKILL)
        return undisturbed, list(await asyncio.gather(*asking))

    undisturbed, told = uvloop.run(killed())
    assert all((one.text, one.finish, one.error) == (undisturbed.text, ["length"], "") for one in told)
    assert pairs.counted("router", "springtide_router_continuations_total", result="exact") - continued >= 1
    assert {worker.worker_id: worker.incarnation for worker in of(pairs, PREFILL)} == prefill


def test_pairs_over_grpc(pairs: FaultStack) -> None:
    """F40: Generate is served by two workers as well, also when the one that reads prompts dies."""
    paired = counted(pairs, "paired")
    prompts = [f"the tide follows the load {number}" for number in range(40)]

    async def generate(stub: GenerationServiceStub, prompt: str) -> str:
        request = pb.GenerateRequest(pool="demo", prompt=prompt, sampling=pb.Sampling(max_tokens=8, temperature=0))
        return "".join([response.tokens.text async for response in stub.Generate(request, timeout=120)])

    async def run() -> list[str]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{pairs.router_port}") as channel:
            stub = GenerationServiceStub(channel)
            texts = [await generate(stub, prompt) for prompt in prompts[:10]]
            os.kill(pairs.pid("engine", of(pairs, PREFILL)[0].worker_id), signal.SIGKILL)
            return texts + list(await asyncio.gather(*(generate(stub, prompt) for prompt in prompts[10:])))

    assert uvloop.run(run()) == [answer_text(prompt, 8) for prompt in prompts]
    assert counted(pairs, "paired") - paired >= 10


def test_a_client_that_leaves_during_the_prefill(pairs: FaultStack) -> None:
    """F40: neither engine works for nobody."""
    readers = [worker.worker_id for worker in of(pairs, PREFILL)]
    for name in readers:
        pairs.inject(name, kind="slow", factor=100_000)

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", pairs.http_port)
        body = json.dumps({**chat(), "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until("a prefill", lambda: total(pairs, PREFILL, "vllm:num_requests_running") == 1)
        writer.close()
        await until("idle prefill engines", lambda: total(pairs, PREFILL, "vllm:num_requests_running") == 0)

    try:
        uvloop.run(leave())
    finally:
        for name in readers:  # a step that has begun so slowly lasts
            os.kill(pairs.pid("engine", name), signal.SIGKILL)
    assert total(pairs, DECODE, "vllm:num_requests_running") == 0
    wait_for("free seats", lambda: pairs.counted("router", "springtide_router_in_flight") == 0)


def test_a_prefill_pool_without_workers(pairs: FaultStack) -> None:
    """F40: its workers drain under load; whole requests go to decode workers until there is a prefill worker again."""
    before, tripped = starts_of(pairs), trips(pairs)

    async def drained() -> list[load.Result]:
        prefill_pool(pairs, 0)
        waiting = asyncio.ensure_future(until("no prefill worker", lambda: routable(pairs, PREFILL) == 0))
        results: list[load.Result] = []
        while not waiting.done():
            results += await many(pairs, 50, f"drained {len(results)}")
        await waiting
        return results

    results = uvloop.run(drained())
    assert all(result.exact for result in results), next(r for r in results if not r.exact)
    alone = counted(pairs, "decode_alone")
    results = uvloop.run(many(pairs, 30, "alone"))
    assert all(result.exact for result in results), next(r for r in results if not r.exact)
    assert counted(pairs, "decode_alone") - alone == 30
    prefill_pool(pairs, 2)
    wait_for("prefill workers", lambda: routable(pairs, PREFILL) == 2, 60)
    paired = counted(pairs, "paired")
    results = uvloop.run(many(pairs, 10, "again"))
    assert all(result.exact for result in results), next(r for r in results if not r.exact)
    assert counted(pairs, "paired") - paired == 10
    assert (starts_of(pairs), trips(pairs)) == (before, tripped)
