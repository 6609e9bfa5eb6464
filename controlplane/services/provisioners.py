"""Provisioners as operators see them, and the tokens that let them in."""

from controlplane.core.nodes.offers import blocked_sets
from controlplane.core.nodes.orders import desired_of
from controlplane.core.snapshot import Snapshot
from controlplane.services.joining import Door
from springtide.errors import FailedPrecondition, InvalidArgument
from springtide.model.enums import NodeState
from springtide.model.provisioning import CapabilitySet
from springtide.v1 import controlplane_pb2 as pb
from springtide.wire.provisioner import set_to_proto
from springtide.wire.values import identifier, timestamp

_TOKEN_S = 86_400.0
_LONGEST_TOKEN_S = 366 * 86_400.0


def provisioner_messages(snapshot: Snapshot, now: float) -> list[pb.ProvisionerStatus]:
    """All that are known, those too that own nodes and have not been heard since this control plane started."""
    owners = {node.provided.provisioner_id for node in snapshot.nodes.values() if node.provided is not None}
    return [_message(snapshot, key, now) for key in sorted({*snapshot.live.provisioners, *owners})]


def _message(snapshot: Snapshot, provisioner_id: str, now: float) -> pb.ProvisionerStatus:
    live = snapshot.live.provisioners.get(provisioner_id)
    own = [n for n in snapshot.nodes.values() if n.provided and n.provided.provisioner_id == provisioner_id]
    sets = dict(live.sets) if live is not None else {}
    for node in own:
        name = node.provided.capability_set if node.provided is not None else ""
        sets.setdefault(name, CapabilitySet(name))
    blocked = blocked_sets(snapshot, provisioner_id, now)
    found = pb.ProvisionerStatus(provisioner_id=provisioner_id)
    if live is not None:
        found.kind, found.connected, found.version = live.kind, live.connected, live.version
        found.report_age_s = max(0.0, now - live.last_heard_at)
    for name, kind in sorted(sets.items()):
        wanted = desired_of(snapshot, own, name)
        states = [node.state for node in own if node.provided is not None and node.provided.capability_set == name]
        found.sets.append(
            pb.ProvisionerSetStatus(
                capability_set=set_to_proto(kind),
                desired=wanted.desired,
                connected=wanted.connected,
                pending=wanted.pending,
                releasing=states.count(NodeState.RELEASING),
                lost=states.count(NodeState.LOST),
                blocked_until=timestamp(blocked.get(name)),
            )
        )
    return found


def create_join_token(door: Door, request: pb.CreateJoinTokenRequest, now: float) -> pb.CreateJoinTokenResponse:
    """Raises InvalidArgument, FailedPrecondition."""
    provisioner_id = identifier(request.provisioner_id, "provisioner_id")
    valid_for_s = _TOKEN_S
    if request.HasField("valid_for"):
        valid_for_s = request.valid_for.seconds + request.valid_for.nanos / 1e9
    if not 1 <= valid_for_s <= _LONGEST_TOKEN_S:
        raise InvalidArgument(
            field="valid_for",
            value=valid_for_s,
            problem="is not between 1 s and 366 days",
            remedy="Choose a time for which the provisioner may come and go, 24h for example.",
        )
    if door.tokens is None:
        raise FailedPrecondition(
            "This control plane listens on loopback only and asks nobody for a token.",
            reason="NO_TOKENS_NEEDED",
            field="listen",
            remedy="Start the provisioner without one, or let the control plane listen on a network address with TLS.",
        )
    token = door.tokens.for_provisioner(provisioner_id, valid_for_s)
    return pb.CreateJoinTokenResponse(token=token, expires_at=timestamp(now + valid_for_s))
