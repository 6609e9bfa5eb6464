"""provisioner.proto and back; orders of a later version; bounds."""

import pytest

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
from springtide.wire.provisioner import orders_from_proto, orders_to_proto, report_from_proto, report_to_proto

REPORT = ProvisionerReport(
    (
        CapabilitySet("gpu-8", {"zone": "a"}, 8, {"cpus": 64}, 16, 2, True, 12.5, None, 3),
        CapabilitySet("small", available_nodes=0, max_nodes=1),
    ),
    (
        ProvidedNode("n1", "g1", "gpu-8", ProvidedPhase.RUNNING, "job 7", ends_in_s=0.5),
        ProvidedNode("n2", "g1", "gpu-8", ProvidedPhase.ENDED, reason="NODE_FAIL", message="gone"),
    ),
    (GroupAnswer("r1", "g1", GroupStatus.SUCCESS), GroupAnswer("r2", "g2", None, "no answer")),
    9,
)
ORDERS = Orders(
    (DesiredNodes("gpu-8", 3, 1, "r"),),
    (StartOrder("r1", GroupOrder("g1", "gpu-8", ("n1", "n2"), "secret", "00-a-b-01")),),
    (ShutdownOrder("r2", "g2", ("n3",), "SURPLUS"),),
    ("n1", "n2", "n3"),
)


def test_a_report_is_the_same_after_the_wire() -> None:
    """CP15, PV1: also what is unknown stays unknown."""
    assert report_from_proto(report_to_proto(REPORT)) == REPORT


def test_orders_are_the_same_after_the_wire() -> None:
    """CP15, CP3: pending is max(0, desired - connected)."""
    message = orders_to_proto(ORDERS, "store", 7, 1.0)
    assert message.desired[0].pending == 2
    assert orders_from_proto(pb.ProvisionerServiceSessionResponse.FromString(message.SerializeToString())) == ORDERS
    assert "secret" not in repr(ORDERS), "rule 13"


def test_an_order_of_a_later_version_is_noticed() -> None:
    """CP15, rule 14: UnknownAction needs the ids of an order that this version cannot read."""
    order = pb.ShutdownWorkerGroup(request_id="r-later", group_id="g-later", reason="?").SerializeToString()
    field_12 = bytes([12 << 3 | 2, len(order)])
    message = pb.ProvisionerServiceSessionResponse.FromString(
        orders_to_proto(ORDERS, "store", 7, 1.0).SerializeToString() + field_12 + order
    )
    assert orders_from_proto(message).unknown == (("r-later", "g-later"),)


def test_what_is_no_order_in_a_later_field_is_left_alone() -> None:
    """Rule 14."""
    message = orders_to_proto(ORDERS, "store", 7, 1.0).SerializeToString()
    for extra in (bytes([20 << 3 & 0x7F | 0x80, 1, 5]), bytes([13 << 3 | 2, 3, 0xFF, 0xFF, 0xFF])):
        assert orders_from_proto(pb.ProvisionerServiceSessionResponse.FromString(message + extra)).unknown == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "Upper"}, "capability_sets.name"),
        ({"max_nodes": -1}, "capability_sets.gpu.max_nodes"),
        ({"nodes_per_unit": 1000}, "capability_sets.gpu.nodes_per_unit"),
    ],
)
def test_bad_sets_are_refused_by_name(change: dict[str, object], field: str) -> None:
    """Rule 15."""
    bad = pb.CapabilitySet(**{"name": "gpu", **change})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as refused:
        report_from_proto(pb.ProvisionerReport(capability_sets=[bad]))
    assert refused.value.field == field


def test_reports_are_bounded() -> None:
    """Rule 10."""
    many = [pb.CapabilitySet(name=f"s{n}") for n in range(65)]
    with pytest.raises(InvalidArgument):
        report_from_proto(pb.ProvisionerReport(capability_sets=many))
    with pytest.raises(InvalidArgument, match="named twice"):
        report_from_proto(pb.ProvisionerReport(capability_sets=[many[0], many[0]]))
