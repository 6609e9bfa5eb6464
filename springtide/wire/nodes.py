"""Nodes and GPUs on the wire."""

from collections.abc import Iterable
from typing import Any

from springtide.errors import InvalidArgument
from springtide.model.node import Gpu, Node, Provision
from springtide.v1 import types_pb2 as pb
from springtide.wire.values import enum_to_proto, timestamp


def gpu_to_proto(gpu: Gpu) -> pb.Gpu:
    return pb.Gpu(
        id=gpu.id, name=gpu.name, memory_bytes=gpu.memory_bytes, simulated=gpu.simulated, link_group=gpu.link_group
    )


def gpu_from_proto(message: pb.Gpu) -> Gpu:
    """Raises InvalidArgument for a GPU without an id."""
    if not message.id:
        raise InvalidArgument(field="gpus.id", value="", problem="is empty", remedy="Give each GPU its id.")
    memory = message.memory_bytes if message.HasField("memory_bytes") else None
    return Gpu(message.id, message.name, memory, message.simulated, message.link_group)


def node_to_proto(
    node: Node, free_gpus: Iterable[str], heartbeat_age_s: float | None = None, foreign_workers: int = 0
) -> pb.Node:
    """`free_gpus` no worker holds; the age is None when nothing was heard since this control plane started."""
    return pb.Node(
        node_id=node.node_id,
        state=enum_to_proto(pb.NodeState, "NODE_STATE", node.state),
        reason=node.reason,
        cordoned=node.spec.cordoned,
        cordon_reason=node.spec.cordon_reason,
        address=node.observed.address,
        gpus=[gpu_to_proto(gpu) for gpu in node.observed.gpus],
        labels=dict(node.observed.labels),
        resources=dict(node.observed.resources),
        free_gpus=list(free_gpus),
        state_since=timestamp(node.state_since),
        heartbeat_age_s=heartbeat_age_s,
        agent_version=node.observed.agent_version,
        boot_id=node.observed.boot_id,
        revision=node.revision,
        foreign_workers=foreign_workers,
        **_provided(node.provided),
    )


def _provided(provided: Provision | None) -> dict[str, Any]:
    if provided is None:
        return {}
    return {
        "provisioner_id": provided.provisioner_id,
        "group_id": provided.group_id,
        "capability_set": provided.capability_set,
        "reference": provided.reference,
        "register_deadline": timestamp(provided.register_deadline),
        "ends_at": timestamp(provided.ends_at),
        "spot": provided.spot,
    }
