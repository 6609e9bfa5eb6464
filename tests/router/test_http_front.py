"""The OpenAI front against scripted workers and simulated engines (RT2-RT6, RT8, RT13; F4-F6, F11, F37)."""

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from nodeagent.engines.sim.tokens import answer_text, render_chat
from router.config import Timeouts
from springtide.dataplane import Route
from springtide.model.routing import RoutedPool, RoutingDelta
from tests.dataplane.fakes import (
    DONE,
    LAST,
    SSE_HEAD,
    Client,
    Peer,
    Recorder,
    Script,
    chunk,
    client,
    dechunk,
    event,
    post,
    relay,
    says,
    stream_of,
    until,
    upstream,
)
from tests.router.fakes import POOL, router, sim_engine, table, worker

STREAM = b'{"model": "m", "stream": true, "prompt": "x"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nx-springtide-refusal: %b\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}"
)


async def error_of(c: Client) -> tuple[int, bytes, dict[str, object]]:
    head = await c.head()
    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
    return int(head.split(b" ")[1]), head, json.loads(await c.exactly(length))["error"]


async def stream(c: Client, body: bytes = STREAM, extra: bytes = b"") -> bytes:
    c.send(post("/v1/completions", body, extra))
    assert (await c.head()).startswith(b"HTTP/1.1 200")
    return await c.chunks()


async def test_openai_client_against_simulated_engines(tmp_path: Path) -> None:
    """RT1, RT2: chat and completions, stream and not, models; both workers serve."""
    async with (
        sim_engine(tmp_path) as (a, _),
        sim_engine(tmp_path) as (b, _),
        router(table(worker("a", a), worker("b", b))) as r,
    ):
        api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.http_port}/v1", api_key="x", max_retries=0)
        assert [m.id for m in (await api.models.list()).data] == ["m"]
        expected = answer_text(render_chat([{"role": "user", "content": "tide"}]), 6)
        messages: Any = [{"role": "user", "content": "tide"}]
        for _ in range(2):
            whole = await api.chat.completions.create(model="m", messages=messages, max_tokens=6)
            assert whole.choices[0].message.content == expected
            parts: Any = await api.chat.completions.create(model="m", messages=messages, max_tokens=6, stream=True)
            assert "".join([p.choices[0].delta.content or "" async for p in parts]) == expected
        done = await api.completions.create(model="m", prompt="ebb", max_tokens=5)
        assert done.choices[0].text == answer_text("ebb", 5)
        with pytest.raises(openai.NotFoundError, match="Known: m"):
            await api.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await api.completions.create(model="m", prompt="x", max_tokens=-1)
        await api.close()
        seats = list(r.dispatcher.admission.fleet.all())
        assert [seat.own for seat in seats] == [0, 0]
        assert all(seat.requests_total >= 2 for seat in seats)


async def test_bytes_pass_untouched_and_ids_go_both_ways() -> None:
    """RT13"""
    body = b'{"model":"m","stream":true,"stop":["<|im_end|>","\\u2603"],"unknown":{"x":[1]},  "prompt":"<|a|>"}'
    async with (
        upstream(says(stream_of(2))) as up,
        router(table(worker("a", up.port, 77))) as r,
        client(r.http_port) as c,
    ):
        c.send(post("/v1/completions", body, b"x-request-id: mine\r\nx-springtide-incarnation: 1\r\n"))
        assert b"x-request-id: mine\r\n" in await c.head()
        assert await c.chunks() == event(0) + event(1) + DONE
        assert up.requests[0].body == body
        assert b"x-springtide-incarnation: 77\r\n" in up.requests[0].head
        assert b"x-request-id: mine\r\n" in up.requests[0].head
        c.send(post("/v1/completions", STREAM, b"x-request-id: bad id\r\n"))
        head = await c.head()
        assert b"x-request-id: " in head
        assert b"bad id" not in head


async def test_the_pools_name_stands_for_the_served_name() -> None:
    async with upstream(says(stream_of(1))) as up, router(table(worker("a", up.port))) as r:
        async with client(r.http_port) as c:
            await stream(c, b'{"model": "p", "stream": true}')
            await stream(c, b'{"stream": true}')
        assert json.loads(up.requests[0].body)["model"] == "m"


@pytest.mark.parametrize(
    ("request_bytes", "status", "field"),
    [
        (post("/v1/completions", b'{"model": "x"}'), 404, "model"),
        (post("/v1/completions", b"{"), 400, "body"),
        (post("/v1/completions", b"[]"), 400, "body"),
        (post("/v1/completions", b'{"model": 3}'), 400, "model"),
        (post("/v1/nothing", b"{}"), 404, None),
        (post("/v1/models", b"{}"), 405, None),
        (b"GET /v1/completions HTTP/1.1\r\nhost: t\r\n\r\n", 405, None),
        (b"GET /v1/models/x HTTP/1.1\r\nhost: t\r\n\r\n", 404, "model"),
        (b"GET /sleep HTTP/1.1\r\nhost: t\r\n\r\n", 404, None),
    ],
)
async def test_bad_requests_have_openais_error_shape(request_bytes: bytes, status: int, field: str | None) -> None:
    async with router(table()) as r, client(r.http_port) as c:
        c.send(request_bytes)
        got, _, error = await error_of(c)
        assert (got, error["param"]) == (status, field)
        assert error["message"]
        assert error["type"] == "invalid_request_error"


async def test_before_the_first_table_it_is_a_503() -> None:
    async with router() as r, client(r.http_port) as c:
        c.send(post("/v1/completions", STREAM))
        status, head, _ = await error_of(c)
        assert status == 503
        assert b"retry-after: 1\r\n" in head
        c.send(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await c.answer())[0] == 503
        c.send(b"GET /healthz HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await c.answer())[0] == 200
        r.dispatcher.snapshot(table())
        c.send(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await c.answer())[0] == 200


async def test_no_worker_ever_and_a_full_queue_are_refused_with_retry_after() -> None:
    """RT3"""
    never = RoutedPool("z", "zero", max_workers=0)
    start = table(pool=replace(POOL, max_waiting=1))
    start = replace(start, pools={**start.pools, "z": never})
    async with router(start) as r, client(r.http_port) as c, client(r.http_port) as waiting:
        c.send(post("/v1/completions", b'{"model": "zero"}'))
        status, head, error = await error_of(c)
        assert (status, error["code"]) == (503, "pool_at_zero")
        assert b"retry-after: " in head
        waiting.send(post("/v1/completions", STREAM))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        c.send(post("/v1/completions", STREAM))
        status, head, error = await error_of(c)
        assert (status, error["code"]) == (429, "queue_full")
        assert b"retry-after: " in head


async def test_waiting_ends_in_a_503() -> None:
    """RT3"""
    async with router(table(pool=replace(POOL, waiting_timeout_s=0.2))) as r, client(r.http_port) as c:
        c.send(post("/v1/completions", STREAM))
        status, head, error = await error_of(c)
        assert (status, error["code"]) == (503, "waiting_timeout")
        assert b"retry-after: " in head


async def test_from_zero_the_request_is_held_and_dispatched() -> None:
    """RT4, F37"""
    async with upstream(says(stream_of(1))) as up, router(table()) as r, client(r.http_port) as c:
        asking = asyncio.create_task(stream(c))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        r.dispatcher.delta(RoutingDelta("s", 2, workers=(worker("a", up.port),)))
        assert await asking == event(0) + DONE
        assert r.in_flight == 0


async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async with upstream(says(stream_of(1))) as up, router(table()) as r:
        async with client(r.http_port) as c:
            c.send(post("/v1/completions", STREAM))
            await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        await until(lambda: r.dispatcher.admission.waiting("p") == 0)
        r.dispatcher.delta(RoutingDelta("s", 2, workers=(worker("a", up.port),)))
        assert r.in_flight == 0
        assert not up.requests


@pytest.mark.parametrize("reason", [b"draining", b"incarnation", b"full", b"paused", b"gone"])
async def test_a_refusing_worker_is_unseen_by_the_client(reason: bytes) -> None:
    """F4, RT9: the shim's refusal is what safety rests on."""
    async with (
        upstream(says(REFUSAL % reason)) as bad,
        upstream(says(stream_of(1))) as good,
        router(table(worker("a", bad.port), worker("b", good.port))) as r,
    ):
        async with client(r.http_port) as c:
            for _ in range(4):
                assert await stream(c) == event(0) + DONE
        assert len(good.requests) == 4
        if reason != b"full":
            assert len(bad.requests) == 1
        assert r.in_flight == 0


async def test_full_everywhere_waits_and_goes_on() -> None:
    """RT4: work waits in the router."""
    async with (
        upstream(says(REFUSAL % b"full"), says(REFUSAL % b"full"), says(stream_of(1))) as up,
        router(table(worker("a", up.port))) as r,
        client(r.http_port) as c,
    ):
        assert await stream(c) == event(0) + DONE
        assert len(up.requests) == 3


async def test_the_limit_of_a_worker_is_kept_and_the_rest_waits_in_order() -> None:
    gate = asyncio.Event()
    running = most = 0

    async def script(peer: Peer) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        await peer.send(stream_of(1))

    async with upstream(script) as up, router(table(worker("a", up.port, max_in_flight=2))) as r:

        async def one() -> bytes:
            async with client(r.http_port) as c:
                return await stream(c)

        asking = [asyncio.create_task(one()) for _ in range(6)]
        await until(lambda: r.dispatcher.admission.waiting("p") == 4 and running == 2)
        gate.set()
        assert await asyncio.gather(*asking) == [event(0) + DONE] * 6
        assert most == 2


@pytest.mark.parametrize(
    "broken",
    [
        says(b"", close=True),
        says(SSE_HEAD, close=True),
        says(SSE_HEAD + chunk(b'data: {"error": {"message": "dead", "code": 500}}\n\n') + chunk(DONE) + LAST),
        says(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\ndead"),
    ],
)
async def test_a_fault_before_the_first_token_is_unseen(broken: Script) -> None:
    """RT5, F11"""
    async with (
        upstream(broken) as bad,
        upstream(says(stream_of(2))) as good,
        router(table(worker("a", bad.port), worker("b", good.port))) as r,
        client(r.http_port) as c,
    ):
        assert await stream(c) == event(0) + event(1) + DONE
        assert (len(bad.requests), len(good.requests)) == (1, 1)
        assert r.in_flight == 0


async def test_a_dead_worker_does_not_slow_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = taken.getsockname()[1]
    async with (
        upstream(says(stream_of(1))) as good,
        router(table(worker("a", dead), worker("b", good.port))) as r,
        client(r.http_port) as c,
    ):
        for _ in range(10):
            assert await stream(c) == event(0) + DONE
        dead_seat = next(s for s in r.dispatcher.admission.fleet.all() if s.worker.worker_id == "a")
        assert dead_seat.requests_total <= 3


async def test_a_fault_with_nobody_else_waits_for_the_replacement() -> None:
    """RT5: shim or engine killed before the first token: the client sees nothing of it."""
    async with (
        upstream(says(b"", close=True)) as dying,
        upstream(says(stream_of(1))) as fresh,
        router(table(worker("a", dying.port))) as r,
        client(r.http_port) as c,
    ):
        asking = asyncio.create_task(stream(c))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        r.dispatcher.delta(RoutingDelta("s", 2, removed_workers=("a",)))
        r.dispatcher.delta(RoutingDelta("s", 3, workers=(worker("a", fresh.port, 2),)))
        assert await asking == event(0) + DONE


async def test_a_shim_whose_engine_died_is_told_from_an_engine_that_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    """RT5: behind a shim too, the request waits for the replacement however long the table takes to say so."""
    monkeypatch.setattr("router.core.admission.DOUBT_S", 0.1)
    async with upstream(says(b"", close=True), says(b"", close=True), says(stream_of(1))) as engine:
        shim_director = Recorder(lambda r: Route(engine.address))
        async with (
            relay(shim_director) as (_, shim_port),
            router(table(worker("a", shim_port))) as r,
            client(r.http_port) as c,
        ):
            assert await stream(c) == event(0) + DONE
            assert len(engine.requests) == 3


async def test_an_engines_own_fault_is_passed_on_where_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.core.admission.DOUBT_S", 0.2)
    bad = says(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\nx-a: b\r\n\r\ndead")
    async with upstream(bad) as up, router(table(worker("a", up.port))) as r, client(r.http_port) as c:
        c.send(post("/v1/completions", STREAM))
        head = await c.head()
        assert head.startswith(b"HTTP/1.1 500")
        assert b"x-a: b" in head
        assert await c.exactly(4) == b"dead"
        assert len(up.requests) == 1


async def test_after_the_first_token_an_explicit_error_and_no_retry() -> None:
    """RT5"""
    async with (
        upstream(says(SSE_HEAD + chunk(event(0)), close=True)) as bad,
        upstream(says(stream_of(1))) as good,
        router(table(worker("a", bad.port), worker("b", good.port))) as r,
        client(r.http_port) as c,
    ):
        c.send(post("/v1/completions", STREAM))
        await c.head()
        payload, clean = dechunk(await c.rest())
        assert payload.startswith(event(0) + b'data: {"error":')
        assert b"[DONE]" not in payload
        assert not clean
        assert not good.requests
        assert r.dispatcher.admission.demand("p").failed_total == 1


async def test_attempts_are_bounded() -> None:
    """F11"""
    bad = [says(b"", close=True)]
    async with upstream(*bad) as x, upstream(*bad) as y, upstream(*bad) as z:
        workers = [worker(name, up.port) for name, up in (("x", x), ("y", y), ("z", z))]
        async with router(table(*workers), max_attempts=2) as r, client(r.http_port) as c:
            c.send(post("/v1/completions", STREAM))
            status, _, error = await error_of(c)
            assert (status, error["type"]) == (502, "upstream_eof")
            assert len(x.requests) + len(y.requests) + len(z.requests) == 2


async def test_a_stalled_stream_is_cut_and_told() -> None:
    """F32, RT11"""

    async def script(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)))
        await peer.closed()

    async with (
        upstream(script) as up,
        router(table(worker("a", up.port)), timeouts=Timeouts(idle_timeout_s=0.2)) as r,
        client(r.http_port) as c,
    ):
        c.send(post("/v1/completions", STREAM))
        await c.head()
        payload, clean = dechunk(await c.rest())
        assert b'"error"' in payload
        assert not clean
        assert r.in_flight == 0


async def test_a_client_that_leaves_frees_its_seat(tmp_path: Path) -> None:
    """RT8, RT6: measured at the engine too."""
    async with sim_engine(tmp_path, "--decode-base-ms", "20") as (port, _), router(table(worker("a", port))) as r:
        async with client(r.http_port) as c:
            c.send(post("/v1/completions", b'{"model":"m","prompt":"x","stream":true,"max_tokens":2000}'))
            await c.head()
            assert r.in_flight == 1
        await until(lambda: r.in_flight == 0)

        async def running() -> bool:
            async with client(port) as c:
                c.send(b"GET /metrics HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
                lines = (await c.rest()).split(b"\n")
            found = [line for line in lines if line.startswith(b"vllm:num_requests_running")]
            assert found
            return not found[0].rstrip().endswith((b" 0", b" 0.0"))

        end = asyncio.get_running_loop().time() + 5
        while await running():
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.02)


async def test_metrics_tell_what_happened() -> None:
    async with (
        upstream(says(b"", close=True)) as bad,
        upstream(says(stream_of(3))) as good,
        router(table(worker("a", bad.port), worker("b", good.port))) as r,
        client(r.http_port) as c,
    ):
        await stream(c)
        registry = r.dispatcher.metrics.registry

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"springtide_router_{name}", labels)

        assert value("requests_total", pool="p", front="http", outcome="ok") == 1
        assert value("retries_total", pool="p", cause="upstream_eof") == 1
        assert value("events_total", pool="p") == 3
        assert value("time_to_first_token_seconds_count", pool="p") == 1
        assert value("in_flight", pool="p", worker="b") == 0
        assert value("waiting", pool="p") == 0
        assert value("workers", pool="p") == 2
