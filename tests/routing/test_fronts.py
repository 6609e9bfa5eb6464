"""Headers, metadata, statuses and /ready through both fronts; two routers at once on the same workers."""

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from springtide.model.enums import Role
from springtide.model.pool import RoutingSpec
from springtide.model.routing import RoutedPool, RoutingTable, WorkerLoad
from springtide.rpc import decode_error
from springtide.v1 import generation_pb2 as pb
from tests.dataplane.fakes import (
    DONE,
    SSE_HEAD,
    Client,
    Peer,
    chunk,
    client,
    event,
    post,
    says,
    stream_of,
    until,
    upstream,
)
from tests.router.fakes import POOL, control_plane, generation_stub, router, sim_engine, table, worker
from tests.router.test_http_front import STREAM, error_of, stream


async def get(c: Client, target: str) -> tuple[int, dict[str, object], bytes]:
    c.send(f"GET {target} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
    head = await c.head()
    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
    return int(head.split(b" ")[1]), json.loads(await c.exactly(length)), head


async def test_ready_says_whether_to_send_requests_here() -> None:
    """A pool at zero is no reason not to: its first request makes it grow. One model may be asked for."""
    async with router(None) as r, client(r.http_port) as c:
        assert (await get(c, "/ready"))[:2] == (503, {"status": "no routing table yet"})
        assert (await get(c, "/ready?model=m"))[0] == 503
        r.dispatcher.snapshot(table(pool=replace(POOL, start_up_s=42.0)))
        assert (await get(c, "/ready"))[:2] == (200, {"status": "ready"})
        status, body, head = await get(c, "/ready?model=m")
        assert (status, body) == (503, {"status": "no worker is active"})
        assert b"retry-after: 42\r\n" in head
        assert (await get(c, "/ready?model=other"))[0] == 404
        r.dispatcher.snapshot(table(worker("a", 1), revision=2))
        assert (await get(c, "/ready?model=m"))[0] == 200
        r.front.stopping = True
        assert (await get(c, "/ready"))[:2] == (503, {"status": "stopping"})


async def test_a_full_queue_and_a_late_worker_have_their_status_and_time() -> None:
    """RT3: 429 and 503 with what is left of a start; the same in gRPC with RetryInfo."""
    pool = replace(POOL, max_waiting=1, start_up_s=90.0)
    async with router(table(pool=pool)) as r, client(r.http_port) as first, client(r.http_port) as c:
        first.send(post("/v1/completions", STREAM, b"x-deadline-ms: 1500\r\n"))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        c.send(post("/v1/completions", STREAM))
        status, head, error = await error_of(c)
        assert (status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
        assert b"retry-after: 90\r\n" in head
        async with generation_stub(r.grpc_address) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(pb.GenerateRequest(pool="p", prompt="x"), timeout=10):
                    pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert decode_error(caught.value, "router", "x").retry_after_s == 90
        status, head, error = await error_of(first)
        assert (status, error["code"]) == (503, "deadline")
        assert b"retry-after: 8" in head  # 89 or 88: what is left


async def test_priorities_over_http() -> None:
    async with upstream(*[says(stream_of(1))] * 3) as up, router(table()) as r, contextlib.AsyncExitStack() as stack:
        order: list[bytes] = []
        clients = []
        for priority in (b"1", b"5", b"9"):
            c = await stack.enter_async_context(client(r.http_port))
            c.send(
                post(
                    "/v1/completions", STREAM, b"x-priority: " + priority + b"\r\nx-request-id: p" + priority + b"\r\n"
                )
            )
            clients.append(c)
        await until(lambda: r.dispatcher.admission.waiting("p") == 3)
        r.dispatcher.snapshot(table(worker("a", up.port, max_in_flight=1), revision=2))
        for c in clients:
            assert (await c.head()).startswith(b"HTTP/1.1 200")
            assert await c.chunks() == event(0) + DONE
        order = [line for request in up.requests for line in request.head.split(b"\r\n") if b"x-request-id" in line]
        assert order == [b"x-request-id: p9", b"x-request-id: p5", b"x-request-id: p1"]


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (b"x-priority: 11", "x-priority"),
        (b"x-require-labels: zone", "x-require-labels"),
        (b"x-deadline-ms: soon", "x-deadline-ms"),
        (b"x-role: any", "x-role"),
    ],
)
async def test_a_wrong_header_is_a_400_that_names_it(header: bytes, field: str) -> None:
    async with router(table(worker("a", 1))) as r, client(r.http_port) as c:
        c.send(post("/v1/completions", STREAM, header + b"\r\n"))
        status, _, error = await error_of(c)
        assert (status, error["param"]) == (400, field)
        async with generation_stub(r.grpc_address) as stub:
            name, value = header.decode().split(": ")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(pb.GenerateRequest(pool="p", prompt="x"), metadata=[(name, value)]):
                    pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_labels_weight_version_and_session_choose_the_worker() -> None:
    """RT7, RT10, RT13: over HTTP and gRPC."""
    pool = replace(POOL, routing=RoutingSpec("sticky"))
    async with upstream(*[says(stream_of(1))] * 40) as a, upstream(*[says(stream_of(1))] * 40) as b:
        workers = (
            worker("a", a.port, labels={"zone": "x"}, weight_version="step-9"),
            worker("b", b.port, labels={"zone": "y"}, weight_version="step-10"),
        )
        async with router(table(*workers, pool=pool)) as r, client(r.http_port) as c:
            for _ in range(3):
                await stream(c, extra=b"x-require-labels: zone=y\r\n")
                await stream(c, extra=b"x-min-weight-version: step-10\r\n")
            assert (len(a.requests), len(b.requests)) == (0, 6)
            c.send(post("/v1/completions", STREAM, b"x-require-labels: zone=z\r\n"))
            status, _, error = await error_of(c)
            assert (status, error["code"]) == (503, "no_worker_has_labels")
            for _ in range(5):
                await stream(c, extra=b"x-session-id: s\r\n")
            assert sorted((len(a.requests), len(b.requests) - 6)) == [0, 5]
            at = "a" if a.requests else "b"
            async with generation_stub(r.grpc_address) as stub:
                for request, metadata, expected in (
                    (pb.GenerateRequest(pool="p", prompt="x", session_id="s"), [], at),
                    (pb.GenerateRequest(pool="p", prompt="x"), [("x-require-labels", "zone=x")], "a"),
                    (pb.GenerateRequest(pool="p", prompt="x"), [("x-min-weight-version", "step-10")], "b"),
                ):
                    answers = [answer async for answer in stub.Generate(request, metadata=metadata, timeout=20)]
                    assert answers[0].started.worker_id == expected


async def test_a_role_chooses_the_pool() -> None:
    async with upstream(says(stream_of(1))) as pre, upstream(*[says(stream_of(1))] * 2) as dec:
        pools = {
            "pre": RoutedPool("pre", "m", max_workers=1, role=Role.PREFILL),
            "dec": RoutedPool("dec", "m", max_workers=1, role=Role.DECODE),
        }
        workers = {
            "a": replace(worker("a", pre.port), pool="pre"),
            "b": replace(worker("b", dec.port), pool="dec"),
        }
        async with router(RoutingTable("s", 1, pools, workers)) as r, client(r.http_port) as c:
            await stream(c)
            await stream(c, extra=b"x-role: prefill\r\n")
            await stream(c, extra=b"x-role: decode\r\n")
            assert (len(pre.requests), len(dec.requests)) == (1, 2)
            models = (await get(c, "/v1/models"))[1]["data"]
            assert isinstance(models, list)
            assert [model["id"] for model in models] == ["m"]
            assert (await get(c, "/health"))[1]["models"] == {"m": {"active": 2, "waiting": 0}}


async def test_a_broken_worker_is_probed_by_one_request_only() -> None:
    """F11: after its fault one request at a time tells whether it is well; the first token opens it to all."""
    gate = asyncio.Event()

    async def slowly(peer: Peer) -> None:
        await gate.wait()
        await peer.send(stream_of(1))

    async with (
        upstream(says(b"", close=True), slowly, *[says(stream_of(1))] * 9) as up,
        router(table(worker("a", up.port))) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(client(r.http_port)) for _ in range(5)]
        clients[0].send(post("/v1/completions", STREAM))
        await until(lambda: len(up.requests) == 1)
        await until(lambda: r.in_flight == 0)
        for c in clients[1:]:
            c.send(post("/v1/completions", STREAM))
        await until(lambda: len(up.requests) == 2)
        await until(lambda: r.dispatcher.admission.waiting("p") == 4)  # the first one avoids it for a while, too
        await asyncio.sleep(0.4)  # longer than its back-off: nobody else is sent there while the probe runs
        assert len(up.requests) == 2
        gate.set()
        for c in clients[1:]:
            assert (await c.head()).startswith(b"HTTP/1.1 200")
            assert await c.chunks() == event(0) + DONE
        assert len(up.requests) == 5
        assert r.dispatcher.admission.trips("p") == 1


async def test_two_routers_share_the_workers(tmp_path: Path) -> None:
    """Several routers at once: each has a session, a table and counts of its own; loads tell each of the other."""
    async with sim_engine(tmp_path) as (a, _), sim_engine(tmp_path) as (b, _):
        start = table(worker("a", a, max_in_flight=8), worker("b", b, max_in_flight=8))
        async with (
            control_plane(start) as cp,
            router(cp=cp.address) as one,
            router(cp=cp.address) as two,
            client(one.http_port) as c,
            client(two.http_port) as d,
        ):
            await until(lambda: len(cp.streams) == 2)
            await until(lambda: len(cp.acks) >= 2)
            body = b'{"model": "m", "prompt": "ebb", "max_tokens": 2, "stream": true}'
            for _ in range(4):
                assert DONE in await stream(c, body)
                assert DONE in await stream(d, body)
            for r in (one, two):
                counts = Counter({s.worker.worker_id: s.requests_total for s in r.dispatcher.admission.fleet.all()})
                assert counts == {"a": 2, "b": 2}
            cp.loads(WorkerLoad("a", 1, 5), WorkerLoad("b", 1, 0))
            await until(lambda: all(s.others for r in (one, two) for s in r.dispatcher.admission.fleet.of("p")[:1]))
            for r, each in ((one, c), (two, d)):
                before = {s.worker.worker_id: s.requests_total for s in r.dispatcher.admission.fleet.all()}
                await stream(each, body)
                after = {s.worker.worker_id: s.requests_total for s in r.dispatcher.admission.fleet.all()}
                assert after == {**before, "b": before["b"] + 1}


async def test_a_stream_that_waits_from_zero_is_served_when_a_worker_comes() -> None:
    """F37, RT4: held with its priority and session, dispatched at ACTIVE."""

    async def once(peer: Peer) -> None:
        await peer.send(SSE_HEAD + chunk(event(0)) + chunk(DONE) + b"0\r\n\r\n")

    pool = replace(POOL, routing=RoutingSpec("prefix_aware"), starting=1)
    async with upstream(once) as up, router(table(pool=pool)) as r, client(r.http_port) as c:
        c.send(post("/v1/completions", STREAM, b"x-session-id: s\r\nx-priority: 7\r\n"))
        await until(lambda: r.dispatcher.admission.waiting("p") == 1)
        r.dispatcher.snapshot(table(worker("a", up.port), pool=pool, revision=2))
        assert (await c.head()).startswith(b"HTTP/1.1 200")
        assert await c.chunks() == event(0) + DONE
