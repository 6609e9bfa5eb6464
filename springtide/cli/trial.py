"""test: real generations to every pool, with a table of latencies and failures."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from springtide.cli import text
from springtide.cli.exits import Exit
from springtide.cli.invocation import Invocation, command
from springtide.errors import NotFound, SpringtideError
from springtide.v1.generation_pb2 import Finished, Tokens

PROMPT = "Count from one to ten."


@dataclass(slots=True)
class Result:
    """What the requests to one pool gave. Times in seconds."""

    pool: str
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def requests(self) -> int:
        return len(self.total_s) + self.failures.total()


@click.command("test")
@click.option("--pool", "pools", multiple=True, help="Only this pool; may be repeated. All pools unless given.")
@click.option("--requests", type=click.IntRange(min=1), default=1, show_default=True, help="To each pool.")
@click.option("--concurrency", type=click.IntRange(min=1, max=4096), default=1, show_default=True)
@click.option("--prompt", default=PROMPT, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--timeout", "timeout_s", type=float, default=300.0, show_default=True, help="Seconds for one request.")
@command
async def test(
    invocation: Invocation,
    pools: tuple[str, ...],
    requests: int,
    concurrency: int,
    prompt: str,
    max_tokens: int,
    timeout_s: float,
) -> int:
    """Send real generations to every pool and report latencies and failures.

    Exit code 1 when one fails. For a load test: --requests 100 --concurrency 32.
    """
    names = list(pools) or [model.name for model in await invocation.client.models()]
    if not names:
        raise NotFound(kind="pool", name="*")
    results = []
    for name in names:
        invocation.progress(f"{name}: {requests} requests, {min(requests, concurrency)} at a time")
        send = _Sender(invocation, Result(name), prompt, max_tokens, timeout_s)
        results.append(await send.run(requests, concurrency))
    invocation.show([_plain(result) for result in results], _table(results))
    return Exit.REFUSED if any(result.failures for result in results) else Exit.OK


class _Sender:
    def __init__(self, invocation: Invocation, result: Result, prompt: str, max_tokens: int, timeout_s: float) -> None:
        self._client = invocation.client
        self._result = result
        self._options: dict[str, Any] = {"chat": prompt, "max_tokens": max_tokens, "timeout_s": timeout_s}

    async def run(self, requests: int, concurrency: int) -> Result:
        left = iter(range(requests))
        began = time.monotonic()

        async def sender() -> None:
            for _ in left:
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, requests)):
                group.create_task(sender())
        self._result.wall_s = time.monotonic() - began
        return self._result

    async def _one(self) -> None:
        began = time.monotonic()
        first_s: float | None = None
        tokens, counted, finished = 0, None, False
        try:
            async for event in self._client.generate(self._result.pool, **self._options):
                if isinstance(event, Tokens):
                    first_s = first_s if first_s is not None else time.monotonic() - began
                    tokens += 1
                elif isinstance(event, Finished):
                    finished = True
                    counted = event.completion_tokens if event.HasField("completion_tokens") else None
        except SpringtideError as error:
            self._result.failures[error.reason] += 1
            self._result.messages[error.reason] = str(error)
            return
        if not finished:
            self._result.failures["NOT_FINISHED"] += 1
            self._result.messages["NOT_FINISHED"] = "The stream ended without its Finished."
            return
        self._result.total_s.append(time.monotonic() - began)
        self._result.first_token_s.append(first_s if first_s is not None else self._result.total_s[-1])
        self._result.tokens += counted if counted is not None else tokens


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def _table(results: Sequence[Result]) -> str:
    header = ("POOL", "REQUESTS", "FAILED", "FIRST TOKEN p50", "p95", "TOTAL p50", "p95", "TOKENS/S")
    rows = [
        (
            r.pool,
            str(r.requests),
            str(r.failures.total()),
            *(_ms(percentile(r.first_token_s, share)) for share in (0.5, 0.95)),
            *(_ms(percentile(r.total_s, share)) for share in (0.5, 0.95)),
            f"{r.tokens / r.wall_s:.1f}" if r.wall_s else text.UNKNOWN,
        )
        for r in results
    ]
    shown = text.table(header, rows)
    failed = [f"{r.pool}: {n} x {reason}: {r.messages[reason]}" for r in results for reason, n in r.failures.items()]
    return "\n".join([shown, *([""] if failed else []), *failed])


def _ms(seconds: float | None) -> str:
    return text.UNKNOWN if seconds is None else f"{seconds * 1000:.0f} ms"


def _plain(result: Result) -> dict[str, Any]:
    return {
        "pool": result.pool,
        "requests": result.requests,
        "failed": result.failures.total(),
        "failures": [{"reason": k, "count": n, "message": result.messages[k]} for k, n in result.failures.items()],
        "first_token_s": {"p50": percentile(result.first_token_s, 0.5), "p95": percentile(result.first_token_s, 0.95)},
        "total_s": {"p50": percentile(result.total_s, 0.5), "p95": percentile(result.total_s, 0.95)},
        "tokens": result.tokens,
        "wall_s": result.wall_s,
    }
