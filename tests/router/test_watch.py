"""The watch on the control plane: snapshot, deltas, acknowledgements, reports, last known good (RT4, RT9; F13, F18)."""

import asyncio
from dataclasses import replace

import pytest

from springtide import telemetry
from springtide.model.routing import RoutingTable, WorkerLoad
from tests.dataplane.fakes import DONE, client, event, post, says, stream_of, until, upstream
from tests.router.fakes import POOL, control_plane, router, table, worker
from tests.router.test_http_front import STREAM, stream


async def test_snapshot_and_deltas_are_applied_then_acknowledged() -> None:
    """RT9"""
    async with (
        upstream(says(stream_of(1))) as a,
        upstream(says(stream_of(1))) as b,
        control_plane(table(worker("a", a.port), revision=5)) as cp,
        router(cp=cp.address) as r,
        client(r.http_port) as c,
    ):
        await cp.acked(5)
        assert (cp.hellos[0].router_id, cp.hellos[0].store_id) == ("r1", "")
        await stream(c)
        revision = cp.delta(workers=(worker("b", b.port),), removed_workers=("a",))
        await cp.acked(revision)
        await stream(c)
        assert (len(a.requests), len(b.requests)) == (1, 1)
        cp.loads(WorkerLoad("b", 1, 7))
        await until(lambda: [seat.load for seat in r.dispatcher.admission.fleet.all()] == [6])


async def test_last_known_good_while_the_control_plane_is_away() -> None:
    """F13"""
    async with upstream(says(stream_of(1))) as up, router(cp="127.0.0.1:1") as away, client(away.http_port) as c:
        await until(lambda: away.watch is not None and not away.watch.connected)
        async with control_plane(table(worker("a", up.port))) as cp, router(cp=cp.address) as r:
            await cp.acked(1)
            address = cp.address
            cp.send(None)
            await until(lambda: len(cp.hellos) == 2)
            assert (cp.hellos[1].store_id, cp.hellos[1].revision) == ("s", 1)
        c.send(post("/v1/completions", STREAM))
        assert (await c.answer())[0] == 503
        async with control_plane(table(worker("a", up.port)), address) as cp, router(cp=address) as r:
            await cp.acked(1)
            assert r.watch is not None
            cp.table = RoutingTable("another", 1)
            for queue in list(cp.streams):
                queue.put_nowait(None)
            await until(lambda: len(cp.hellos) == 2)
            await until(lambda: any(ack.store_id == "another" for ack in cp.acks))
            async with client(r.http_port) as served:
                assert await stream(served) == event(0) + DONE
            cp.table = table(worker("a", up.port), store_id="another", revision=1)
            cp.delta(workers=(worker("b", up.port),))  # foreign to the table that was kept: all of it is asked for
            await until(lambda: r.dispatcher.admission.fleet.table.store_id == "another")
            assert set(r.dispatcher.admission.fleet.table.workers) == {"a", "b"}


async def test_the_control_plane_restarts_under_a_running_stream() -> None:
    """The stream lives on; the router reconnects by itself."""
    gate = asyncio.Event()

    async def script(peer) -> None:
        data = stream_of(2)
        await peer.send(data[:150])
        await gate.wait()
        await peer.send(data[150:])

    async with upstream(script) as up, control_plane(table(worker("a", up.port))) as cp:
        address = cp.address
        async with router(cp=address) as r, client(r.http_port) as c:
            await cp.acked(1)
            c.send(post("/v1/completions", STREAM))
            await c.head()
            cp.send(None)
            await until(lambda: len(cp.hellos) >= 2)
            gate.set()
            assert await c.chunks() == event(0) + event(1) + DONE


async def test_the_first_waiting_request_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 12: without waiting for the next regular report, which never comes here."""
    monkeypatch.setattr("router.watch.REPORT_INTERVAL_S", 3600.0)
    async with control_plane(table()) as cp, router(cp=cp.address) as r, client(r.http_port) as c:
        await cp.acked(1)
        c.send(post("/v1/completions", STREAM))
        await until(lambda: cp.reports)
        [first] = cp.reports[0].pools
        assert (first.pool, first.waiting, first.requests_total) == ("p", 1, 1)


async def test_a_rejection_is_told_at_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 12"""
    monkeypatch.setattr("router.watch.REPORT_INTERVAL_S", 3600.0)
    start = table(pool=replace(POOL, max_workers=0))
    async with control_plane(start) as cp, router(cp=cp.address) as r, client(r.http_port) as c:
        await cp.acked(1)
        c.send(post("/v1/completions", STREAM))
        assert (await c.answer())[0] == 503
        await until(lambda: cp.reports)
        [first] = cp.reports[0].pools
        assert (first.waiting, first.rejected) == (0, 1)


async def test_uses_are_exact() -> None:
    """RT6"""
    async with (
        upstream(says(stream_of(1))) as up,
        control_plane(table(worker("a", up.port))) as cp,
        router(cp=cp.address) as r,
    ):
        await cp.acked(1)
        async with client(r.http_port) as c:
            await stream(c)
        await until(lambda: any(u.requests_total == 1 for report in cp.reports for u in report.workers))
        use = next(u for report in cp.reports for u in report.workers if u.requests_total == 1)
        assert (use.worker_id, use.incarnation, use.in_flight, use.failures_total) == ("a", 1, 0, 0)
        ttfts = [p.ttft_p50_s for report in cp.reports for p in report.pools if p.HasField("ttft_p50_s")]
        assert len(ttfts) == 1


async def test_the_first_routed_token_joins_the_workers_trace(monkeypatch) -> None:
    """CM7: one span per incarnation, child of the scaling event."""
    spans: list[dict[str, object]] = []
    monkeypatch.setattr(telemetry, "emit_span", lambda name, **fields: spans.append({"name": name, **fields}))
    parent = telemetry.new_traceparent()
    async with (
        upstream(says(stream_of(1))) as up,
        router(table(worker("a", up.port, traceparent=parent))) as r,
        client(r.http_port) as c,
    ):
        await stream(c)
        await stream(c)
        assert [(s["name"], s["traceparent"]) for s in spans] == [("springtide.route.first_token", parent)]
        assert spans[0]["end_s"] >= spans[0]["start_s"] > 1e9  # type: ignore[operator]


async def test_what_confirms_the_table() -> None:
    """F13 F18: whatever the control plane says, but not one that has another table than the one in use."""
    async with (
        upstream(says(stream_of(1))) as up,
        control_plane(table(worker("a", up.port))) as cp,
        router(cp=cp.address) as r,
    ):
        watch = r.watch
        assert watch is not None
        await cp.acked(1)
        await until(lambda: watch.confirmed_at is not None)
        first = watch.confirmed_at
        cp.loads(WorkerLoad("a", 1, 3))
        await until(lambda: watch.confirmed_at != first)
        cp.table = RoutingTable("another", 1)
        cp.send(None)
        await until(lambda: any(ack.store_id == "another" for ack in cp.acks))
        kept = watch.confirmed_at
        cp.loads(WorkerLoad("a", 1, 9))
        await until(lambda: [seat.load for seat in r.dispatcher.admission.fleet.all()] == [9])
        assert (watch.connected, watch.confirmed_at) == (True, kept)
