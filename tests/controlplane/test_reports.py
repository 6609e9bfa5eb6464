"""A provisioner that reports without end: the control plane looks at the newest of each interval, and misses no end."""

import itertools
from typing import Any

import pytest

from controlplane.provisioners import ENDED_KEPT_S, Provisioners
from controlplane.services.reports import REPORT_GAP_S, NewestReport
from springtide.errors import Exhausted, SpringtideError
from springtide.model.provisioning import ProvidedNode, ProvidedPhase, ProvisionerReport
from springtide.rpc import channel
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import provisioner_pb2 as pb
from springtide.wire.provisioner import MAX_NODES, ProvisionerHello, report_from_proto
from tests.controlplane.harness import operator, start_control, until
from tests.controlplane.test_provisioners import FakeProvisioner, need, told

FLOOD = 400


def node(node_id: str, phase: str, reason: str = "", group_id: str = "") -> pb.ProvidedNode:
    return pb.ProvidedNode(
        node_id=node_id,
        group_id=group_id or node_id,
        capability_set="std",
        phase=pb.ProvidedPhase.Value(f"PROVIDED_PHASE_{phase}"),
        reason=reason,
    )


def test_the_newest_of_each_interval_is_taken() -> None:
    """Rule 10: the first at once; of those that follow within the interval the last one, when it is over."""
    reports, now = NewestReport(0.1), 100.0
    assert reports.due_in_s(now) is None
    taken: list[int] = []
    for sequence in range(1, FLOOD + 1):  # one each millisecond
        reports.put(pb.ProvisionerReport(sequence=sequence))
        found = reports.take(now)
        taken += [found.sequence] if found is not None else []
        now += 0.001
    assert taken == [1, 101, 201, 301]
    assert reports.due_in_s(now) == pytest.approx(0.0)
    last = reports.take(now)
    assert last is not None
    assert last.sequence == FLOOD
    assert reports.due_in_s(now) is None


def test_nodes_that_ended_in_a_skipped_report_are_told() -> None:
    """CP12, rule 10: with their reason; a node that is listed again is what the newest says."""
    reports = NewestReport(0.1)
    reports.put(pb.ProvisionerReport(sequence=1))
    assert reports.take(0.0) is not None
    reports.put(pb.ProvisionerReport(nodes=[node("a", "ENDED", "PREEMPTED"), node("b", "ENDED"), node("c", "RUNNING")]))
    reports.put(pb.ProvisionerReport(nodes=[node("b", "PENDING")], sequence=3))
    assert reports.take(0.05) is None
    found = reports.take(0.05, at_once=True)
    assert found is not None
    assert {n.node_id: (n.phase, n.reason) for n in found.nodes} == {
        "a": (pb.PROVIDED_PHASE_ENDED, "PREEMPTED"),
        "b": (pb.PROVIDED_PHASE_PENDING, ""),
    }
    reports.put(pb.ProvisionerReport(sequence=4))
    again = reports.take(1.0)
    assert again is not None
    assert not again.nodes, "told once"


def test_what_is_kept_of_skipped_reports_is_bounded() -> None:
    """Rule 10: new ended nodes in each of many reports make no report that is too long."""
    reports = NewestReport(0.1)
    for number in range(3):
        ended = [node(f"n-{number}-{index}", "ENDED") for index in range(MAX_NODES)]
        reports.put(pb.ProvisionerReport(nodes=ended))
    found = reports.take(0.0)
    assert found is not None
    assert len(report_from_proto(found).nodes) == MAX_NODES
    assert found.nodes[0].node_id == "n-2-0"


def test_an_end_is_seen_by_a_leader_that_looks_late() -> None:
    """CP12: listed as ended in one report and not in the next: for a while it is still known how it ended."""
    heard = Provisioners(1.0)
    connection = heard.hello(ProvisionerHello("p1", "s", "fake"), 0.0)
    ended = ProvidedNode("a", "a", "std", ProvidedPhase.ENDED, reason="NODE_FAIL")
    heard.report("p1", connection, ProvisionerReport(nodes=(ended,)), 1.0)
    heard.report("p1", connection, ProvisionerReport(), 1.1)
    assert heard.view()["p1"].nodes == {"a": ended}
    assert heard.report("p1", connection, ProvisionerReport(), 1.0 + ENDED_KEPT_S), "that it is gone is news"
    assert heard.view()["p1"].nodes == {}
    back = ProvidedNode("a", "a", "std", ProvidedPhase.PENDING)
    heard.report("p1", connection, ProvisionerReport(nodes=(ended,)), 20.0)
    heard.report("p1", connection, ProvisionerReport(nodes=(back,)), 20.1)
    assert heard.view()["p1"].nodes == {"a": back}, "a job that is requeued is the same node"


def test_ends_that_are_kept_are_bounded() -> None:
    """Rule 10."""
    heard = Provisioners(1.0)
    connection = heard.hello(ProvisionerHello("p1", "s", "fake"), 0.0)
    for number in range(4):
        nodes = tuple(ProvidedNode(f"{number}-{n}", "g", "std", ProvidedPhase.ENDED) for n in range(MAX_NODES))
        heard.report("p1", connection, ProvisionerReport(nodes=nodes), float(number) / 10)
    assert list(heard.view()["p1"].nodes) == [f"3-{n}" for n in range(MAX_NODES)]


async def test_a_flood_of_reports_is_a_look_for_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 10, CP12: hundreds of reports at once, the node's end in one of the first: taken at most once in each
    interval, the last one is what stands, and the end is seen with its reason."""
    plane, address = await start_control()
    taken: list[float] = []
    take = Provisioners.report

    def counted(
        self: Provisioners, provisioner_id: str, connection: int, report: ProvisionerReport, now: float
    ) -> set[str]:
        taken.append(now)
        return take(self, provisioner_id, connection, report, now)

    monkeypatch.setattr(Provisioners, "report", counted)
    try:
        async with FakeProvisioner(address) as giver:
            giver.report()
            await need(address, 1)
            await until(lambda: giver.last.start, "a start")
            start = giver.last.start[0]
            answered = len(giver.responses)
            giver.report(node(start.node_ids[0], "RUNNING", group_id=start.group_id))
            giver.report(node(start.node_ids[0], "ENDED", "PREEMPTED", start.group_id))
            for sequence in range(FLOOD):
                giver.report(sequence=sequence)
            last = pb.CapabilitySet(name="last", max_nodes=1)
            giver.report(sets=(last,))
            await until(lambda: "last" in plane.live.provisioners.view()["p1"].sets, "the last report")

            async def preemptions() -> list[str]:
                async with channel(address) as ch:
                    found: Any = await operator(ch).ListEvents(cp.ListEventsRequest(limit=1000))
                events = [event for event in found.events if event.target == start.node_ids[0]]
                return [event.reason for event in events if event.action == "node_preempted"]

            assert await until(preemptions, "the end of the node") == ["PREEMPTED"]
            assert all(later - earlier >= REPORT_GAP_S - 1e-6 for earlier, later in itertools.pairwise(taken))
            assert len(giver.responses) - answered < FLOOD
    finally:
        await plane.stop()


async def test_the_last_word_counts_although_its_interval_is_not_over() -> None:
    """Rule 10: a provisioner that reports and goes has said it."""
    plane, address = await start_control()
    try:
        async with FakeProvisioner(address) as giver:
            giver.report()
            giver.report(node("late", "RUNNING"))
            giver.goodbye()

            def known() -> bool:
                found = plane.live.provisioners.view().get("p1")
                return found is not None and "late" in found.nodes

            await until(known, "its last report")
    finally:
        await plane.stop()


async def test_hellos_without_end_are_refused_by_name() -> None:
    """Rules 10 and 15: each would begin a session; one is enough."""
    plane, address = await start_control()

    async def refusal() -> SpringtideError:
        async with FakeProvisioner(address) as giver:
            for _ in range(20):
                giver.hello()
            return await until(lambda: giver.error, "a refusal")  # type: ignore[no-any-return]

    try:
        error = await told(refusal)
        assert isinstance(error, Exhausted)
        assert (error.reason, error.field) == ("TOO_MANY_HELLOS", "hello")
        assert error.remedy
    finally:
        await plane.stop()
