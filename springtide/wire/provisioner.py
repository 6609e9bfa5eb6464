"""provisioner.proto: what provisioners say and what they are told, for both ends."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from springtide.errors import InvalidArgument
from springtide.model.provisioning import (
    CapabilitySet,
    DesiredNodes,
    GroupAnswer,
    GroupOrder,
    GroupStatus,
    Orders,
    ProvidedNode,
    ProvidedPhase,
    ProvisionerReport,
    ShutdownOrder,
    StartOrder,
)
from springtide.v1 import provisioner_pb2 as pb
from springtide.wire.values import count, enum_from_proto, enum_to_proto, identifier

MAX_SETS = 64
MAX_NODES = 4096
MAX_NODES_PER_UNIT = 32  # a unit is recorded by one commit
_SET_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")
_LENGTH_DELIMITED = 2
_FIRST_UNKNOWN_FIELD = 9  # of the response


@dataclass(frozen=True, slots=True)
class ProvisionerHello:
    """Who the provisioner is. `session_id` is random per process."""

    provisioner_id: str
    session_id: str
    kind: str
    version: str = ""


def hello_to_proto(hello: ProvisionerHello) -> pb.ProvisionerHello:
    return pb.ProvisionerHello(
        provisioner_id=hello.provisioner_id, session_id=hello.session_id, kind=hello.kind, version=hello.version
    )


def hello_from_proto(message: pb.ProvisionerHello) -> ProvisionerHello:
    """Raises InvalidArgument for bad ids."""
    return ProvisionerHello(
        provisioner_id=identifier(message.provisioner_id, "hello.provisioner_id"),
        session_id=identifier(message.session_id, "hello.session_id"),
        kind=identifier(message.kind, "hello.kind"),
        version=message.version[:64],
    )


# ---------------------------------------------------------------- reports


def report_to_proto(report: ProvisionerReport) -> pb.ProvisionerReport:
    return pb.ProvisionerReport(
        sequence=report.sequence,
        capability_sets=[set_to_proto(found) for found in report.capability_sets],
        nodes=[_node_to_proto(node) for node in report.nodes],
        answers=[
            pb.GroupAnswer(
                request_id=answer.request_id,
                group_id=answer.group_id,
                status=enum_to_proto(pb.GroupStatus, "GROUP_STATUS", answer.status),
                message=answer.message,
            )
            for answer in report.answers
        ],
    )


def report_from_proto(message: pb.ProvisionerReport) -> ProvisionerReport:
    """Raises InvalidArgument for too many or bad entries. A node in a phase of a later version counts as RUNNING: it
    is there, which is what must not be missed."""
    _bound(message.capability_sets, MAX_SETS, "report.capability_sets")
    _bound(message.nodes, MAX_NODES, "report.nodes")
    _bound(message.answers, MAX_NODES, "report.answers")
    sets = tuple(set_from_proto(found) for found in message.capability_sets)
    names = [found.name for found in sets]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InvalidArgument(
            field="report.capability_sets",
            value=",".join(doubled),
            problem="is named twice",
            remedy="Give each set a name of its own.",
        )
    return ProvisionerReport(
        capability_sets=sets,
        nodes=tuple(_node_from_proto(node) for node in message.nodes),
        answers=tuple(
            GroupAnswer(
                answer.request_id[:256],
                answer.group_id[:128],
                enum_from_proto(GroupStatus, pb.GroupStatus, "GROUP_STATUS", answer.status),
                answer.message[:500],
            )
            for answer in message.answers
        ),
        sequence=message.sequence,
    )


def set_to_proto(found: CapabilitySet) -> pb.CapabilitySet:
    return pb.CapabilitySet(
        name=found.name,
        labels=dict(found.labels),
        gpus_per_node=found.gpus_per_node,
        resources=dict(found.resources),
        max_nodes=found.max_nodes,
        nodes_per_unit=found.nodes_per_unit,
        spot=found.spot,
        cost_per_hour=found.cost_per_hour,
        available_nodes=found.available_nodes,
        keep_nodes=found.keep_nodes,
    )


def set_from_proto(message: pb.CapabilitySet) -> CapabilitySet:
    """Raises InvalidArgument for a bad name or a negative number."""
    name = message.name
    if not _SET_NAME.fullmatch(name):
        raise InvalidArgument(
            field="capability_sets.name",
            value=name,
            problem="is not 1 to 48 lower-case letters, digits and inner dashes",
            remedy="Correct the name.",
        )
    field = f"capability_sets.{name}"
    per_unit = count(message.nodes_per_unit, f"{field}.nodes_per_unit") or 1
    if per_unit > MAX_NODES_PER_UNIT:
        raise InvalidArgument(
            field=f"{field}.nodes_per_unit",
            value=per_unit,
            problem=f"is more than {MAX_NODES_PER_UNIT}",
            remedy="Make smaller units.",
        )
    return CapabilitySet(
        name=name,
        labels=dict(message.labels),
        gpus_per_node=count(message.gpus_per_node, f"{field}.gpus_per_node"),
        resources={key: count(amount, f"{field}.resources.{key}") for key, amount in message.resources.items()},
        max_nodes=min(count(message.max_nodes, f"{field}.max_nodes"), MAX_NODES),
        nodes_per_unit=per_unit,
        spot=message.spot,
        cost_per_hour=max(0.0, message.cost_per_hour),
        available_nodes=(
            count(message.available_nodes, f"{field}.available_nodes") if message.HasField("available_nodes") else None
        ),
        keep_nodes=count(message.keep_nodes, f"{field}.keep_nodes"),
    )


def _node_to_proto(node: ProvidedNode) -> pb.ProvidedNode:
    return pb.ProvidedNode(
        node_id=node.node_id,
        group_id=node.group_id,
        capability_set=node.capability_set,
        phase=enum_to_proto(pb.ProvidedPhase, "PROVIDED_PHASE", node.phase),
        reference=node.reference,
        reason=node.reason,
        message=node.message,
        ends_in_s=node.ends_in_s,
    )


def _node_from_proto(message: pb.ProvidedNode) -> ProvidedNode:
    phase = enum_from_proto(ProvidedPhase, pb.ProvidedPhase, "PROVIDED_PHASE", message.phase)
    return ProvidedNode(
        node_id=identifier(message.node_id, "report.nodes.node_id"),
        group_id=identifier(message.group_id or message.node_id, "report.nodes.group_id"),
        capability_set=message.capability_set[:48],
        phase=phase or ProvidedPhase.RUNNING,
        reference=message.reference[:200],
        reason=message.reason[:64],
        message=message.message[:500],
        ends_in_s=message.ends_in_s if message.HasField("ends_in_s") else None,
    )


def _bound(entries: Iterable[object], most: int, field: str) -> None:
    found = len(list(entries))
    if found > most:
        raise InvalidArgument(
            field=field, value=found, problem=f"are more than {most}", remedy="Give fewer, or use several provisioners."
        )


# ---------------------------------------------------------------- orders


def orders_to_proto(
    orders: Orders, store_id: str, revision: int, heartbeat_interval_s: float
) -> pb.ProvisionerServiceSessionResponse:
    return pb.ProvisionerServiceSessionResponse(
        store_id=store_id,
        revision=revision,
        heartbeat_interval_s=heartbeat_interval_s,
        desired=[
            pb.DesiredNodes(
                request_id=wanted.request_id,
                capability_set=wanted.capability_set,
                desired=wanted.desired,
                connected=wanted.connected,
                pending=wanted.pending,
            )
            for wanted in orders.desired
        ],
        start=[
            pb.StartWorkerGroup(
                request_id=order.request_id,
                group_id=order.group.group_id,
                capability_set=order.group.capability_set,
                node_ids=order.group.node_ids,
                join_token=order.group.join_token,
                traceparent=order.group.traceparent,
            )
            for order in orders.start
        ],
        shutdown=[
            pb.ShutdownWorkerGroup(
                request_id=order.request_id, group_id=order.group_id, node_ids=order.node_ids, reason=order.reason
            )
            for order in orders.shutdown
        ],
        known_node_ids=orders.known_node_ids,
    )


def orders_from_proto(message: pb.ProvisionerServiceSessionResponse) -> Orders:
    """Ids are taken as they are: an order with a bad one is answered, not an error of the session."""
    return Orders(
        desired=tuple(
            DesiredNodes(wanted.capability_set, wanted.desired, wanted.connected, wanted.request_id)
            for wanted in message.desired
        ),
        start=tuple(
            StartOrder(
                order.request_id,
                GroupOrder(
                    order.group_id,
                    order.capability_set,
                    tuple(order.node_ids),
                    join_token=order.join_token,
                    traceparent=order.traceparent,
                ),
            )
            for order in message.start
        ),
        shutdown=tuple(
            ShutdownOrder(order.request_id, order.group_id, tuple(order.node_ids), order.reason)
            for order in message.shutdown
        ),
        known_node_ids=tuple(message.known_node_ids),
        unknown=tuple(_unknown_orders(message)),
    )


def _unknown_orders(message: pb.ProvisionerServiceSessionResponse) -> Iterable[tuple[str, str]]:
    """Orders of a later version: messages in later fields of the response whose first two fields are the request's
    and the group's id, as in every order."""
    fields = UnknownFieldSet(message)
    for found in (fields[index] for index in range(len(fields))):
        if found.field_number < _FIRST_UNKNOWN_FIELD or found.wire_type != _LENGTH_DELIMITED:
            continue
        try:
            order = pb.ShutdownWorkerGroup.FromString(found.data)
        except (DecodeError, UnicodeDecodeError):
            continue  # something else than an order
        if order.request_id:
            yield order.request_id, order.group_id
