"""What one process says is what the other hears; unknown values are harmless."""

import pytest

from springtide.errors import InvalidArgument
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import DecisionResult, DrainAction, Phase, ReportedPhase, Role, State, Want
from springtide.model.node import Gpu, NodeObserved
from springtide.model.pool import PolicySpec, PoolSpec, RoutingSpec
from springtide.model.record import Decision, Event
from springtide.model.routing import (
    MOST_NEEDS,
    NeedReport,
    PoolReport,
    RoutedPool,
    RoutedWorker,
    RouterReport,
    RoutingDelta,
    RoutingTable,
    WorkerLoad,
    WorkerUse,
)
from springtide.model.worker import ExitInfo, Worker, WorkerIntent, WorkerReport
from springtide.v1 import agent_pb2, routing_pb2, types_pb2
from springtide.wire import agent, pools, records, routing, values, workers

REPORT = WorkerReport(
    worker_id="chat-1",
    pool="chat",
    store_id="s",
    generation=3,
    incarnation=1_700_000_000_001,
    phase=ReportedPhase.FAILED,
    endpoint="127.0.0.1:1",
    gpu_ids=("0", "1"),
    in_flight=0,
    engine_running=None,
    engine_waiting=2,
    kv_use=0.25,
    total_served=7,
    max_in_flight=8,
    exit=ExitInfo(code=None, signal=9, reason="ENGINE_KILLED", message="m", log_tail="t"),
    log_path="/l",
    weight_version="w",
    launch_fingerprint="f",
    generation_tokens_total=5,
    probe_failures=0,
    traceparent="tp",
    engine_idle=True,
)


def test_a_pool_spec_survives_the_wire() -> None:
    """CP23: every field, also those that differ from their defaults."""
    spec = PoolSpec(
        name="chat",
        engine="sim",
        model="m",
        served_model_name="chat-model",
        tensor_parallel_size=2,
        min_workers=0,
        max_workers=4,
        initial_workers=0,
        policy=PolicySpec("load_ratio", {"cooldown": 5, "high": 0.75, "guard": True, "text": "x", "none": None}),
        placement={"zone": "a"},
        role=Role.DECODE,
        engine_args=("--a", "1"),
        engine_env={"K": "V"},
        interpreter="/py",
        max_in_flight=3,
        max_waiting=5,
        waiting_timeout_s=1.5,
        start_timeout_s=2.0,
        drain_timeout_s=3.0,
        drain_action=DrainAction.WAIT,
        stop_grace_s=4.0,
        ramp_s=5.0,
        max_start_attempts=6,
        resources={"units": 2},
        routing=RoutingSpec("sticky", {"by": "session", "most_extra": 3}),
        labels={"quality": "high"},
    )
    assert pools.pool_spec_from_proto(pools.pool_spec_to_proto(spec)) == spec


def test_an_absent_field_is_its_default_and_zero_minimum_is_zero() -> None:
    """CP4: min is 1 by default, 0 only when said."""
    assert pools.pool_spec_from_proto(types_pb2.PoolSpec(name="p", engine="sim")) == PoolSpec(name="p", engine="sim")
    assert pools.pool_spec_from_proto(types_pb2.PoolSpec(name="p", engine="sim", min_workers=0)).min_workers == 0


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (types_pb2.PoolSpec(tensor_parallel_size=-1), "spec.tensor_parallel_size"),
        (types_pb2.PoolSpec(drain_timeout_s=-1), "spec.drain_timeout_s"),
        (types_pb2.PoolSpec(ramp_s=float("nan")), "spec.ramp_s"),
        (types_pb2.PoolSpec(role=99), "spec.role"),  # type: ignore[arg-type]
        (types_pb2.PoolSpec(resources={"u": -2}), "spec.resources.u"),
        (types_pb2.PoolSpec(policy=types_pb2.PolicySpec(settings=values.struct({"x": [1]}))), "spec.policy.settings.x"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_spec_that_means_nothing_names_its_field(message, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pools.pool_spec_from_proto(message)
    assert caught.value.field == field


def test_agent_messages_survive_the_wire() -> None:
    """NA6, rule 1: unknown stays unknown, zero stays zero."""
    assert agent.report_from_proto(agent.report_to_proto(REPORT)) == REPORT
    beat = agent.Heartbeat(4, (REPORT,), stopping=True, stop_deadline_s=30.0)
    assert agent.heartbeat_from_proto(agent.heartbeat_to_proto(beat)) == beat
    gpus = (Gpu("0", "H100", 80, False), Gpu("1", simulated=True))
    hello = agent.Hello("n1", "abc", NodeObserved("boot", "host", gpus, {"a": "b"}, {"u": 1}, "0.1.0"))
    assert agent.hello_from_proto(agent.hello_to_proto(hello)) == hello
    launch = EngineLaunch("sim", "m", "n", 2, ("0", "1"), ("--x",), {"a": "b"}, "/py", 4, 1.0, 2.0, "w")
    desired = DesiredWorker("chat-1", "chat", 7, Want.DRAIN, launch, True, True, True, "tp", 41)
    assert agent.desired_from_proto(agent.desired_to_proto(desired)) == desired


def test_words_of_a_later_version_are_harmless() -> None:
    """Rule 14: an unknown phase is not routable, an unknown want leaves the worker alone."""
    report = agent_pb2.WorkerReport(worker_id="w", phase=99)  # type: ignore[arg-type]
    assert agent.report_from_proto(report).phase is ReportedPhase.ADOPTING
    assert agent.desired_from_proto(agent_pb2.DesiredWorker(worker_id="w", want=99)).want is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (agent_pb2.NodeHello(node_id="../x", session_id="s", address="h"), "hello.node_id"),
        (agent_pb2.NodeHello(node_id="n", session_id="", address="h"), "hello.session_id"),
        (agent_pb2.NodeHello(node_id="n", session_id="s"), "hello.address"),
        (
            agent_pb2.NodeHello(node_id="n", session_id="s", address="h", gpus=[types_pb2.Gpu(id="0")] * 2),
            "hello.gpus",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hello_names_its_field(message, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        agent.hello_from_proto(message)
    assert caught.value.field == field


def test_routing_messages_survive_the_wire() -> None:
    spec = RoutingSpec("power_of_two", {"choices": 3})
    pool = RoutedPool("chat", "model", 3, 1.5, 2, 4, "sim", spec, Role.PREFILL, 12.5)
    worker = RoutedWorker("chat-1", "chat", 9, "h:1", 8, 2.0, "tp", "w", "n1", {"zone": "a"})
    table = RoutingTable("s", 5, {"chat": pool}, {"chat-1": worker})
    assert routing.snapshot_from_proto(routing.snapshot_to_proto(table)) == table
    delta = RoutingDelta("s", 6, (pool,), ("old",), (worker,), ("chat-0",))
    assert routing.delta_from_proto(routing.delta_to_proto(delta)) == delta
    loads = (WorkerLoad("chat-1", 9, 0, None), WorkerLoad("chat-2", 9, None, 0.5))
    assert routing.loads_from_proto(routing.loads_to_proto(loads)) == loads
    needs = (NeedReport((), 1, 2), NeedReport((("gpu", "h100"), ("zone", "")), 3, 4))
    report = RouterReport((PoolReport("chat", 1, 2, 0.5, 9, 1, 0.1, None, needs),), (WorkerUse("chat-1", 9, 1, 2, 3),))
    assert routing.report_from_proto(routing.report_to_proto(report)) == report
    many = RouterReport((PoolReport("chat", 0, by_needs=(NeedReport((), 1),) * (MOST_NEEDS + 1)),))
    with pytest.raises(InvalidArgument, match="by_needs"):
        routing.report_from_proto(routing.report_to_proto(many))
    negative = RouterReport((PoolReport("chat", 0, by_needs=(NeedReport((), -1),)),))
    with pytest.raises(InvalidArgument, match=r"by_needs\.waiting"):
        routing.report_from_proto(routing.report_to_proto(negative))
    with pytest.raises(InvalidArgument):
        routing.report_from_proto(routing.report_to_proto(RouterReport((PoolReport("chat", -1),))))


def test_a_routing_spec_of_a_later_version_is_not_fatal() -> None:
    """A setting that this version cannot read leaves the name; an absent spec is the default."""
    message = routing_pb2.RoutingSnapshot(pools=[routing_pb2.RoutedPool(name="p"), routing_pb2.RoutedPool(name="q")])
    message.pools[1].routing.name = "newer"
    message.pools[1].role = 77  # type: ignore[assignment]  # a number of a later version
    message.pools[1].routing.settings.update({"list": [1, 2]})
    read = routing.snapshot_from_proto(message)
    assert read.pools["p"].routing == RoutingSpec()
    assert read.pools["p"].start_up_s is None
    assert read.pools["q"].routing == RoutingSpec("newer")
    assert (read.pools["p"].role, read.pools["q"].role) == (Role.MIXED, None)


def test_a_worker_shows_unknown_load_as_absent() -> None:
    """Rule 1; CP1: state, phase and reason."""
    draining = WorkerIntent(
        state=State.DRAINING, phase=Phase.FINISHING, reason="SCALE_DOWN", state_since=1.5, deadline=9.0
    )
    message = workers.worker_to_proto(Worker("chat-1", "chat", draining))
    assert not message.HasField("in_flight")
    assert message.state == types_pb2.WORKER_STATE_DRAINING
    assert message.phase == types_pb2.WORKER_PHASE_FINISHING
    assert message.condition == types_pb2.WORKER_CONDITION_UNSPECIFIED
    assert values.seconds(message.deadline) == 9.0
    live = workers.worker_to_proto(Worker("chat-1", "chat", WorkerIntent(state=State.ACTIVE)), REPORT)
    assert live.HasField("in_flight")
    assert live.in_flight == 0
    assert not live.HasField("engine_running")
    assert live.phase == types_pb2.WORKER_PHASE_UNSPECIFIED


def test_records() -> None:
    decision = Decision(
        "chat", 1.0, "load_ratio", DecisionResult.HOLD, 1, 1, "IN_BAND", "m", {"in_flight": None, "n": 2}
    )
    message = records.decision_to_proto(decision)
    assert message.inputs.fields["in_flight"].WhichOneof("kind") == "null_value"
    assert values.seconds(message.last_at) == 1.0
    assert records.event_to_proto(Event(2.25, "scale_up_start", "w", "starting")).at.nanos == 250_000_000
