"""Specs on their way in: merged by a field mask, and created from the configuration where they are missing."""

from collections.abc import Sequence
from functools import partial

from google.protobuf.field_mask_pb2 import FieldMask

from controlplane.core.orders import apply_pool
from controlplane.core.snapshot import Plan, Snapshot
from controlplane.loops.leader import Leader
from springtide.errors import InvalidArgument, NotFound
from springtide.model.pool import PoolSpec
from springtide.v1 import types_pb2 as pb
from springtide.wire.pools import pool_spec_from_proto, pool_spec_to_proto


async def create_missing(leader: Leader, specs: Sequence[PoolSpec]) -> None:
    """Pools of the configuration; one that exists is left as operators have made it. Raises what apply_pool raises."""
    for spec in specs:
        if spec.name not in (await leader.snapshot()).pools:
            await leader.execute(partial(_create, spec=spec))


def _create(snapshot: Snapshot, now: float, spec: PoolSpec) -> Plan:
    return apply_pool(snapshot, spec, now)


def merged(snapshot: Snapshot, message: pb.PoolSpec, mask: FieldMask | None) -> PoolSpec:
    """The spec that is asked for: `message` whole, or the fields that `mask` names on top of what is recorded.

    Raises InvalidArgument for a mask that names no field, NotFound for a mask on a pool that does not exist.
    """
    if mask is None:
        return pool_spec_from_proto(message)
    if not mask.IsValidForDescriptor(pb.PoolSpec.DESCRIPTOR):
        known = ", ".join(sorted(field.name for field in pb.PoolSpec.DESCRIPTOR.fields))
        raise InvalidArgument(
            field="update_mask",
            value=",".join(mask.paths),
            problem="names what is no field of a PoolSpec",
            remedy=f"Fields: {known}.",
        )
    recorded = snapshot.pools.get(message.name)
    if recorded is None:
        raise NotFound(kind="pool", name=message.name, known=snapshot.pools)
    target = pool_spec_to_proto(recorded.spec)
    mask.MergeMessage(message, target, replace_message_field=True, replace_repeated_field=True)
    for path in mask.paths:  # MergeMessage leaves a scalar alone that is absent in the source
        if "." not in path and target.DESCRIPTOR.fields_by_name[path].has_presence and not message.HasField(path):  # type: ignore[arg-type]
            target.ClearField(path)  # type: ignore[arg-type]
    target.name = message.name
    return pool_spec_from_proto(target)
