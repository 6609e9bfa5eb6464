"""The leader outlives faults of the store and of a plan, keeps what is committed in force, and traces its steps."""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from prometheus_client import generate_latest

from controlplane.assembly import CONTROLPLANE, ControlPlane
from controlplane.config import ControlPlaneConfig
from controlplane.core.plan import plan
from controlplane.core.snapshot import Put, Timing
from controlplane.live import Live
from controlplane.loops import leader as leader_module
from controlplane.loops.hub import Hub
from controlplane.loops.leader import Leader, Step
from controlplane.metrics import Metrics
from controlplane.store.memory import MemoryStore
from controlplane.store.store import Committed, Compare, Write
from controlplane.traces import Traces
from springtide import errors
from springtide.clock import ManualClock, SystemClock
from springtide.model.enums import NodeState, Want
from springtide.model.node import NodeObserved
from springtide.model.record import Decision, Event
from springtide.model.routing import PoolReport
from springtide.rpc import channel, decoded_errors
from springtide.telemetry import spans
from springtide.telemetry.traceparent import parse_traceparent
from springtide.v1 import controlplane_pb2 as pb
from springtide.v1 import types_pb2
from springtide.wire.agent import Heartbeat, Hello
from tests.controlplane.harness import FAST, FakeAgent, FakeRouter, operator, start_control, until

POOL = {"name": "chat", "engine": "sim", "min_workers": 1, "max_workers": 3, "policy": "static"}


class SickStore(MemoryStore):
    """Refuses commits while `sick`."""

    sick = False

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        writes: Sequence[Write] = (),
        decisions: Sequence[Decision] = (),
        events: Sequence[Event] = (),
    ) -> Committed:
        if self.sick:
            raise errors.Unavailable("the disk is full.", reason="STORE_FULL", remedy="Free space.")
        return await super().commit(compares, writes, decisions, events)


async def test_a_store_that_cannot_write_stops_nothing_and_is_reported() -> None:
    """Rule 8, CP21: last known good; the health of the operators' service says it; orders fail with the reason."""
    store = SickStore()
    cp, address = await start_control(store, pools=(POOL,))
    try:
        async with FakeAgent(address) as agent, FakeRouter(address) as router, channel(address) as ch:
            router.demand(PoolReport("chat", 0))
            await until(lambda: "chat-1" in router.table.workers)
            store.sick = True
            with pytest.raises(errors.Unavailable) as caught, decoded_errors():
                await operator(ch).ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))
            assert caught.value.reason == "STORE_FULL"
            health = health_pb2_grpc.HealthStub(ch)

            async def serving(name: str, wanted: bool) -> bool:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                return (answer.status == health_pb2.HealthCheckResponse.SERVING) is wanted

            await until(lambda: serving(CONTROLPLANE, False))
            assert await serving("springtide.v1.AgentService", True)
            before = agent.answers
            await until(lambda: agent.answers > before + 5, "agents are still answered")
            assert [want for _, want in agent.orders] == [Want.RUN]
            assert "chat-1" in router.table.workers
            store.sick = False
            await operator(ch).ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))
            await until(lambda: len(router.table.workers) == 2)
            await until(lambda: serving(CONTROLPLANE, True))
    finally:
        await cp.stop()


async def test_a_fault_in_a_plan_is_survived(monkeypatch) -> None:
    """CP15: nothing crashes the leader; it counts, backs off and goes on."""
    cp, address = await start_control(pools=(POOL,))
    real = plan

    def broken(snapshot, now):
        raise ZeroDivisionError("a fault")

    try:
        monkeypatch.setattr(leader_module, "plan", broken)
        cp.leader.kick("test")
        await until(lambda: cp.leader.stats.errors >= 2)
        assert cp.leader.makes_progress()
        monkeypatch.setattr(leader_module, "plan", real)
        async with FakeAgent(address) as agent:
            await until(lambda: agent.reports, "it plans again")
    finally:
        await cp.stop()


async def test_a_start_with_a_leader_that_cannot_plan_keeps_what_is_recorded_in_force(monkeypatch) -> None:
    """Rule 8: routers get the recorded table, agents the recorded orders; health says that orders are not acted on."""
    store = MemoryStore()
    cp, address = await start_control(store, pools=(POOL,))
    agent = FakeAgent(address)
    async with agent, FakeRouter(address) as router:
        await until(lambda: "chat-1" in router.table.workers)
    await cp.stop()

    def broken(snapshot, now):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(leader_module, "plan", broken)
    cp, agent.address = await start_control(store, pools=(POOL,))
    try:
        async with agent, FakeRouter(agent.address) as router, channel(agent.address) as ch:
            await until(lambda: "chat-1" in router.table.workers)
            before = agent.answers
            await until(lambda: agent.answers > before + 3)
            assert [want for _, want in agent.orders] == [Want.RUN]

            async def not_serving() -> bool:
                answer = await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest())
                return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)

            await until(not_serving)
    finally:
        await cp.stop()


async def test_another_writer_first_means_plan_again() -> None:
    """DESIGN 3: refused when a record has moved; then the next look is right."""
    cp, address = await start_control(pools=(POOL,))
    try:
        async with FakeAgent(address), FakeRouter(address) as router, channel(address) as ch:
            router.demand(PoolReport("chat", 0))

            async def meddle() -> None:
                """Rewrites the pool's record all the time, as an operator would."""
                for number in range(200):
                    pool = (await cp.store.snapshot()).pools["chat"]
                    spec = dataclasses.replace(pool.spec, max_waiting=1000 + number)
                    moved = dataclasses.replace(pool, spec=spec)
                    await cp.store.commit([Compare("pool", "chat", pool.revision)], [Put(moved)])
                    await asyncio.sleep(0)

            meddling = asyncio.create_task(meddle())
            for workers in (2, 3, 1, 3):
                await operator(ch).ScalePool(pb.ScalePoolRequest(pool="chat", workers=workers))
            await meddling
            await until(lambda: len(router.table.workers) == 3)
            pool = (await cp.store.snapshot()).pools["chat"]
            assert (pool.spec.max_waiting, pool.intent.manual_workers) == (1199, 3)
    finally:
        await cp.stop()


class Collecting(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def collected(monkeypatch):
    processor = Collecting()
    monkeypatch.setattr(spans, "_exporting", spans._Exporting(processor, Resource.create({"service.name": "test"})))
    return processor.spans


async def test_each_scaling_event_is_one_root_span_with_the_ids_that_the_worker_carried(collected) -> None:
    """CM7, rule 11: decision -> ACTIVE, and drain -> memory free, each one trace; agents saw the same ids."""
    traces, metrics = Traces(), Metrics()

    def watch(step: Step) -> None:
        traces(step)
        metrics(step)

    cp, address = await start_control(pools=(POOL,), on_step=watch)
    metrics.attach(cp)
    try:
        async with FakeAgent(address) as agent, FakeRouter(address) as router, channel(address) as ch:
            router.demand(PoolReport("chat", 0))
            await operator(ch).ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))
            await until(lambda: len(router.table.workers) == 2)
            ups = {worker_id: desired.traceparent for worker_id, desired in agent.desired.items()}
            for worker_id in ups:
                agent.set_in_flight(worker_id, 1)
            await operator(ch).ScalePool(pb.ScalePoolRequest(pool="chat", workers=1))
            await until(lambda: any(w.intent.phase == "FINISHING" for w in cp.hub.snapshot.workers.values()))
            for worker_id in ups:
                agent.set_in_flight(worker_id, 0)
            await until(lambda: any(w.intent.phase == "STOPPED" for w in cp.hub.snapshot.workers.values()))
            decisions = (await operator(ch).ListDecisions(pb.ListDecisionsRequest(skip_holds=True))).decisions
    finally:
        await cp.stop()
    roots = [span for span in collected if span.parent is None]
    assert sorted(span.name for span in roots) == ["springtide.scale_down", *["springtide.scale_up"] * 2]
    emitted = {hex_ids(span) for span in roots}
    for worker_id, traceparent in ups.items():
        context = parse_traceparent(traceparent)
        assert context is not None
        assert (context.trace_id, context.span_id) in emitted, worker_id
    down = next(span for span in roots if span.name == "springtide.scale_down")
    children = [span.name for span in collected if span.parent and span.parent.span_id == down.context.span_id]
    assert children == ["springtide.unroute", "springtide.finish", "springtide.release"]
    assert down.start_time <= min(span.start_time for span in collected if span.name in children)
    decided = [d for d in decisions if d.result == types_pb2.DECISION_RESULT_SCALE_DOWN]
    assert decided[0].trace_id == hex_ids(down)[0]
    text = generate_latest(metrics.registry).decode()
    assert 'springtide_pool_active_workers{pool="chat"} 1.0' in text
    assert 'springtide_worker_transition_seconds_count{pool="chat",state="STARTING",to="ACTIVE"} 2.0' in text
    assert 'springtide_events_total{action="scale_down_complete",pool="chat"} 1.0' in text


def hex_ids(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_a_leader_that_ends_before_it_has_published_fails_the_start(monkeypatch) -> None:
    """The process ends with the fault and is started again, instead of hanging without a word."""

    async def ends(leader: Leader) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Leader, "run", ends)
    control = ControlPlane(MemoryStore(), ControlPlaneConfig(listen="127.0.0.1:0"), SystemClock())
    try:
        with pytest.raises(ZeroDivisionError):
            await control.start()
    finally:
        await control.stop()


async def test_a_leader_without_news_samples_and_does_not_plan(monkeypatch) -> None:
    """A second of quiet costs a sample, not a plan; what is news is planned for at once."""
    plans = 0
    real = plan

    def counted(snapshot, now):
        nonlocal plans
        plans += 1
        return real(snapshot, now)

    monkeypatch.setattr(leader_module, "plan", counted)
    timing = dataclasses.replace(FAST, sample_interval_s=0.02, heartbeat_interval_s=1.0, suspect_after_s=30.0)
    cp, address = await start_control(timing=timing, pools=(POOL,))
    try:
        async with FakeAgent(address), FakeRouter(address) as router:
            await until(lambda: "chat-1" in router.table.workers)
            await until(lambda: router.table.revision == cp.hub.table.revision)
            looks, planned = cp.leader.stats.looks, plans
            await until(lambda: cp.leader.stats.looks >= looks + 40)
            assert plans - planned < (cp.leader.stats.looks - looks) / 2
    finally:
        await cp.stop()


def test_only_news_kicks_the_leader() -> None:
    """Rule 12: first waiting, first rejected, phases and an idle drain are news; a load that moves is not."""
    live = Live(1.0)
    connection = live.node_hello(Hello("n1", "s1", NodeObserved(address="h")), 0.0)
    from springtide.model.enums import ReportedPhase
    from springtide.model.worker import WorkerReport

    def beat(**fields) -> set[str]:
        report = WorkerReport("w", "p", "s", 1, 1, ReportedPhase.READY, in_flight=3)
        return live.heartbeat("n1", connection, Heartbeat(1, (dataclasses.replace(report, **fields),)), 1.0)

    assert beat() == {"node/n1", "worker/w"}
    assert beat(in_flight=5) == set()
    assert beat(in_flight=0) == set()
    assert beat(in_flight=0, engine_idle=True) == set()
    assert beat(in_flight=2, phase=ReportedPhase.DRAINING) == {"worker/w"}
    assert beat(in_flight=0, phase=ReportedPhase.DRAINING) == {"worker/w"}
    assert beat(in_flight=0, engine_idle=True, phase=ReportedPhase.DRAINING) == {"worker/w"}
    assert live.heartbeat("n1", connection + 1, Heartbeat(1), 2.0) == set(), "a late message of an earlier session"

    from springtide.model.routing import RouterReport

    router = live.router_hello("r1", "s1", 0, 0.0)

    def report(*pools: PoolReport) -> set[str]:
        return live.router_report("r1", router, RouterReport(pools), 1.0)

    assert report(PoolReport("a", 0), PoolReport("b", 0)) == set()
    assert report(PoolReport("a", 1), PoolReport("b", 0)) == {"pool/a"}
    assert report(PoolReport("a", 9), PoolReport("b", 0, rejected=1)) == {"pool/b"}
    assert report(PoolReport("a", 0), PoolReport("b", 0)) == set()
    assert report(PoolReport("a", 0, rejected=2)) == {"pool/a"}
    assert live.router_ack("r1", router, 5, 1.0) == {"router/r1"}
    assert live.router_ack("r1", router, 5, 1.0) == set()


def test_the_live_view_is_bounded() -> None:
    """Rule 10: too many routers are refused with a reason, and those long gone are forgotten."""
    live = Live(1.0)
    for number in range(256):
        live.router_gone(f"r{number}", live.router_hello(f"r{number}", "s", 0, 0.0))
    with pytest.raises(errors.Exhausted):
        live.router_hello("one-more", "s", 0, 10.0)
    live.router_hello("one-more", "s", 0, 1000.0)
    assert list(live.routers) == ["one-more"]


async def test_its_own_standstill_is_not_taken_for_the_silence_of_others() -> None:
    """Rule 8, CP12 CP22: after a pause of this process nobody has been heard, and no lease expires for one grace
    period."""
    clock = ManualClock()
    timing = Timing(suspect_after_s=3.0, lease_s=15.0, grace_s=30.0)
    store, live = MemoryStore(), Live(1.0)
    await store.open()
    leader = leader_module.Leader(store, live, Hub(), clock, timing)
    observed = NodeObserved(boot_id="b", address="127.0.0.1", gpus=(), labels={}, resources={}, agent_version="1")
    connection = live.node_hello(Hello("n1", "s1", observed), clock.now())
    for _ in range(40):
        live.heartbeat("n1", connection, Heartbeat(1, ()), clock.advance(1.0))
        await leader.look()
    assert (await store.snapshot()).nodes["n1"].state is NodeState.UP
    clock.advance(60.0)
    await leader.look()
    assert (await store.snapshot()).nodes["n1"].state is NodeState.UP
    for _ in range(31):  # but a node that stays silent now is lost
        clock.advance(1.0)
        await leader.look()
    assert (await store.snapshot()).nodes["n1"].state is NodeState.LOST
