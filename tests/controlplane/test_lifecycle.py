"""The life of a worker through a real control plane: agents, routers and operators over sockets."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from controlplane.assembly import ControlPlane
from controlplane.config import TimingSettings
from controlplane.loops.leader import Step
from springtide import errors
from springtide.model.enums import Phase, ReportedPhase, State, Want
from springtide.model.routing import PoolReport
from springtide.model.worker import ExitInfo, Worker
from springtide.rpc import channel, decode_error, decoded_errors
from springtide.v1 import controlplane_pb2 as pb
from springtide.v1 import types_pb2
from tests.controlplane.harness import FAST, FakeAgent, FakeRouter, operator, start_control, until

STATIC = {"name": "static"}
POOL = {"name": "chat", "engine": "sim", "min_workers": 1, "max_workers": 3, "policy": STATIC}
IDLE = PoolReport("chat", 0)


def worker(control: ControlPlane, worker_id: str = "chat-1") -> Worker | None:
    return control.hub.snapshot.workers.get(worker_id)


def is_in(control: ControlPlane, worker_id: str, state: State, phase: Phase | None = None) -> bool:
    found = worker(control, worker_id)
    return found is not None and found.state is state and (phase is None or found.intent.phase is phase)


@pytest.fixture
async def control() -> AsyncIterator[tuple[ControlPlane, str]]:
    made, address = await start_control(pools=(POOL,))
    yield made, address
    await made.stop()


async def test_start_route_drain_acknowledge_stop(control) -> None:
    """CP1, CP2, CP6, CP7, CP17, rules 4 and 5: the whole life of a worker, in order."""
    cp, address = control
    async with FakeAgent(address) as agent, FakeRouter(address) as router, channel(address) as ch:
        router.demand(IDLE)
        agent.starts_as = ReportedPhase.BOOTING
        await until(lambda: is_in(cp, "chat-1", State.STARTING, Phase.BOOTING), "BOOTING")
        assert "chat-1" not in router.table.workers
        assert router.table.pools["chat"].starting == 1
        for phase, reported in ((Phase.LOADING, ReportedPhase.LOADING), (Phase.WARMING, ReportedPhase.WARMING)):
            agent.set_phase("chat-1", reported)
            await until(partial(is_in, cp, "chat-1", State.STARTING, phase), phase)
        agent.set_phase("chat-1", ReportedPhase.READY)
        await until(lambda: "chat-1" in router.table.workers, "routed")
        routed = router.table.workers["chat-1"]
        assert (routed.endpoint, routed.incarnation) == (agent.reports["chat-1"].endpoint, 1)

        agent.set_in_flight("chat-1", 2)
        router.acks = False
        ops = operator(ch)
        answer = await ops.DrainWorker(pb.DrainWorkerRequest(worker_id="chat-1", reason="test"))
        assert answer.worker.state == types_pb2.WORKER_STATE_DRAINING
        await until(lambda: "chat-1" not in router.table.workers, "out of the table")
        await until(lambda: agent.reports["chat-1"].phase is ReportedPhase.DRAINING, "refusing")
        await until(lambda: agent.answers > 5)
        assert is_in(cp, "chat-1", State.DRAINING, Phase.UNROUTING), "not before the router has acknowledged"
        router.acks = True
        router.ack()
        await until(lambda: is_in(cp, "chat-1", State.DRAINING, Phase.FINISHING), "acknowledged")
        assert ("chat-1", Want.STOP) not in agent.orders, "not while requests run"
        agent.set_in_flight("chat-1", 0)
        await until(lambda: is_in(cp, "chat-1", State.INACTIVE, Phase.STOPPED), "stopped")
        assert [want for key, want in agent.orders if key == "chat-1"] == [Want.RUN, Want.DRAIN, Want.STOP]
        events = [
            e.action for e in (await ops.ListEvents(pb.ListEventsRequest(pool="chat"))).events if e.target == "chat-1"
        ]
        assert events == ["scale_up_start", "scale_up_complete", "scale_down_start", "scale_down_complete"]


async def test_scale_up_and_down_by_hand(control) -> None:
    """CP3, CP6: a pin is reached, held, and given back."""
    cp, address = control
    async with FakeAgent(address) as agent, FakeRouter(address) as router, channel(address) as ch:
        router.demand(IDLE)
        ops = operator(ch)
        scaled = await ops.ScalePool(pb.ScalePoolRequest(pool="chat", workers=3))
        assert scaled.pool.status.manual_workers == 3
        await until(lambda: len(router.table.workers) == 3, "three workers")
        slices = [set(report.gpu_ids) for report in agent.reports.values()]
        assert len(set().union(*slices)) == sum(len(part) for part in slices) == 3
        await ops.ScalePool(pb.ScalePoolRequest(pool="chat", workers=1))
        await until(lambda: sum(1 for w in cp.hub.snapshot.workers.values() if w.state is State.ACTIVE) == 1)
        await until(lambda: len(router.table.workers) == 1)
        status = (await ops.GetPool(pb.GetPoolRequest(name="chat"))).pool.status
        assert (status.active, status.pending, status.desired_workers) == (1, 0, 1)
        automatic = await ops.ScalePool(pb.ScalePoolRequest(pool="chat", automatic=True))
        assert not automatic.pool.status.HasField("manual_workers")


async def test_a_crashed_engine_is_replaced(control) -> None:
    """NA11, rule 2: the end is noticed, unrouted, and another start follows in one trace of its own."""
    cp, address = control
    async with FakeAgent(address) as agent, FakeRouter(address) as router:
        router.demand(IDLE)
        await until(lambda: "chat-1" in router.table.workers)
        agent.set_phase("chat-1", ReportedPhase.FAILED, ExitInfo(signal=9, reason="ENGINE_KILLED"))
        await until(lambda: [w for w in router.table.workers.values() if w.incarnation == 2 or w.worker_id != "chat-1"])
        decisions = await cp.store.decisions("chat", skip_holds=True)
        assert decisions[0].result.value == "REPLACE"
        assert "ENGINE_KILLED" in decisions[0].reason


async def test_the_first_waiting_request_starts_a_worker_from_zero_at_once() -> None:
    """Rule 12, PL3: 0 -> 1 does not wait for any interval."""
    slow = TimingSettings(**{**vars(FAST), "sample_interval_s": 30.0, "monitoring_interval_s": 30.0})
    pool = {"name": "zero", "engine": "sim", "min_workers": 0, "max_workers": 2}
    cp, address = await start_control(timing=slow, pools=(pool,))
    try:
        async with FakeAgent(address) as agent, FakeRouter(address) as router:
            await until(lambda: "zero" in router.table.pools)
            router.demand(PoolReport("zero", 0))
            await until(lambda: (live := cp.hub.snapshot.live.nodes.get("n1")) is not None and live.reported)
            await until(lambda: cp.live.routers["r1"].demand)
            assert agent.reports == {}
            router.demand(PoolReport("zero", 1))
            await until(lambda: "zero-1" in router.table.workers, "routed", bound_s=10)
    finally:
        await cp.stop()


async def test_a_lost_agent_is_suspect_then_lost_and_adopted_when_it_is_back(control) -> None:
    """CP11, CP12, rule 8: silence is SUSPECT, then LOST; the returning engine is adopted, not loaded again."""
    cp, address = control
    agent = FakeAgent(address)
    async with FakeRouter(address) as router:
        router.demand(IDLE)
        async with agent:
            await until(lambda: is_in(cp, "chat-1", State.ACTIVE))
        await until(lambda: is_in(cp, "chat-1", State.INACTIVE, Phase.LOST), "lost")
        await until(lambda: "chat-1" not in router.table.workers, "unrouted")
        again = FakeAgent(address)
        again.reports, again.desired = dict(agent.reports), dict(agent.desired)
        async with again:
            await until(lambda: is_in(cp, "chat-1", State.ACTIVE), "adopted")
            assert again.reports["chat-1"].incarnation == 1
            assert ("chat-1", Want.STOP) not in again.orders


async def test_a_rival_with_the_same_node_id_is_refused(control) -> None:
    """CP16: duplicate id refused while the first is heard; the agent that comes after it is welcome."""
    cp, address = control
    async with FakeAgent(address) as first:
        await until(lambda: first.answers > 2)
        async with FakeAgent(address, gpus=1) as rival:
            await until(lambda: rival.error is not None and decode_error(rival.error).reason == "NODE_ID_TAKEN")
            assert rival.error is not None
            assert isinstance(decode_error(rival.error), errors.AlreadyExists)
            assert rival.answers == 0
            await first.die()
            await until(lambda: rival.answers > 0, "the rival takes over")
    assert cp.live.nodes["n1"].session_id == rival.session_id


async def test_a_rival_router_with_the_same_id_is_refused(control) -> None:
    """Rule 1: two routers under one id would pass for one, and half of what waits would be unknown."""
    cp, address = control
    first, rival = FakeRouter(address), FakeRouter(address)
    async with first:
        await until(lambda: first.table.revision > 0)
        async with rival:
            await until(lambda: rival.error is not None and decode_error(rival.error).reason == "ROUTER_ID_TAKEN")
            assert rival.messages == []
            assert first.error is None
            await first.__aexit__()
            await until(lambda: rival.table.revision > 0, "the next one is welcome")
    assert cp.live.routers["r1"].session_id == rival.session_id


async def test_a_reconnect_of_the_same_agent_registers_again_idempotently(control) -> None:
    """CP11: the same session id twice is the same agent; nothing is started twice."""
    cp, address = control
    agent = FakeAgent(address)
    async with agent:
        await until(lambda: is_in(cp, "chat-1", State.ACTIVE))
    async with agent:
        before = agent.answers
        await until(lambda: agent.answers > before + 3)
    assert [want for _, want in agent.orders] == [Want.RUN]
    assert len(cp.hub.snapshot.workers) == 1


async def test_two_agents_share_the_work_and_one_bad_node_blocks_nobody(control) -> None:
    """CP16, rule 1."""
    cp, address = control
    async with (
        FakeAgent(address, "n1", gpus=2) as one,
        FakeAgent(address, "n2", gpus=2) as two,
        FakeRouter(address) as router,
        channel(address) as ch,
    ):
        router.demand(IDLE)
        await until(lambda: all(n in cp.hub.snapshot.nodes and cp.live.nodes[n].reported for n in ("n1", "n2")))
        await operator(ch).ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))
        await until(lambda: len(router.table.workers) == 2)
        assert {w.node_id for w in router.table.workers.values()} == {"n1", "n2"}
        one.goodbye()
        await until(lambda: len(two.reports) == 2 and len(router.table.workers) == 2, "both on n2")
        assert {w.node_id for w in router.table.workers.values()} == {"n2"}


async def test_a_slow_router_gets_one_delta_for_many_changes(control) -> None:
    """Rule 10: nothing is queued for a router; its table is right whenever it looks."""
    cp, address = control
    async with FakeAgent(address), FakeRouter(address) as router, channel(address) as ch:
        router.demand(IDLE)
        ops = operator(ch)
        for number in (3, 2, 3, 1, 2, 3):
            await ops.ScalePool(pb.ScalePoolRequest(pool="chat", workers=number))
        await until(lambda: router.table.revision == cp.hub.table.revision and len(router.table.workers) == 3)
        assert dict(router.table.workers) == dict(cp.hub.table.workers)
        revisions = [
            (m.snapshot if m.HasField("snapshot") else m.delta).revision
            for m in router.messages
            if not m.HasField("loads")
        ]
        assert revisions == sorted(set(revisions))
        assert router.messages[0].HasField("snapshot")


async def test_loads_reach_routers(control) -> None:
    _, address = control
    async with FakeAgent(address) as agent, FakeRouter(address) as router:
        router.demand(IDLE)
        await until(lambda: "chat-1" in router.table.workers)
        agent.set_in_flight("chat-1", 3)
        await until(lambda: any(load.in_flight == 3 for m in router.messages for load in m.loads.workers), "loads")


async def test_loads_reach_routers_also_while_the_table_changes_all_the_time(control) -> None:
    """RT1: a busy store does not leave routers with their own counts alone."""
    _, address = control
    async with FakeAgent(address) as agent, FakeRouter(address) as router, channel(address) as ch:
        router.demand(IDLE)
        await until(lambda: "chat-1" in router.table.workers)
        agent.set_in_flight("chat-1", 3)
        ops = operator(ch)

        async def told_between_changes() -> bool:
            await ops.PausePool(pb.PausePoolRequest(pool="chat"))  # a commit, and so a new table
            return any(load.in_flight == 3 for m in router.messages for load in m.loads.workers)

        await until(told_between_changes, "loads")


async def test_a_drain_deadline_cuts_what_is_left_and_says_so() -> None:
    """CP7: never INACTIVE with running requests unreported."""
    steps: list[Step] = []
    cp, address = await start_control(pools=({**POOL, "min_workers": 0, "initial_workers": 1},), on_step=steps.append)
    try:
        async with FakeAgent(address) as agent, channel(address) as ch:
            await until(lambda: is_in(cp, "chat-1", State.ACTIVE))
            agent.set_in_flight("chat-1", 4)
            request = pb.DrainWorkerRequest(worker_id="chat-1")
            request.timeout.FromMilliseconds(300)
            await operator(ch).DrainWorker(request)
            await until(lambda: is_in(cp, "chat-1", State.INACTIVE, Phase.STOPPED))
            assert agent.in_flight["chat-1"] == 0
            actions = [event.action for step in steps for event in step.plan.events]
            assert "drain_aborted" in actions
    finally:
        await cp.stop()


async def test_sessions_end_with_a_reason_when_the_control_plane_stops() -> None:
    """Rule 8: agents and routers are told to come again; nothing else happens to them."""
    cp, address = await start_control(pools=(POOL,))
    async with FakeAgent(address) as agent, FakeRouter(address) as router, channel(address) as ch:
        router.demand(IDLE)
        await until(lambda: "chat-1" in router.table.workers)
        watching = asyncio.create_task(collect(ch))
        await asyncio.sleep(0)
        await cp.stop()
        await until(lambda: agent.error is not None and router.error is not None)
        with pytest.raises(errors.Unavailable):
            await watching
        assert "chat-1" in router.table.workers
        assert [want for _, want in agent.orders] == [Want.RUN]


async def collect(ch) -> None:
    with decoded_errors():
        async for _ in operator(ch).WatchEvents(pb.WatchEventsRequest()):
            pass
