"""Clients that leave while their stream is between two workers leave nothing behind (RT6, RT8, F23)."""

import asyncio
import json
from typing import Any

import pytest

from springtide.model.routing import RoutingDelta
from tests.continuation.test_exact import TEXT, Script, request
from tests.continuation.world import Cut, World, world
from tests.dataplane.fakes import Client, client, post, until

BYTES = 256 * 1024 * 1024


def clean(w: World) -> bool:
    """Nothing of any request is left."""
    nothing = w.in_flight == 0 and w.dispatcher.admission.waiting("p") == 0
    return nothing and w.dispatcher.continuing.budget.left == BYTES


async def begin(c: Client, **fields: Any) -> None:
    c.send(post(TEXT, json.dumps({**request(TEXT, **fields), "stream": True}).encode()))
    await c.head()


async def test_a_client_leaves_while_no_worker_is_there() -> None:
    script = Script(Cut(4))
    async with world(script, workers=1) as w:
        async with client(w.http_port) as c:
            await begin(c)
            await until(lambda: w.dispatcher.admission.waiting("p") == 1)
            assert not clean(w)
        await until(lambda: clean(w))


async def test_a_client_leaves_while_a_worker_is_asked_for_text() -> None:
    script = Script()
    async with world(script, workers=3, engine_name="vllm") as w:
        for blade in w.blades:
            blade.hold = asyncio.Event()
        script.cuts = [Cut(4)]
        async with client(w.http_port) as c:
            await begin(c, stop=["long stop string"])
            await until(lambda: sum(blade.held for blade in w.blades) == 1)
            assert w.in_flight == 1
        await until(lambda: clean(w))


async def test_a_client_leaves_in_the_next_part() -> None:
    script = Script()
    async with world(script, "--decode-base-ms", "20", workers=3) as w:
        script.cuts = [Cut(4)]
        async with client(w.http_port) as c:
            await begin(c, max_tokens=500)
            await until(lambda: w.count("exact") == 1)
        await until(lambda: clean(w))


@pytest.mark.parametrize("lost", [1, 4])
async def test_the_pool_is_deleted_while_a_stream_waits(lost: int) -> None:
    script = Script(Cut(lost))
    async with world(script, workers=1) as w, client(w.http_port) as c:
        await begin(c)
        await until(lambda: w.dispatcher.admission.waiting("p") == 1)
        w.dispatcher.delta(RoutingDelta("s", 2, removed_pools=("p",), removed_workers=("w0",)))
        told = await c.rest()
        assert b'"error"' in told
        assert b"[DONE]" not in told
        await until(lambda: clean(w))
