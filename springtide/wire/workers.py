"""Workers and their exits on the wire."""

from springtide.model.enums import State
from springtide.model.worker import ExitInfo, Worker, WorkerReport
from springtide.v1 import types_pb2 as pb
from springtide.wire.values import enum_to_proto, timestamp

LOG_TAIL_CHARS = 4096


def exit_to_proto(exit_info: ExitInfo | None) -> pb.ExitInfo | None:
    if exit_info is None:
        return None
    return pb.ExitInfo(
        code=exit_info.code,
        signal=exit_info.signal,
        reason=exit_info.reason,
        message=exit_info.message,
        log_tail=exit_info.log_tail[-LOG_TAIL_CHARS:],
    )


def exit_from_proto(message: pb.ExitInfo) -> ExitInfo:
    return ExitInfo(
        code=message.code if message.HasField("code") else None,
        signal=message.signal if message.HasField("signal") else None,
        reason=message.reason,
        message=message.message,
        log_tail=message.log_tail[-LOG_TAIL_CHARS:],
    )


def worker_to_proto(worker: Worker, report: WorkerReport | None = None, engine: str = "") -> pb.Worker:
    """`report`: the fresh report of this incarnation; without one the load is unknown."""
    intent, observed = worker.intent, worker.observed
    active = intent.state is State.ACTIVE
    return pb.Worker(
        worker_id=worker.worker_id,
        pool=worker.pool,
        node_id=intent.node_id,
        gpu_ids=intent.gpu_ids,
        state=enum_to_proto(pb.WorkerState, "WORKER_STATE", intent.state),
        phase=enum_to_proto(pb.WorkerPhase, "WORKER_PHASE", None if active else intent.phase),
        condition=enum_to_proto(pb.WorkerCondition, "WORKER_CONDITION", intent.condition if active else None),
        admission=enum_to_proto(pb.WorkerAdmission, "WORKER_ADMISSION", intent.admission if active else None),
        reason=intent.reason,
        message=intent.message,
        generation=intent.generation,
        observed_generation=observed.generation,
        incarnation=observed.incarnation,
        endpoint=observed.endpoint,
        in_flight=None if report is None else report.in_flight,
        engine_running=None if report is None else report.engine_running,
        engine_waiting=None if report is None else report.engine_waiting,
        kv_use=None if report is None else report.kv_use,
        total_served=None if report is None else report.total_served,
        max_in_flight=observed.max_in_flight,
        attempts=intent.attempts,
        state_since=timestamp(intent.state_since),
        deadline=timestamp(intent.deadline),
        exit=exit_to_proto(observed.exit),
        log_path=observed.log_path,
        weight_version=observed.weight_version,
        traceparent=intent.traceparent,
        revision=worker.revision,
        engine=engine,
        freed_bytes=observed.freed_bytes,
        reoccupied_bytes=observed.reoccupied_bytes,
        lent_to=intent.lent_to,
        missing_verbs=dict(observed.missing_verbs),
        start_phases_s=dict(observed.start_phases_s),
        confinement=observed.confinement,
    )
