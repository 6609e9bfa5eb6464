"""The tiny world with provisioners: hosts that come and go, a provisioner process that may die at any step."""

import dataclasses
from dataclasses import dataclass, field

from controlplane.core.nodes.orders import provisioner_orders
from controlplane.core.snapshot import NodeRules, ProvisionerLive, Snapshot, Timing
from provisioner.core.converge import Book, Done, Listing, No, Outcome, Unsure, coming, decide, finished
from springtide.model.enums import NodeState
from springtide.model.provisioning import (
    CapabilitySet,
    GroupAnswer,
    GroupOrder,
    GroupStatus,
    Orders,
    ProvidedNode,
    ProvidedPhase,
    ShutdownOrder,
)
from tests.controlplane.core.world import FakeNode, World

RULES = NodeRules(
    register_timeout_s=20.0, idle_s=10.0, lost_release_s=15.0, rollover_lead_s=20.0, backoff_s=2.0, backoff_max_s=8.0
)
TIMING = Timing(grace_s=5.0, lease_s=8.0)


@dataclass
class Host:
    """One node at its provider."""

    node_id: str
    group_id: str
    kind: str
    phase: ProvidedPhase
    since: float
    ends_at: float | None = None
    reason: str = ""


@dataclass
class FakeProvider:
    """A provider and its provisioner process. `hosts` is the truth; all else may be lost."""

    provisioner_id: str
    sets: dict[str, CapabilitySet]
    kind: str = "fake"
    queue_s: float = 2.0  # PENDING for so long
    boot_s: float = 1.0  # RUNNING to the agent's hello
    life_s: float | None = None  # a host's time limit, from RUNNING on
    never_registers: bool = False
    refuses: bool = False
    hosts: dict[str, Host] = field(default_factory=dict)
    book: Book = field(default_factory=Book)
    listing: Listing | None = None
    orders: Orders = field(default_factory=Orders)
    up: bool = True  # the process
    connected: bool = True  # its session
    started: list[str] = field(default_factory=list)  # groups that were really started
    answers: dict[str, GroupAnswer] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)  # of the next calls: done, lost (done, but unknown), nothing

    def restart(self) -> None:
        """A new process: it knows what the provider lists, and nothing else."""
        self.book, self.listing, self.orders, self.up = Book(), None, Orders(), True

    def alive(self, kind: str = "") -> list[Host]:
        return [
            host
            for host in self.hosts.values()
            if host.phase is not ProvidedPhase.ENDED and (not kind or host.kind == kind)
        ]

    def live_on(self, now: float) -> None:
        """Hosts come up and end by themselves."""
        for host in list(self.hosts.values()):
            if host.phase is ProvidedPhase.PENDING and now >= host.since + self.queue_s:
                host.phase, host.since = ProvidedPhase.RUNNING, now
                host.ends_at = None if self.life_s is None else now + self.life_s
            elif _is_over(host, now):
                host.phase, host.since = ProvidedPhase.ENDED, now
            elif host.phase is ProvidedPhase.ENDED and now >= host.since + 60.0:
                del self.hosts[host.node_id]

    def look(self, now: float) -> None:
        nodes = tuple(
            ProvidedNode(
                host.node_id,
                host.group_id,
                host.kind,
                host.phase,
                reason=host.reason,
                ends_in_s=None if host.ends_at is None else max(0.0, host.ends_at - now),
            )
            for host in self.hosts.values()
        )
        self.listing = Listing(nodes, now)

    def act(self, now: float) -> None:
        """One decision of the process, its calls carried out."""
        decision = decide(self.book, self.orders, self.listing, self.sets, now)
        self.answers = {answer.request_id: answer for answer in decision.answers}
        for stop in decision.stops:
            finished(self.book, stop.group_id, self._stop(stop, now), now)
        for start in decision.starts:
            finished(self.book, start.group_id, self._start(start, now), now)

    def _outcome(self) -> str:
        return self.outcomes.pop(0) if self.outcomes else "done"

    def _start(self, order: GroupOrder, now: float) -> Outcome:
        outcome = self._outcome()
        if self.refuses:
            return No(GroupStatus.WORKER_GROUP_TOO_MUCH, "no capacity now")
        if outcome == "nothing":
            return Unsure("timed out")
        if all(host.group_id != order.group_id for host in self.hosts.values()):
            self.started.append(order.group_id)
            for node_id in order.node_ids:
                assert node_id not in self.hosts, f"{node_id} is started twice"
                self.hosts[node_id] = Host(node_id, order.group_id, order.capability_set, ProvidedPhase.PENDING, now)
        return Done() if outcome == "done" else Unsure("timed out")

    def _stop(self, order: ShutdownOrder, now: float) -> Outcome:
        outcome = self._outcome()
        if outcome == "nothing":
            return Unsure("timed out")
        for host in self.alive():
            if host.group_id == order.group_id and host.phase is not ProvidedPhase.ENDING:
                host.phase, host.since, host.reason = ProvidedPhase.ENDING, now, "RELEASED"
        return Done() if outcome == "done" else Unsure("timed out")


def _is_over(host: Host, now: float) -> bool:
    if host.phase is ProvidedPhase.ENDING:
        return now >= host.since + 1.0
    return host.phase is ProvidedPhase.RUNNING and host.ends_at is not None and now >= host.ends_at


class NodeWorld(World):
    """`turn`: hosts live, agents report, provisioners look, act and report, the leader plans."""

    def __init__(self, *providers: FakeProvider, rules: NodeRules = RULES, nodes: int = 0) -> None:
        super().__init__(nodes=nodes, timing=TIMING)
        self.rules = rules
        self.providers = {provider.provisioner_id: provider for provider in providers}
        self.heard: dict[str, ProvisionerLive] = {}

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        live = dataclasses.replace(found.live, provisioners=dict(self.heard))
        return dataclasses.replace(found, live=live, rules=self.rules)

    def heartbeats(self) -> None:
        for provider in self.providers.values():
            provider.live_on(self.now)
            self._agents(provider)
        super().heartbeats()
        for provider in self.providers.values():
            self._session(provider)

    def _agents(self, provider: FakeProvider) -> None:
        for host in provider.hosts.values():
            there = host.phase in (ProvidedPhase.RUNNING, ProvidedPhase.ENDING)
            node = self.nodes.get(host.node_id)
            if there and node is None and not provider.never_registers and self.now >= host.since + provider.boot_s:
                kind = provider.sets[host.kind]
                labels = {**kind.labels, "provisioner": provider.provisioner_id}
                self.nodes[host.node_id] = FakeNode(host.node_id, kind.gpus_per_node, labels, start_s=1.0)
            elif not there and node is not None:
                node.reachable = False
                node.engines.clear()  # the host is gone, and all that ran there
                del self.nodes[host.node_id]
                if host.node_id in self.live_nodes:
                    self.live_nodes[host.node_id] = dataclasses.replace(self.live_nodes[host.node_id], connected=False)

    def _session(self, provider: FakeProvider) -> None:
        """What one heartbeat of the session brings, both ways; the orders come from what is committed."""
        key = provider.provisioner_id
        if not (provider.up and provider.connected):
            if key in self.heard:
                self.heard[key] = dataclasses.replace(self.heard[key], connected=False)
            if not provider.up:
                return
        provider.look(self.now)
        provider.act(self.now)
        provider.look(self.now)
        if not provider.connected:
            return
        assert provider.listing is not None
        nodes = (*provider.listing.nodes, *coming(provider.book, provider.listing))
        self.heard[key] = ProvisionerLive(
            connected=True,
            last_heard_at=self.now,
            kind=provider.kind,
            reported=True,
            sets=dict(provider.sets),
            nodes={node.node_id: node for node in nodes},
            ends_at={node.node_id: self.now + node.ends_in_s for node in nodes if node.ends_in_s is not None},
            answers=dict(provider.answers),
        )
        provider.orders = provisioner_orders(self.snapshot(), key)

    # -------------------------------------------------------------- looking

    def records(self, *states: NodeState) -> list[str]:
        return sorted(key for key, node in self.node_records.items() if node.state in states)

    def alive(self) -> list[str]:
        return sorted(host.node_id for provider in self.providers.values() for host in provider.alive())


def provider(
    name: str = "p1", *, nodes: int = 4, gpus: int = 2, sets: tuple[CapabilitySet, ...] = (), **fields: object
) -> FakeProvider:
    """One with a single set `std`, unless sets are given."""
    kinds = sets or (CapabilitySet("std", gpus_per_node=gpus, max_nodes=nodes),)
    return FakeProvider(name, {kind.name: kind for kind in kinds}, **fields)  # type: ignore[arg-type]
