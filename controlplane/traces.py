"""One trace per scaling event: the root span is emitted when the event is over, with the ids that the worker carried
all along, so that what agents and routers sent meanwhile are its children.

    springtide.scale_up     decision -> ACTIVE
    springtide.replace      the same for a worker that takes another's place
    springtide.acquire_node a node REQUESTED -> UP; the first start on it is in the same trace
    springtide.release_node a node RELEASING -> GONE
    springtide.scale_down   decision -> INACTIVE, memory free
      springtide.unroute, springtide.finish, springtide.release   the phases of a drain as the control plane saw them
"""

from collections import OrderedDict

from controlplane.core.snapshot import Put
from controlplane.loops.leader import Step
from springtide import telemetry
from springtide.model.enums import DecisionResult, NodeState, Phase, State
from springtide.model.node import Node
from springtide.model.worker import Worker

_REMEMBERED = 4096  # workers whose start replaces another
_DRAIN_SPANS = {
    Phase.UNROUTING: "springtide.unroute",
    Phase.FINISHING: "springtide.finish",
    Phase.RELEASING: "springtide.release",
}


class Traces:
    """Called with each commit of the leader."""

    def __init__(self) -> None:
        self._replacing: OrderedDict[str, None] = OrderedDict()

    def __call__(self, step: Step) -> None:
        for decision in step.plan.decisions:
            for worker_id in decision.workers:
                self._replacing.pop(worker_id, None)
                if decision.result is DecisionResult.REPLACE:
                    self._replacing[worker_id] = None
        while len(self._replacing) > _REMEMBERED:
            self._replacing.popitem(last=False)
        for write in step.plan.writes:
            if isinstance(write, Put) and isinstance(write.record, Node):
                known = step.before.nodes.get(write.record.node_id)
                if known is not None and known.state is not write.record.state:
                    _node_moved(known, write.record, step.now)
            if isinstance(write, Put) and isinstance(write.record, Worker):
                before = step.before.workers.get(write.record.worker_id)
                if before is not None:
                    self._moved(before, write.record, step.now)

    def _moved(self, before: Worker, after: Worker, now: float) -> None:
        same_event = before.intent.traceparent == after.intent.traceparent
        if before.state is State.DRAINING and (after.intent.phase is not before.intent.phase or not same_event):
            self._drain_phase(before, now)
        if before.state is State.STARTING and (after.state is not State.STARTING or not same_event):
            name = "springtide.replace" if before.worker_id in self._replacing else "springtide.scale_up"
            reached = after.state is State.ACTIVE
            self._root(name, before, after, now, None if reached else after.intent.reason or "NOT_STARTED")
        elif before.state is State.DRAINING and after.state is not State.DRAINING:
            ended_well = after.state is State.ACTIVE or after.intent.phase is Phase.STOPPED
            self._root("springtide.scale_down", before, after, now, None if ended_well else after.intent.reason)
            if after.state is State.ACTIVE:  # a drain that was cancelled gives capacity back at once
                self._root("springtide.scale_up", after, after, now, None, start_s=now)

    def _root(
        self, name: str, before: Worker, after: Worker, now: float, error: str | None, start_s: float | None = None
    ) -> None:
        telemetry.emit_span(
            name,
            traceparent=before.intent.traceparent,
            start_s=before.intent.state_since if start_s is None else start_s,
            end_s=now,
            as_root=True,
            error=error,
            attributes={
                **_who(before),
                "springtide.reason": before.intent.reason,
                "springtide.state": after.state.value,
                "springtide.phase": after.intent.phase.value if after.intent.phase else None,
                "springtide.outcome": after.intent.reason,
                "springtide.gpus": before.intent.gpu_ids,
                "springtide.attempts": after.intent.attempts,
            },
        )

    def _drain_phase(self, before: Worker, now: float) -> None:
        name = _DRAIN_SPANS.get(before.intent.phase or Phase.STOPPED)
        if name is not None:
            telemetry.emit_span(
                name,
                traceparent=before.intent.traceparent,
                start_s=before.intent.phase_since,
                end_s=now,
                attributes=_who(before),
            )


def _node_moved(before: Node, after: Node, now: float) -> None:
    """The first start on the node goes on in this trace; see nodes.facts.trace_on_node."""
    provided = after.provided
    if provided is None or not provided.traceparent or before.state not in (NodeState.REQUESTED, NodeState.RELEASING):
        return
    acquired = before.state is NodeState.REQUESTED
    wrong = after.state not in (NodeState.UP, NodeState.RELEASING) if acquired else after.state is not NodeState.GONE
    telemetry.emit_span(
        "springtide.acquire_node" if acquired else "springtide.release_node",
        traceparent=provided.traceparent,
        start_s=before.state_since,
        end_s=now,
        as_root=acquired,
        error=after.reason if wrong else None,
        attributes={
            "springtide.node": after.node_id,
            "springtide.pool": provided.pool,
            "springtide.provisioner": provided.provisioner_id,
            "springtide.capability_set": provided.capability_set,
            "springtide.reason": before.reason,
            "springtide.outcome": after.reason,
        },
    )


def _who(worker: Worker) -> dict[str, str | int]:
    return {
        "springtide.pool": worker.pool,
        "springtide.worker": worker.worker_id,
        "springtide.node": worker.intent.node_id,
        "springtide.generation": worker.intent.generation,
        "springtide.incarnation": worker.observed.incarnation,
    }
