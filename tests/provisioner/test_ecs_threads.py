"""Calls of ECS that hang: their threads are few and end by themselves, and what they say late is heard by nobody."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.context import ProviderContext
from provisioner.core.provider import GroupOrder, OutcomeUnknown, Phase
from provisioner.ecs import create
from provisioner.ecs.calls import MAX_THREADS
from provisioner.ecs.provider import EcsProvider
from provisioner.ecs.settings import EcsSettings
from provisioner.ecs.tasks import tags

BOUND_S = 30.0


class HangingEcs:
    """Answers of ECS from memory. Calls of `hangs` wait for `go_on`; each remembers its answer when it begins."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.hangs = ""
        self.begun = threading.Semaphore(0)
        self.tasks: list[str] = []
        self.lock = threading.Lock()
        self.running = self.most_running = 0

    def _answer(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        if self.hangs == name:
            self.begun.release()
            assert self.go_on.wait(2 * BOUND_S)
        with self.lock:
            self.running -= 1
        return answer

    def list_tasks(self, **_: Any) -> dict[str, Any]:
        return self._answer("list_tasks", {"taskArns": list(self.tasks)})

    def describe_tasks(self, tasks: list[str], **_: Any) -> dict[str, Any]:
        found = [{"taskArn": arn, "lastStatus": "RUNNING", "tags": tags("p1", arn, arn, "ecs")} for arn in tasks]
        return self._answer("describe_tasks", {"tasks": found})

    def run_task(self, **_: Any) -> dict[str, Any]:
        return self._answer("run_task", {"tasks": [{"taskArn": "late"}], "failures": []})

    def close(self) -> None:
        """boto3 has it."""


@pytest.fixture
def ecs() -> Iterator[HangingEcs]:
    found = HangingEcs()
    yield found
    found.go_on.set()


@pytest.fixture
def provider(ecs: HangingEcs, tmp_path: Path) -> EcsProvider:
    settings = EcsSettings(task_definition="agent", max_nodes=4)
    return EcsProvider(settings, ProviderContext("p1", tmp_path, "10.0.0.1:7400"), ecs)


async def given_up(call: Any, ecs: HangingEcs) -> None:
    """Begins it, and cancels it, as the runner's time-out does, once ECS has been asked."""
    task = asyncio.create_task(call)
    async with asyncio.timeout(BOUND_S):
        while not ecs.begun.acquire(blocking=False):
            await asyncio.sleep(0.005)
            if task.done():
                task.result()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_calls_that_hang_hold_a_few_threads_and_no_more(provider: EcsProvider, ecs: HangingEcs) -> None:
    """PV1, rule 10: each look hangs and is given up; from the fifth on none is begun until one has ended."""
    ecs.hangs = "list_tasks"
    for _ in range(MAX_THREADS):
        await given_up(provider.list(), ecs)
    for _ in range(8):
        with pytest.raises(OutcomeUnknown, match="earlier calls"):
            async with asyncio.timeout(BOUND_S):
                await provider.list()
    assert ecs.most_running == MAX_THREADS
    ecs.hangs = ""
    ecs.go_on.set()
    ecs.tasks = ["now"]
    async with asyncio.timeout(BOUND_S):
        while True:
            with contextlib.suppress(OutcomeUnknown):
                (node,) = await provider.list()
                break
            await asyncio.sleep(0.01)
    assert (node.node_id, node.phase) == ("now", Phase.RUNNING)
    await provider.close()


async def test_a_late_answer_is_not_taken_for_a_new_one(provider: EcsProvider, ecs: HangingEcs) -> None:
    """PV1, PV7: a look that was given up ends in the middle of the next one: that one says what it was told itself."""
    ecs.tasks, ecs.hangs = ["old"], "list_tasks"
    await given_up(provider.list(), ecs)
    ecs.tasks, ecs.hangs = ["new"], "describe_tasks"
    looking = asyncio.create_task(provider.list())
    async with asyncio.timeout(BOUND_S):
        while not ecs.begun.acquire(blocking=False):
            await asyncio.sleep(0.005)
        ecs.go_on.set()  # both go on
        found = await looking
    assert [node.node_id for node in found] == ["new"]
    await provider.close()


async def test_a_start_that_was_given_up_is_looked_up(provider: EcsProvider, ecs: HangingEcs) -> None:
    """PV7: it has its effect later: then it is listed, and the repeated order starts nothing."""
    order = GroupOrder("late", "ecs", ("late",))
    ecs.hangs = "run_task"
    await given_up(provider.start(order), ecs)
    ecs.hangs = ""
    assert await provider.list() == []
    ecs.go_on.set()
    ecs.tasks = ["late"]
    ecs.hangs = "run_task"
    ecs.go_on.clear()
    async with asyncio.timeout(BOUND_S):
        await provider.start(order)
    assert not ecs.begun.acquire(blocking=False)
    await provider.close()


async def test_a_thread_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PV1: a server that takes the connection and never answers: the call that was given up ends at its read time-out,
    and nobody waits for it."""
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        plain = {"task_definition": "agent", "endpoint_url": address, "connect_timeout_s": 5.0, "read_timeout_s": 0.5}
        provider = create(plain, ProviderContext("p1", tmp_path, "10.0.0.1:7400"))
        assert isinstance(provider, EcsProvider)
        looking = asyncio.create_task(provider.list())
        async with asyncio.timeout(BOUND_S):
            while not provider._blocking.running:
                await asyncio.sleep(0.005)
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            while provider._blocking.running:
                await asyncio.sleep(0.01)
            with pytest.raises(OutcomeUnknown, match=r"[Tt]imeout"):
                await provider.list()
        await provider.close()
