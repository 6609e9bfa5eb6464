"""Engines killed with SIGKILL at random tokens, again and again, under hundreds of streams: every answer is exact.

RT5 RT6, F1 F3 F5: real processes and the engine's oracle; a token lost, doubled or out of order anywhere shows.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from tests.faults.blows import ENGINE, FaultStack
from tests.faults.conftest import TIMING
from tests.system import load
from tests.system.load import Result
from tests.system.trace import Arrival

STREAMS, AT_A_TIME, LOSSES, KILLS_AT_MOST = 240, 48, 200, 60
CONTINUED = "springtide_router_continuations_total"


@pytest.fixture
def deadly(tmp_path: Path) -> Iterator[FaultStack]:
    """A stream may be continued as often as it is lost."""
    timing = {**TIMING, "start_backoff_s": 0.1, "start_backoff_max_s": 0.3}
    stack = FaultStack(tmp_path, gpus=4, timing=timing, router_config="max_continuations = 100\n")
    try:
        yield stack.start()  # type: ignore[misc]
    finally:
        stack.stop()
        assert stack.strays() == []


def kill_on(stack: FaultStack, over: asyncio.Event) -> int:
    """Kills one engine after another until enough streams were lost, or all are over."""
    rng = random.Random(41)
    kills = 0
    while not over.is_set() and kills < KILLS_AT_MOST:
        time.sleep(rng.uniform(0.05, 0.4))
        folders = sorted((stack.folder / "agent" / "workers").iterdir())
        try:
            os.kill(stack.pid("engine", rng.choice(folders).name), signal.SIGKILL)
            kills += 1
        except (OSError, KeyError, IndexError, ValueError, psutil.Error):
            continue  # it is dead already
        if kills % 5 == 0 and stack.counted("router", CONTINUED, result="exact") >= LOSSES:
            break
    return kills


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hundreds_of_losses_and_every_answer_is_exact(deadly: FaultStack) -> None:
    stack = deadly
    stack.pool(workers=4, engine_args=ENGINE, max_start_attempts=100)
    rng = random.Random(40)
    arrivals = [Arrival(number, 0, 20, rng.randrange(50, 200)) for number in range(STREAMS)]

    async def all_of_them() -> tuple[list[Result], int]:
        gate, over = asyncio.Semaphore(AT_A_TIME), asyncio.Event()

        async def one(arrival: Arrival) -> Result:
            async with gate:
                return await load.ask(stack.http, "demo", arrival, salt="kills", timeout_s=120)

        killing = asyncio.create_task(asyncio.to_thread(kill_on, stack, over))
        results = await asyncio.gather(*map(one, arrivals))
        over.set()
        return results, await killing

    results, kills = uvloop.run(all_of_them())
    assert all(result.exact for result in results), next(r for r in results if not r.exact)
    assert kills >= 10
    assert stack.counted("router", CONTINUED, result="exact") >= LOSSES / 2
    assert stack.counted("router", CONTINUED, result="failed") == 0
    stack.check_whole(active=4, timeout_s=60)
