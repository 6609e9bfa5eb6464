"""Workers that are lost, stand still or are dead, seen from a client: real processes, one stack for all of the module.

RT5 RT6 RT8, F5 F6 F8 F11 F23 F31 F32.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import uvloop

from tests.continuation.test_explicit import BARRED
from tests.continuation.world import CHAT, TEXT, Told, ask
from tests.faults.blows import FaultStack, engine_metrics, wait_for
from tests.faults.conftest import TIMING
from tests.system import load
from tests.system.trace import Arrival

CONTINUED = "springtide_router_continuations_total"
ENGINE = ("--startup-s", "0.1", "--decode-base-ms", "10", "--decode-per-request-ms", "0.05", "--max-num-seqs", "512")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    folder = tmp_path_factory.mktemp("losses")
    stack = FaultStack(folder, gpus=2, timing=TIMING, router_config="[timeouts]\nidle_timeout_s = 2.0\n")
    try:
        stack.start()
        stack.pool(workers=2, most=2, engine_args=ENGINE, max_start_attempts=50)
        yield stack
    finally:
        stack.stop()
        assert stack.strays() == []


@pytest.fixture
def losing(module_stack: FaultStack) -> Iterator[FaultStack]:
    """Two workers; what a test took is replaced before the next one."""
    module_stack.check_whole(active=2, timeout_s=60)
    yield module_stack
    module_stack.check_whole(active=2, timeout_s=60)


@asynccontextmanager
async def streams(stack: FaultStack, bodies: list[tuple[str, dict[str, Any]]]) -> AsyncIterator[list[Told]]:
    """Gives control once each stream has tokens; at the end of the block, what each was told."""
    seen = dict.fromkeys(range(len(bodies)), 0)
    told: list[Told] = []

    def progress(at: int) -> Callable[[int], None]:
        return lambda events: seen.update({at: events})

    asking = [
        asyncio.ensure_future(ask(stack.http_port, path, {"model": "demo", **body}, progress=progress(at)))
        for at, (path, body) in enumerate(bodies)
    ]
    async with asyncio.timeout(60):
        while min(seen.values()) < 4 and not any(task.done() for task in asking):
            await asyncio.sleep(0.01)
        yield told
        told += await asyncio.gather(*asking)


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": "tide"}], "max_tokens": 400, "temperature": 0, **fields}


def test_what_cannot_be_continued_ends_with_the_reason(losing: FaultStack) -> None:
    """F31: guided decoding, seeds, penalties, tools, reasoning, images and all the others, under killed engines."""
    bodies = [
        (path, {**({"prompt": "tide"} if path == TEXT else chat()[1]), "max_tokens": 400, "temperature": 0, **fields})
        for path, fields, _ in BARRED
    ]
    engines = [losing.pid("engine", worker.worker_id) for worker in losing.workers("ACTIVE")]

    async def killed() -> list[Told]:
        async with streams(losing, bodies) as told:
            for engine in engines:
                os.kill(engine, signal.SIGKILL)
        return told

    for one, (_, fields, why) in zip(uvloop.run(killed()), BARRED, strict=True):
        assert f"cannot be continued: {why}" in one.error, fields
        assert one.status == 200
        assert one.text
        assert not one.done
        assert not one.clean
    assert losing.counted("router", CONTINUED, result="not_continuable") == len(BARRED)


def test_a_stalled_engine_is_left(losing: FaultStack) -> None:
    """F32: no token for the set time: each stream goes on at the other worker, and its booking is released."""
    victim = losing.workers("ACTIVE")[0].worker_id
    before = losing.counted("router", CONTINUED, reason="stalled", result="exact")

    async def stalled() -> tuple[Told, list[Told]]:
        undisturbed = await ask(losing.http_port, CHAT, {"model": "demo", **chat()[1]})
        async with streams(losing, [chat()] * 12) as told:
            await asyncio.to_thread(losing.inject, victim, kind="hang", scope="engine", duration_s=8)
        return undisturbed, told

    undisturbed, told = uvloop.run(stalled())
    assert all((one.text, one.finish, one.error) == (undisturbed.text, ["length"], "") for one in told)
    assert losing.counted("router", CONTINUED, reason="stalled", result="exact") - before >= 4
    assert losing.counted("router", "springtide_router_in_flight") == 0


def test_a_dead_worker_slows_nobody(losing: FaultStack) -> None:
    """F5 F11: nobody says that it is dead, since its agent stands still: the breaker does. Each request is answered
    elsewhere, and few of them are tried there at all."""
    dead = losing.workers("ACTIVE")[0].worker_id
    pids = [losing.pid("shim", dead), losing.pid("guard", dead)]
    with losing.stopped(losing.pid("nodeagent")):
        before = losing.counted("router", "springtide_router_retries_total")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for("its end", lambda: not any(psutil.pid_exists(pid) and _runs(pid) for pid in pids))

        async def requests() -> list[load.Result]:
            gate = asyncio.Semaphore(4)

            async def one(number: int) -> load.Result:
                async with gate:
                    return await load.ask(losing.http, "demo", Arrival(number, 0, 10, 5), salt="dead")

            return await asyncio.gather(*(one(number) for number in range(150)))

        results = uvloop.run(requests())
        assert all(result.exact for result in results)
        tried = losing.counted("router", "springtide_router_retries_total") - before
        assert 1 <= tried <= 15, "a worker that just failed is asked again and again"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_client_that_leaves_is_gone_at_the_engine(losing: FaultStack) -> None:
    """F6 F23: by the engine's own metrics. It makes a token every 10 ms: within one second not more than 100 of each
    stream are made for nobody; one that goes on would make thousands."""
    worker_ids = [worker.worker_id for worker in losing.workers("ACTIVE")]

    def engines(name: str) -> float:
        return sum(engine_metrics(losing, worker_id).get(name, 0.0) for worker_id in worker_ids)

    async def leave() -> int:
        """Tokens that came before it left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", losing.http_port)
        body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 15_000, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        got = b""
        while got.count(b"data: ") < 10:
            got += await asyncio.wait_for(reader.read(65536), 20)
        writer.close()
        return got.count(b"data: ")

    async def all_leave() -> int:
        return sum(await asyncio.gather(*(leave() for _ in range(10))))

    before = engines("vllm:generation_tokens_total")
    told = uvloop.run(all_leave())
    wait_for("nothing running", lambda: engines("vllm:num_requests_running") == 0, 20, 0.02)
    made_for_nobody = engines("vllm:generation_tokens_total") - before - told
    assert made_for_nobody <= 10 * 100
    assert losing.counted("router", "springtide_router_in_flight") == 0


def test_a_thousand_streams_at_a_time(losing: FaultStack) -> None:
    """F8: all of them at once are answered, and a second thousand needs no more memory than the first."""
    router = psutil.Process(losing.pid("router"))

    async def thousand(first: int) -> list[load.Result]:
        return await asyncio.gather(
            *(load.ask(losing.http, "demo", Arrival(first + n, 0, 10, 12), salt="many") for n in range(1000))
        )

    sizes = []
    for first in (0, 1000):
        results = uvloop.run(thousand(first))
        assert all(result.exact for result in results), next(r for r in results if not r.exact)
        sizes.append(router.memory_info().rss // 1024)
    assert sizes[1] <= sizes[0] + 20_000
