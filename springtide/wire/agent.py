"""agent.proto: what agents say and what they are told, for both ends."""

from collections.abc import Iterable
from dataclasses import dataclass

from springtide.errors import InvalidArgument
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import ReportedPhase, Want
from springtide.model.node import NodeObserved
from springtide.model.worker import WorkerReport
from springtide.v1 import agent_pb2 as pb
from springtide.wire.nodes import gpu_from_proto, gpu_to_proto
from springtide.wire.values import count, enum_from_proto, enum_to_proto, identifier
from springtide.wire.workers import exit_from_proto, exit_to_proto

MAX_REPORTS = 4096


@dataclass(frozen=True, slots=True)
class Hello:
    """Who the node is. `session_id` is random per agent process."""

    node_id: str
    session_id: str
    observed: NodeObserved


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Everything the agent knows now. `stop_deadline_s`: seconds until the node is gone; None: no deadline."""

    sequence: int
    reports: tuple[WorkerReport, ...] = ()
    stopping: bool = False
    stop_deadline_s: float | None = None
    stop_reason: str = ""  # UPPER_SNAKE


def hello_to_proto(hello: Hello) -> pb.NodeHello:
    observed = hello.observed
    return pb.NodeHello(
        node_id=hello.node_id,
        session_id=hello.session_id,
        boot_id=observed.boot_id,
        address=observed.address,
        gpus=[gpu_to_proto(gpu) for gpu in observed.gpus],
        labels=dict(observed.labels),
        resources=dict(observed.resources),
        agent_version=observed.agent_version,
    )


def hello_from_proto(message: pb.NodeHello) -> Hello:
    """Raises InvalidArgument for bad ids, no address, or a GPU named twice."""
    gpus = tuple(gpu_from_proto(gpu) for gpu in message.gpus)
    ids = [gpu.id for gpu in gpus]
    doubled = sorted({gpu_id for gpu_id in ids if ids.count(gpu_id) > 1})
    if doubled:
        remedy = "Name each GPU once."
        raise InvalidArgument(field="hello.gpus", value=",".join(doubled), problem="is named twice", remedy=remedy)
    if not message.address:
        remedy = "Set the host under which routers reach this node."
        raise InvalidArgument(field="hello.address", value="", problem="is empty", remedy=remedy)
    return Hello(
        node_id=identifier(message.node_id, "hello.node_id"),
        session_id=identifier(message.session_id, "hello.session_id"),
        observed=NodeObserved(
            boot_id=message.boot_id,
            address=message.address,
            gpus=gpus,
            labels=dict(message.labels),
            resources={key: count(number, f"hello.resources.{key}") for key, number in message.resources.items()},
            agent_version=message.agent_version,
        ),
    )


def heartbeat_to_proto(heartbeat: Heartbeat) -> pb.NodeHeartbeat:
    return pb.NodeHeartbeat(
        sequence=heartbeat.sequence,
        workers=[report_to_proto(report) for report in heartbeat.reports],
        stopping=heartbeat.stopping,
        stop_deadline_s=heartbeat.stop_deadline_s or 0.0,
        stop_reason=heartbeat.stop_reason,
    )


def heartbeat_from_proto(message: pb.NodeHeartbeat) -> Heartbeat:
    """Raises InvalidArgument for more than MAX_REPORTS reports or a bad worker id."""
    if len(message.workers) > MAX_REPORTS:
        problem = f"are more than {MAX_REPORTS} reports"
        raise InvalidArgument(
            field="heartbeat.workers", value=len(message.workers), problem=problem, remedy="Report live workers only."
        )
    return Heartbeat(
        sequence=message.sequence,
        reports=tuple(report_from_proto(report) for report in message.workers),
        stopping=message.stopping,
        stop_deadline_s=message.stop_deadline_s if message.stop_deadline_s > 0 else None,
        stop_reason=message.stop_reason,
    )


def report_to_proto(report: WorkerReport) -> pb.WorkerReport:
    return pb.WorkerReport(
        worker_id=report.worker_id,
        pool=report.pool,
        store_id=report.store_id,
        generation=report.generation,
        incarnation=report.incarnation,
        phase=enum_to_proto(pb.ReportedPhase, "REPORTED_PHASE", report.phase),
        endpoint=report.endpoint,
        gpu_ids=report.gpu_ids,
        in_flight=report.in_flight,
        engine_running=report.engine_running,
        engine_waiting=report.engine_waiting,
        kv_use=report.kv_use,
        total_served=report.total_served,
        max_in_flight=report.max_in_flight,
        exit=exit_to_proto(report.exit),
        log_path=report.log_path,
        weight_version=report.weight_version,
        launch_fingerprint=report.launch_fingerprint,
        generation_tokens_total=report.generation_tokens_total,
        probe_failures=report.probe_failures,
        traceparent=report.traceparent,
        engine_idle=report.engine_idle,
        freed_bytes=report.freed_bytes,
        reoccupied_bytes=report.reoccupied_bytes,
        missing_verbs=dict(report.missing_verbs),
        verbs_known=report.verbs_known,
        start_phases_s=dict(report.start_phases_s),
        slot_wait_s=report.slot_wait_s,
        confinement=report.confinement,
    )


def report_from_proto(message: pb.WorkerReport) -> WorkerReport:
    """An unknown phase reads as ADOPTING: something lives there, it is not routable, its slice is taken."""
    phase = enum_from_proto(ReportedPhase, pb.ReportedPhase, "REPORTED_PHASE", message.phase)
    return WorkerReport(
        worker_id=identifier(message.worker_id, "heartbeat.workers.worker_id"),
        pool=message.pool,
        store_id=message.store_id,
        generation=message.generation,
        incarnation=message.incarnation,
        phase=phase or ReportedPhase.ADOPTING,
        endpoint=message.endpoint,
        gpu_ids=tuple(message.gpu_ids),
        in_flight=message.in_flight if message.HasField("in_flight") else None,
        engine_running=message.engine_running if message.HasField("engine_running") else None,
        engine_waiting=message.engine_waiting if message.HasField("engine_waiting") else None,
        kv_use=message.kv_use if message.HasField("kv_use") else None,
        total_served=message.total_served if message.HasField("total_served") else None,
        max_in_flight=message.max_in_flight,
        exit=exit_from_proto(message.exit) if message.HasField("exit") else None,
        log_path=message.log_path,
        weight_version=message.weight_version,
        launch_fingerprint=message.launch_fingerprint,
        generation_tokens_total=message.generation_tokens_total
        if message.HasField("generation_tokens_total")
        else None,
        probe_failures=message.probe_failures if message.HasField("probe_failures") else None,
        traceparent=message.traceparent,
        engine_idle=message.engine_idle,
        freed_bytes=message.freed_bytes if message.HasField("freed_bytes") else None,
        reoccupied_bytes=message.reoccupied_bytes if message.HasField("reoccupied_bytes") else None,
        missing_verbs=dict(message.missing_verbs),
        verbs_known=message.verbs_known,
        start_phases_s=dict(message.start_phases_s),
        slot_wait_s=message.slot_wait_s,
        confinement=message.confinement,
    )


def desired_to_proto(desired: DesiredWorker) -> pb.DesiredWorker:
    return pb.DesiredWorker(
        worker_id=desired.worker_id,
        pool=desired.pool,
        generation=desired.generation,
        want=enum_to_proto(pb.Want, "WANT", desired.want),
        paused=desired.paused,
        abort_in_flight=desired.abort_in_flight,
        kill=desired.kill,
        launch=launch_to_proto(desired.launch),
        traceparent=desired.traceparent,
        after_incarnation=desired.after_incarnation,
        sleep_level=desired.sleep_level,
        start_asleep=desired.start_asleep,
        weight_version=desired.weight_version,
        weight_source=desired.weight_source,
    )


def desired_from_proto(message: pb.DesiredWorker) -> DesiredWorker:
    """An unknown want is None: leave the worker as it is."""
    return DesiredWorker(
        worker_id=identifier(message.worker_id, "workers.worker_id"),
        pool=message.pool,
        generation=message.generation,
        want=enum_from_proto(Want, pb.Want, "WANT", message.want),
        launch=launch_from_proto(message.launch),
        paused=message.paused,
        abort_in_flight=message.abort_in_flight,
        kill=message.kill,
        traceparent=message.traceparent,
        after_incarnation=message.after_incarnation,
        sleep_level=message.sleep_level,
        start_asleep=message.start_asleep,
        weight_version=message.weight_version,
        weight_source=message.weight_source,
    )


def launch_to_proto(launch: EngineLaunch) -> pb.EngineLaunch:
    return pb.EngineLaunch(
        engine=launch.engine,
        model=launch.model,
        served_model_name=launch.served_model_name,
        tensor_parallel_size=launch.tensor_parallel_size,
        gpu_ids=launch.gpu_ids,
        engine_args=launch.engine_args,
        engine_env=dict(launch.engine_env),
        interpreter=launch.interpreter,
        max_in_flight=launch.max_in_flight,
        start_timeout_s=launch.start_timeout_s,
        stop_grace_s=launch.stop_grace_s,
        weight_version=launch.weight_version,
    )


def launch_from_proto(message: pb.EngineLaunch) -> EngineLaunch:
    return EngineLaunch(
        engine=message.engine,
        model=message.model,
        served_model_name=message.served_model_name,
        tensor_parallel_size=message.tensor_parallel_size or 1,
        gpu_ids=tuple(message.gpu_ids),
        engine_args=tuple(message.engine_args),
        engine_env=dict(message.engine_env),
        interpreter=message.interpreter,
        max_in_flight=message.max_in_flight,
        start_timeout_s=message.start_timeout_s,
        stop_grace_s=message.stop_grace_s,
        weight_version=message.weight_version,
    )


def desired_state(
    store_id: str,
    revision: int,
    heartbeat_interval_s: float,
    workers: Iterable[DesiredWorker],
    verbs: Iterable[pb.VerbOrder] = (),
) -> pb.SessionResponse:
    """The whole of what a node is told."""
    return pb.SessionResponse(
        store_id=store_id,
        revision=revision,
        heartbeat_interval_s=heartbeat_interval_s,
        workers=[desired_to_proto(worker) for worker in workers],
        verbs=verbs,
    )
