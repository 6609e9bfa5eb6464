"""PreviewScaling and ExplainDecision: what would be decided, and why something was. Nothing is changed by either."""

from controlplane.core.explain import Explanation, explain
from controlplane.core.orders import pool_named
from controlplane.core.preview import preview
from controlplane.core.snapshot import Snapshot
from controlplane.store.store import Store
from springtide.errors import NotFound
from springtide.model.pool import PolicySpec
from springtide.v1 import controlplane_pb2 as pb
from springtide.wire.records import decision_to_proto, event_to_proto
from springtide.wire.values import count, settings_from_struct

_LOOKED_THROUGH = 10_000


def preview_scaling(snapshot: Snapshot, request: pb.PreviewScalingRequest, now: float) -> pb.PreviewScalingResponse:
    """Raises NotFound and InvalidArgument."""
    policy = None
    if request.HasField("policy"):
        asked = request.policy
        present = pool_named(snapshot, request.pool).spec.policy
        settings = settings_from_struct(asked.settings, "policy.settings")
        if asked.name in ("", present.name):  # the pool's own policy, with these settings changed
            policy = PolicySpec(present.name, {**present.settings, **settings})
        else:
            policy = PolicySpec(asked.name, settings)
    seen = preview(
        snapshot,
        request.pool,
        now,
        policy=policy,
        min_workers=count(request.min_workers, "min_workers") if request.HasField("min_workers") else None,
        max_workers=count(request.max_workers, "max_workers") if request.HasField("max_workers") else None,
        waiting=count(request.waiting, "waiting") if request.HasField("waiting") else None,
    )
    return pb.PreviewScalingResponse(
        decision=decision_to_proto(seen.decision),
        explanation=_message(explain(seen.decision)),
        events=[event_to_proto(event) for event in seen.events],
        conditions=seen.conditions,
    )


async def explain_decision(
    store: Store, snapshot: Snapshot, request: pb.ExplainDecisionRequest
) -> pb.ExplainDecisionResponse:
    """Raises NotFound for a pool that there is not, and for a decision that is not kept."""
    wanted = count(request.decision_id, "decision_id")
    if request.pool:
        pool_named(snapshot, request.pool)
    found = await store.decisions(request.pool, _LOOKED_THROUGH if wanted else 1)
    decision = next((d for d in found if not wanted or d.decision_id == wanted), None)
    if decision is None:
        kept = [str(d.decision_id) for d in found[:3]]
        raise NotFound(kind="decision", name=str(wanted or request.pool or "latest"), known=kept)
    return pb.ExplainDecisionResponse(decision=decision_to_proto(decision), explanation=_message(explain(decision)))


def _message(explanation: Explanation) -> pb.Explanation:
    return pb.Explanation(
        seen=explanation.seen, steps=explanation.steps, settings=explanation.settings, hints=explanation.hints
    )
