"""Decisions and events on the wire."""

from springtide.model.record import Decision, Event
from springtide.v1 import types_pb2 as pb
from springtide.wire.values import enum_to_proto, struct, timestamp


def decision_to_proto(decision: Decision) -> pb.Decision:
    return pb.Decision(
        decision_id=decision.decision_id,
        pool=decision.pool,
        at=timestamp(decision.at),
        last_at=timestamp(decision.last_at or decision.at),
        count=decision.count,
        policy=decision.policy,
        result=enum_to_proto(pb.DecisionResult, "DECISION_RESULT", decision.result),
        from_workers=decision.from_workers,
        to_workers=decision.to_workers,
        reason=decision.reason,
        message=decision.message,
        inputs=struct(decision.inputs),
        workers=decision.workers,
        trace_id=decision.trace_id,
        revision=decision.revision,
    )


def event_to_proto(event: Event) -> pb.Event:
    return pb.Event(
        event_id=event.event_id,
        at=timestamp(event.at),
        action=event.action,
        target=event.target,
        status=event.status,
        pool=event.pool,
        node_id=event.node_id,
        reason=event.reason,
        message=event.message,
        trace_id=event.trace_id,
        revision=event.revision,
    )
