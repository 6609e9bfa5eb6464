"""A pool's routing spec: checked where it is said, read from TOML, carried to the routers with measured facts."""

import dataclasses

import pytest

from controlplane.core.routing import routing_table
from controlplane.core.snapshot import LiveView, Snapshot
from controlplane.core.validation import checked
from springtide.client.spec import pool_spec
from springtide.errors import InvalidArgument
from springtide.model.enums import Role, State
from springtide.model.node import Node, NodeObserved
from springtide.model.pool import Pool, PoolSpec, RoutingSpec
from springtide.model.routing_policy import ROUTING_POLICIES, routing_settings
from springtide.model.worker import Worker, WorkerIntent, WorkerObserved
from springtide.wire.pools import pool_spec_from_proto

SPEC = PoolSpec("chat", "sim", routing=RoutingSpec("sticky", {"most_extra": 3}), labels={"zone": "b", "tier": "x"})


@pytest.mark.parametrize(
    ("routing", "field", "remedy"),
    [
        (RoutingSpec("sticki"), "spec.routing.name", "Did you mean sticky?"),
        (RoutingSpec("sticky", {"most_extr": 1}), "spec.routing.settings.most_extr", "Did you mean most_extra?"),
        (RoutingSpec("round_robin", {"x": 1}), "spec.routing.settings.x", "It takes none."),
        (RoutingSpec("power_of_two", {"choices": 1}), "spec.routing.settings.choices", "Leave it out for 2."),
        (RoutingSpec("power_of_two", {"choices": 2.5}), "spec.routing.settings.choices", "Leave it out for 2."),
        (RoutingSpec("power_of_two", {"choices": True}), "spec.routing.settings.choices", "Leave it out for 2."),
        (RoutingSpec("sticky", {"by": "moon"}), "spec.routing.settings.by", "request_id"),
        (RoutingSpec("weighted", {"label": 3}), "spec.routing.settings.label", "Label that holds"),
    ],
)
def test_a_wrong_routing_spec_names_its_field(routing: RoutingSpec, field: str, remedy: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked(dataclasses.replace(SPEC, routing=routing), {}, {})
    assert caught.value.field == field
    assert remedy in (caught.value.remedy or "")


@pytest.mark.parametrize("labels", [{"": "x"}, {"a b": "x"}, {"a": "ü"}, {"a" * 64: "x"}])
def test_a_wrong_label_is_refused(labels: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="labels"):
        checked(dataclasses.replace(SPEC, labels=labels), {}, {})


def test_defaults_are_filled_in_and_pass_their_own_check() -> None:
    for name in ROUTING_POLICIES:
        filled = routing_settings(RoutingSpec(name))
        assert routing_settings(RoutingSpec(name, filled)) == filled
    assert routing_settings(SPEC.routing)["most_extra"] == 3
    assert checked(SPEC, {}, {}).routing == SPEC.routing


def test_the_file_of_apply_takes_a_name_or_a_table() -> None:
    plain = {"name": "chat", "engine": "sim", "labels": {"zone": "a"}}
    spec = pool_spec_from_proto(pool_spec({**plain, "routing": "least_kv"}))
    assert (spec.routing, spec.labels) == (RoutingSpec("least_kv"), {"zone": "a"})
    spec = pool_spec_from_proto(pool_spec({**plain, "routing": {"name": "sticky", "settings": {"most_ratio": 2.5}}}))
    assert spec.routing == RoutingSpec("sticky", {"most_ratio": 2.5})
    assert pool_spec_from_proto(pool_spec(plain)).routing == RoutingSpec("least_in_flight")
    with pytest.raises(InvalidArgument, match=r"routing\.setting"):
        pool_spec({**plain, "routing": {"setting": 1}})


def test_the_table_carries_policy_role_labels_and_the_measured_start_up() -> None:
    """RT3: Retry-After needs it; RT7: labels of the node and of the pool, the pool's win."""
    node = Node("n1", observed=NodeObserved(labels={"zone": "a", "gpu": "h100"}))
    worker = Worker(
        "chat-1",
        "chat",
        WorkerIntent(state=State.ACTIVE, phase=None, node_id="n1"),
        WorkerObserved(incarnation=7, endpoint="h:1"),
    )
    spec = dataclasses.replace(SPEC, role=Role.DECODE)
    snapshot = Snapshot("s", 3, {"chat": Pool(spec)}, {"n1": node}, {"chat-1": worker}, live=LiveView())
    table = routing_table(snapshot)
    assert table.workers["chat-1"].labels == {"zone": "b", "gpu": "h100", "tier": "x"}
    pool = table.pools["chat"]
    assert (pool.routing, pool.role, pool.start_up_s) == (SPEC.routing, Role.DECODE, None)
    seen = dataclasses.replace(snapshot, live=LiveView(start_ups_s={"chat": (40.0, 10.0, 20.0)}))
    assert routing_table(seen).pools["chat"].start_up_s == 20.0
