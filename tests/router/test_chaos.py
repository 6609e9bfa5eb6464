"""Engines killed by SIGKILL under load: unseen before the first token, explicit after it (RT5, RT6)."""

import asyncio
import contextlib
import json
import random
from pathlib import Path

from nodeagent.engines.sim.tokens import answer_text
from router.core.seat import Seat
from springtide.model.routing import RoutingDelta
from tests.dataplane.fakes import Client, client, dechunk, post, until
from tests.router.fakes import Router, router, sim_engine, table, worker

TOKENS = 30


async def ask(c: Client, prompt: str) -> tuple[str, bool, bool]:
    """Text, clean end, explicit error."""
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    c.send(post("/v1/completions", json.dumps(body).encode(), b"connection: close\r\n"))
    head, _, rest = (await c.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    payload, clean = dechunk(rest)
    events = [line[6:] for line in payload.split(b"\n") if line.startswith(b"data: ")]
    done = events[-1] == b"[DONE]"
    parsed = [json.loads(line) for line in events if line != b"[DONE]"]
    error = "error" in parsed[-1]
    text = "".join(e["choices"][0]["text"] for e in parsed if e.get("choices"))
    assert clean is done
    return text, clean, error


async def load(r: Router, rng: random.Random, stop: asyncio.Event) -> tuple[int, int]:
    """Exact answers and explicit errors of clients that ask until told to stop."""
    exact = broken = 0

    async def asker(number: int) -> None:
        nonlocal exact, broken
        i = 0
        while not stop.is_set():
            i += 1
            prompt = f"{number} {i} {rng.random()}"
            async with client(r.http_port) as c:
                text, clean, error = await ask(c, prompt)
            whole = answer_text(prompt, TOKENS)
            if clean:
                assert text == whole
                exact += 1
            else:
                assert error
                assert whole.startswith(text)
                broken += 1

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(asker(number))
    return exact, broken


async def busy(seat: Seat) -> None:
    before = seat.requests_total
    await until(lambda: seat.own >= 2 and seat.requests_total > before + 4, 20)


async def idle(seat: Seat) -> None:
    await until(lambda: seat.own == 0, 10)


async def test_engines_die_under_load(tmp_path: Path) -> None:
    rng = random.Random(7)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        r = await stack.enter_async_context(router(table()))
        revision = 1
        load_task = asyncio.create_task(load(r, rng, stop))

        async def start(name: str, incarnation: int) -> asyncio.subprocess.Process:
            nonlocal revision
            port, process = await stack.enter_async_context(sim_engine(tmp_path, "--decode-base-ms", "5"))
            revision += 1
            r.dispatcher.delta(RoutingDelta("s", revision, workers=(worker(name, port, incarnation),)))
            return process

        processes = {"a": await start("a", 1), "b": await start("b", 1)}
        admission = r.dispatcher.admission
        for round_ in range(2, 6):
            name = "ab"[round_ % 2]
            seat = next(s for s in admission.fleet.all() if s.worker.worker_id == name)
            await busy(seat)
            processes[name].kill()
            await processes[name].wait()
            await idle(seat)
            if round_ % 2:  # sometimes the table says so first, sometimes the new incarnation just appears
                revision += 1
                r.dispatcher.delta(RoutingDelta("s", revision, removed_workers=(name,)))
            processes[name] = await start(name, round_)
        stop.set()
        exact, broken = await asyncio.wait_for(load_task, 30)
        assert exact > 20
        assert r.in_flight == 0
        assert admission.waiting("p") == 0
        assert admission.demand("p").failed_total == broken
        assert admission.demand("p").requests_total == exact + broken
