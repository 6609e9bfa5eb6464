"""--wait: polls until a state is reached, says what moves, and gives up after a bound."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from springtide.cli import text
from springtide.cli.exits import WaitTimedOut
from springtide.cli.invocation import Invocation
from springtide.cli.shape import name_of
from springtide.cli.views import state_of
from springtide.errors import SpringtideError
from springtide.v1.types_pb2 import Pool, Worker

T = TypeVar("T")
POLL_S = 0.3
DEFAULT_TIMEOUT_S = 900.0


async def until(
    invocation: Invocation,
    fetch: Callable[[], Awaitable[T]],
    *,
    reached: Callable[[T], bool],
    shown: Callable[[T], str],
    timeout_s: float,
    target: str,
) -> T:
    """The first fetched value that `reached` accepts. Raises WaitTimedOut, or what `reached` raises."""
    started, last = time.monotonic(), ""
    while True:
        value = await fetch()
        line = shown(value)
        if line != last:
            invocation.progress(f"{text.duration(time.monotonic() - started):>6}  {line}")
            last = line
        if reached(value):
            return value
        if time.monotonic() - started >= timeout_s:
            raise WaitTimedOut(
                f"{target} was not reached in {text.duration(timeout_s)}; now: {line}.",
                remedy="It goes on without you: look again with `springtide status`, or wait longer with --timeout.",
            )
        await asyncio.sleep(POLL_S)


async def pool_at(invocation: Invocation, name: str, workers: int, timeout_s: float) -> Pool:
    """Waits until exactly `workers` are ACTIVE and nothing starts or drains."""

    def reached(pool: Pool) -> bool:
        status = pool.status
        return status.active == workers and not status.starting and not status.draining

    def shown(pool: Pool) -> str:
        status = pool.status
        counts = f"{status.active} active, {status.starting} starting, {status.draining} draining of {workers} wanted"
        return "; ".join([counts, *status.conditions])

    target = f"Pool {name} with {workers} active workers"
    return await until(
        invocation,
        lambda: invocation.client.pool(name),
        reached=reached,
        shown=shown,
        timeout_s=timeout_s,
        target=target,
    )


async def worker_in(invocation: Invocation, worker_id: str, wanted: str, *, never: str, timeout_s: float) -> Worker:
    """Waits for a worker's state `wanted`; a state of `never` means that somebody else changed course.

    Raises SpringtideError too when the worker has no start attempt left.
    """
    pool = await invocation.client.pool((await invocation.client.worker(worker_id)).pool)
    most_attempts = pool.spec.max_start_attempts

    def reached(worker: Worker) -> bool:
        state = name_of(worker, "state")
        if state == never:
            why = f"{worker.reason} {worker.message}".strip()
            raise SpringtideError(
                f"Worker {worker_id} went to {state_of(worker)} instead of {wanted}: {why}",
                reason="WAIT_OVERTAKEN",
                remedy="Look at `springtide events`.",
            )
        if wanted == "ACTIVE" and name_of(worker, "phase") == "FAILED" and 0 < most_attempts <= worker.attempts:
            look = f"Read the end of its log (`springtide workers {worker_id}`)"
            raise SpringtideError(
                f"Worker {worker_id} did not start {worker.attempts} times in a row: {worker.reason} {worker.message}",
                reason="START_ATTEMPTS_EXHAUSTED",
                remedy=f"{look}, correct the pool, activate it again.",
            )
        return state == wanted

    def shown(worker: Worker) -> str:
        parts = [state_of(worker), worker.reason, worker.message]
        if name_of(worker, "state") == "DRAINING":
            parts.append(f"{worker.in_flight if worker.HasField('in_flight') else text.UNKNOWN} in-flight")
        return "  ".join(filter(None, parts))

    target = f"State {wanted} of worker {worker_id}"
    fetch = invocation.client.worker
    return await until(
        invocation, lambda: fetch(worker_id), reached=reached, shown=shown, timeout_s=timeout_s, target=target
    )
