"""What operators order and ask, and the table of what they may get wrong."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from controlplane.assembly import ControlPlane
from springtide import errors
from springtide.model.routing import PoolReport, RouterReport
from springtide.rpc import channel, decoded_errors
from springtide.v1 import controlplane_pb2 as pb
from springtide.v1 import types_pb2
from springtide.wire.values import struct
from tests.controlplane.harness import FakeAgent, FakeRouter, operator, start_control, until


def spec(name: str = "chat", **fields) -> types_pb2.PoolSpec:
    made = types_pb2.PoolSpec(
        name=name, engine="sim", min_workers=1, max_workers=3, policy=types_pb2.PolicySpec(name="static")
    )
    made.MergeFrom(types_pb2.PoolSpec(**fields))
    return made


@pytest.fixture
async def control() -> AsyncIterator[tuple[ControlPlane, str]]:
    made, address = await start_control()
    yield made, address
    await made.stop()


@pytest.fixture
async def ops(control):
    async with channel(control[1]) as ch:
        yield operator(ch)


@pytest.fixture
async def served(control, ops):
    """A node, a router, and the pool `chat` with one ACTIVE worker."""
    cp, address = control
    async with FakeAgent(address) as agent, FakeRouter(address) as router:
        router.demand(PoolReport("chat", 0))
        await ops.ApplyPool(pb.ApplyPoolRequest(spec=spec()))
        await until(lambda: "chat-1" in router.table.workers)
        yield cp, ops, agent, router


WRONG = [
    ("GetPool", pb.GetPoolRequest(name="nope"), errors.NotFound, "POOL_NOT_FOUND", "pool", "chat"),
    ("ScalePool", pb.ScalePoolRequest(pool="nope", workers=1), errors.NotFound, "POOL_NOT_FOUND", "pool", "chat"),
    (
        "ScalePool",
        pb.ScalePoolRequest(pool="chat", workers=9),
        errors.InvalidArgument,
        "OUT_OF_BOUNDS",
        "workers",
        "max",
    ),
    ("ScalePool", pb.ScalePoolRequest(pool="chat"), errors.InvalidArgument, "INVALID_ARGUMENT", "workers", "automatic"),
    (
        "PausePool",
        pb.PausePoolRequest(pool="chat", hold=Duration(seconds=90_000)),
        errors.InvalidArgument,
        "INVALID_ARGUMENT",
        "hold",
        "86400",
    ),
    ("ResumePool", pb.ResumePoolRequest(pool="nope"), errors.NotFound, "POOL_NOT_FOUND", "pool", "chat"),
    ("DeletePool", pb.DeletePoolRequest(name="chat"), errors.FailedPrecondition, "POOL_HAS_WORKERS", "drain", "drain"),
    ("GetWorker", pb.GetWorkerRequest(worker_id="w"), errors.NotFound, "WORKER_NOT_FOUND", "worker", "chat-1"),
    ("DrainWorker", pb.DrainWorkerRequest(worker_id="w"), errors.NotFound, "WORKER_NOT_FOUND", "worker", "chat-1"),
    (
        "UndrainWorker",
        pb.UndrainWorkerRequest(worker_id="chat-1"),
        errors.FailedPrecondition,
        "WRONG_STATE",
        "worker_id",
        "draining",
    ),
    (
        "ActivateWorker",
        pb.ActivateWorkerRequest(worker_id="chat-1"),
        errors.FailedPrecondition,
        "WRONG_STATE",
        "worker_id",
        "INACTIVE",
    ),
    (
        "CancelWorker",
        pb.CancelWorkerRequest(worker_id="chat-1"),
        errors.FailedPrecondition,
        "WRONG_STATE",
        "worker_id",
        "Drain",
    ),
    ("CordonNode", pb.CordonNodeRequest(node_id="nope"), errors.NotFound, "NODE_NOT_FOUND", "node", "n1"),
    ("ListWorkers", pb.ListWorkersRequest(pool="nope"), errors.NotFound, "POOL_NOT_FOUND", "pool", "chat"),
    ("ListWorkers", pb.ListWorkersRequest(node_id="nope"), errors.NotFound, "NODE_NOT_FOUND", "node", "n1"),
    ("ListEvents", pb.ListEventsRequest(limit=-1), errors.InvalidArgument, "INVALID_ARGUMENT", "limit", "0"),
    ("GetMetrics", pb.GetMetricsRequest(pool="nope"), errors.NotFound, "POOL_NOT_FOUND", "pool", "chat"),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec("Bad_Name")),
        errors.InvalidArgument,
        "INVALID_ARGUMENT",
        "spec.name",
        "letters",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec("b", min_workers=5, max_workers=2)),
        errors.InvalidArgument,
        "MIN_ABOVE_MAX",
        "spec.min_workers",
        "max_workers",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec("b", tensor_parallel_size=3)),
        errors.InvalidArgument,
        None,
        "spec.tensor_parallel_size",
        "",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec("b", policy=types_pb2.PolicySpec(name="load_ration"))),
        errors.InvalidArgument,
        "UNKNOWN_POLICY",
        "policy.name",
        "load_ratio",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(
            spec=spec("b", policy=types_pb2.PolicySpec(name="load_ratio", settings=struct({"cool": 1})))
        ),
        errors.InvalidArgument,
        None,
        None,
        "",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec(), expected_revision=999),
        errors.Conflict,
        "REVISION_MOVED",
        "expected_revision",
        "again",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec(engine="vllm")),
        errors.FailedPrecondition,
        "POOL_HAS_WORKERS",
        "spec.engine",
        "second pool",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec(), update_mask=FieldMask(paths=["colour"])),
        errors.InvalidArgument,
        "INVALID_ARGUMENT",
        "update_mask",
        "max_workers",
    ),
    (
        "ApplyPool",
        pb.ApplyPoolRequest(spec=spec("nope"), update_mask=FieldMask(paths=["max_workers"])),
        errors.NotFound,
        "POOL_NOT_FOUND",
        "pool",
        "chat",
    ),
]


@pytest.mark.parametrize(
    ("method", "request_", "error", "reason", "field", "remedy"),
    WRONG,
    ids=[f"{w[0]}-{n}" for n, w in enumerate(WRONG)],
)
async def test_a_wrong_order_names_field_value_and_remedy_and_changes_nothing(
    served, method, request_, error, reason, field, remedy
) -> None:
    """CP6, CP15, CP21, rule 15."""
    cp, ops, _, _ = served
    before = await cp.store.snapshot()
    with pytest.raises(error) as caught, decoded_errors("control plane"):
        await getattr(ops, method)(request_)
    if reason is not None:
        assert caught.value.reason == reason
    if field is not None:
        assert caught.value.field == field
    assert caught.value.remedy
    assert remedy in str(caught.value)
    after = await cp.store.snapshot()
    assert (after.pools, after.workers) == (before.pools, before.workers)


async def test_apply_creates_changes_and_merges(ops, control) -> None:
    """CP4, CP23: defaults filled in; a mask changes what it names; validate_only changes nothing."""
    cp, _ = control
    tried = await ops.ApplyPool(pb.ApplyPoolRequest(spec=spec(), validate_only=True))
    assert tried.created
    assert not (await ops.ListPools(pb.ListPoolsRequest())).pools
    made = await ops.ApplyPool(pb.ApplyPoolRequest(spec=spec(initial_workers=2, ramp_s=3.0), expected_revision=0))
    assert made.created
    assert made.pool.spec.start_timeout_s == 900.0
    assert (made.pool.status.desired_workers, made.pool.status.pending) == (2, 2)
    assert not made.pool.status.HasField("waiting"), "no router: unknown"
    mask = FieldMask(paths=["max_workers", "initial_workers", "placement"])
    change = types_pb2.PoolSpec(name="chat", max_workers=7, placement={"zone": "a"})
    await until(lambda: placed(ops, "CANNOT_PLACE"), "the leader has said that there is no node")
    current = await ops.GetPool(pb.GetPoolRequest(name="chat"))
    changed = await ops.ApplyPool(
        pb.ApplyPoolRequest(spec=change, update_mask=mask, expected_revision=current.pool.revision, validate_only=True)
    )
    assert (changed.created, changed.pool.spec.max_workers) == (False, 7)
    assert cp.hub.snapshot.pools["chat"].spec.max_workers == 3
    changed = await ops.ApplyPool(
        pb.ApplyPoolRequest(spec=change, update_mask=mask, expected_revision=current.pool.revision)
    )
    final = changed.pool.spec
    assert (final.max_workers, final.min_workers, final.ramp_s, dict(final.placement)) == (7, 1, 3.0, {"zone": "a"})
    assert not final.HasField("initial_workers")
    assert final.policy.name == "static"


async def test_the_first_pools_come_from_the_configuration_once(tmp_path) -> None:
    """CP23: clamped to the bounds; what operators changed later is kept."""
    from controlplane.store.sqlite import SqliteStore

    pool = {"name": "chat", "engine": "sim", "min_workers": 1, "max_workers": 2, "initial_workers": 5}
    first, address = await start_control(SqliteStore(tmp_path), pools=(pool,))
    async with channel(address) as ch:
        created = (await operator(ch).GetPool(pb.GetPoolRequest(name="chat"))).pool
        assert created.status.desired_workers == 2
        mask = FieldMask(paths=["max_workers"])
        change = types_pb2.PoolSpec(name="chat", max_workers=6)
        await operator(ch).ApplyPool(pb.ApplyPoolRequest(spec=change, update_mask=mask))
    await first.stop()
    again, address = await start_control(SqliteStore(tmp_path), pools=(pool, {**pool, "name": "other"}))
    async with channel(address) as ch:
        pools = (await operator(ch).ListPools(pb.ListPoolsRequest())).pools
        assert {p.spec.name: p.spec.max_workers for p in pools} == {"chat": 6, "other": 2}
    await again.stop()


async def test_pause_cordon_and_undrain(served) -> None:
    """CP5, CP6, CP8."""
    cp, ops, agent, router = served
    paused = await ops.PausePool(pb.PausePoolRequest(pool="chat", hold=Duration(seconds=60), reason="validation"))
    assert paused.pool.status.hold_reason == "validation"
    assert paused.pool.status.hold_until.seconds > cp.clock.now()
    resumed = await ops.ResumePool(pb.ResumePoolRequest(pool="chat"))
    assert not resumed.pool.status.HasField("hold_until")
    cordoned = await ops.CordonNode(pb.CordonNodeRequest(node_id="n1", reason="maintenance"))
    assert (cordoned.node.cordoned, cordoned.node.cordon_reason) == (True, "maintenance")
    await ops.ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))
    status = await until(lambda: placed(ops, "CANNOT_PLACE"), "cannot place")
    assert "cordoned" in status
    await ops.UncordonNode(pb.UncordonNodeRequest(node_id="n1"))
    await until(lambda: len(router.table.workers) == 2)
    agent.set_in_flight("chat-2", 1)
    await ops.DrainWorker(pb.DrainWorkerRequest(worker_id="chat-2"))
    await until(lambda: "chat-2" not in router.table.workers)
    kept = await ops.UndrainWorker(pb.UndrainWorkerRequest(worker_id="chat-2"))
    assert kept.worker.state == types_pb2.WORKER_STATE_ACTIVE
    await until(lambda: "chat-2" in router.table.workers)


async def placed(ops, code: str) -> str:
    conditions = (await ops.GetPool(pb.GetPoolRequest(name="chat"))).pool.status.conditions
    return next((text for text in conditions if text.startswith(code)), "")


async def test_figures(served) -> None:
    """CM1, CM2, CP3: seven names, eight keys, one status."""
    _, ops, agent, router = served
    agent.set_in_flight("chat-1", 4)
    router.demand(PoolReport("chat", 2))

    async def both() -> pb.GetMetricsResponse | None:
        found = await ops.GetMetrics(pb.GetMetricsRequest(pool="chat"))
        return found if (found.active_requests, found.pending_requests) == (4, 2) else None

    figures = await until(both)
    assert (figures.active_workers, figures.draining_workers, figures.total_workers) == (1, 0, 1)
    assert figures.load_ratio == pytest.approx(6 / figures.total_capacity)
    summary = await ops.GetSummary(pb.GetSummaryRequest())
    assert (summary.active_instances, summary.total_instances, summary.active_servers, summary.total_servers) == (
        1,
        1,
        1,
        1,
    )
    status = await ops.GetStatus(pb.GetStatusRequest())
    assert [router_.router_id for router_ in status.routers] == ["r1"]
    assert status.nodes[0].HasField("heartbeat_age_s")
    assert status.nodes[0].free_gpus == ["1", "2", "3"]
    assert status.workers[0].in_flight == 4
    assert status.workers[0].engine == "sim"


async def test_what_a_router_has_not_reported_is_unknown(served) -> None:
    """Rule 1, on the status that operators see."""
    cp, ops, _, _ = served
    connection = cp.live.router_hello("r2", "s", 0, cp.clock.now())
    assert not router_of(await ops.GetStatus(pb.GetStatusRequest()), "r2").HasField("waiting")
    cp.live.router_report("r2", connection, RouterReport((PoolReport("chat", 0),)), cp.clock.now())
    told = router_of(await ops.GetStatus(pb.GetStatusRequest()), "r2")
    assert (told.HasField("waiting"), told.waiting) == (True, 0)


def router_of(status: pb.GetStatusResponse, router_id: str) -> pb.RouterStatus:
    return next(router for router in status.routers if router.router_id == router_id)


async def test_delete_drains_stops_and_forgets(served) -> None:
    cp, ops, agent, router = served
    await ops.DeletePool(pb.DeletePoolRequest(name="chat", drain=True))
    await until(lambda: "chat" not in cp.hub.snapshot.pools, "deleted")
    assert not cp.hub.snapshot.workers
    await until(lambda: "chat" not in router.table.pools)
    assert agent.reports["chat-1"].phase.value == "STOPPED"


async def test_events_in_the_order_of_the_csv_and_watched_without_a_gap(served) -> None:
    """CM6: time, action, target, status with the fourth document's names; a watch resumes after an id."""
    _, ops, _, _ = served
    rows = [(e.action, e.target, e.status) for e in (await ops.ListEvents(pb.ListEventsRequest(pool="chat"))).events]
    assert ("scale_up_start", "chat-1", "scaling_up") in rows
    assert rows.index(("scale_up_start", "chat-1", "scaling_up")) < rows.index(
        ("scale_up_complete", "chat-1", "active")
    )
    seen: list[types_pb2.Event] = []

    async def watch(request: pb.WatchEventsRequest) -> None:
        async for answer in ops.WatchEvents(request):
            seen.append(answer.event)  # noqa: PERF401 - read by the test while it grows

    watching = asyncio.create_task(watch(pb.WatchEventsRequest(pool="chat", after_event_id=0)))
    try:
        await until(lambda: len(seen) >= len(rows))
        await ops.ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))
        await until(lambda: any(e.action == "scale_up_complete" and e.target == "chat-2" for e in seen))
    finally:
        watching.cancel()
    listed = [e.event_id for e in (await ops.ListEvents(pb.ListEventsRequest(pool="chat"))).events]
    ids = [event.event_id for event in seen]
    assert ids == listed[: len(ids)]
    times = [event.at.ToNanoseconds() for event in seen]
    assert times == sorted(times)


async def test_decisions_name_their_inputs_trace_and_workers(served) -> None:
    """PL14, rule 11."""
    _, ops, _, _ = served
    await ops.ScalePool(pb.ScalePoolRequest(pool="chat", workers=2))

    async def decided() -> types_pb2.Decision | None:
        found = (await ops.ListDecisions(pb.ListDecisionsRequest(pool="chat", skip_holds=True))).decisions
        return found[0] if found and "chat-2" in found[0].workers else None

    decision = await until(decided)
    assert decision.result == types_pb2.DECISION_RESULT_SCALE_UP
    assert (decision.from_workers, decision.to_workers, decision.policy) == (1, 2, "operator")
    worker = (await ops.GetWorker(pb.GetWorkerRequest(worker_id="chat-2"))).worker
    assert worker.traceparent.split("-")[1] == decision.trace_id
