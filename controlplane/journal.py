"""What the leader records, as log lines: events and decisions that are no holds, each with its trace id."""

import logging

from controlplane.loops.leader import Step
from springtide.model.enums import DecisionResult

log = logging.getLogger(__name__)

_WARNINGS = frozenset(
    {"worker_failed", "worker_lost", "node_lost", "node_preempted", "drain_aborted", "drain_overdue", "release_overdue"}
)


def journal(step: Step) -> None:
    """Called with each commit."""
    for decision in step.committed.decisions:
        level = logging.DEBUG if decision.result is DecisionResult.HOLD else logging.INFO
        if decision.count == 1:
            log.log(
                level,
                "%s %s: %d -> %d: %s",
                decision.pool,
                decision.result.value,
                decision.from_workers,
                decision.to_workers,
                decision.message or decision.reason,
                extra={"trace_id": decision.trace_id, "pool": decision.pool, "reason": decision.reason},
            )
    for event in step.committed.events:
        level = logging.WARNING if event.action in _WARNINGS else logging.INFO
        log.log(
            level,
            "%s %s: %s",
            event.target,
            event.action,
            event.message or event.reason,
            extra={"trace_id": event.trace_id, "pool": event.pool, "reason": event.reason, "status": event.status},
        )
