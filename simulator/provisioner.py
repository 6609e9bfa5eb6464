"""A modelled provisioner: the real core of the process (provisioner.core) between the control plane and hosts that come
and go on the agenda. `hosts` is the truth at its provider; the process may die and know nothing but what is listed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from provisioner.core.converge import Book, Done, Listing, No, Outcome, Unsure, coming, decide, finished
from simulator.controlplane import Wake
from simulator.node import ModelNode, NodeModel
from simulator.world import World
from springtide.errors import AlreadyExists
from springtide.model.provisioning import (
    CapabilitySet,
    GroupAnswer,
    GroupOrder,
    GroupStatus,
    Orders,
    ProvidedNode,
    ProvidedPhase,
    ProvisionerReport,
    ShutdownOrder,
)
from springtide.wire.provisioner import ProvisionerHello

_TICK_S = 1.0
_ENDING_S = 0.8
_ENDED_KEPT_S = 30.0


@dataclass(slots=True)
class Host:
    """One node at its provider. `since`: when its phase began."""

    node_id: str
    group_id: str
    kind: str
    phase: ProvidedPhase
    since: float
    boot_s: float = 1.0
    ends_at: float | None = None
    reason: str = ""

    @property
    def alive(self) -> bool:
        return self.phase is not ProvidedPhase.ENDED


class ModelProvisioner:
    """Call `start`. `joined(node)` is told of each node that it has made."""

    def __init__(
        self,
        provisioner_id: str,
        world: World,
        kinds: list[CapabilitySet],
        rng: random.Random,
        joined: Callable[[ModelNode], None] = lambda node: None,
    ) -> None:
        self.provisioner_id = provisioner_id
        self.world = world
        self.kinds = {kind.name: kind for kind in kinds}
        self.rng = rng
        self.joined = joined
        self.hosts: dict[str, Host] = {}
        self.nodes: dict[str, ModelNode] = {}  # of hosts whose agents have come
        self.up = False
        self.cut = False  # off from the control plane
        self.refuses = False
        self.never_registers = False
        self.queue_s = 1.0
        self.outcomes: list[str] = []  # of the next calls: done, lost (done, but unknown), nothing
        self._life = 0
        self._book = Book()
        self._orders = Orders()
        self._listing: Listing | None = None
        self._answers: tuple[GroupAnswer, ...] = ()
        self._connection = 0
        self._control_life = -1
        world.agenda.after(0.0, self._live_on)

    # ------------------------------------------------------------ the process

    def start(self) -> None:
        """A new process: it knows what is listed, and nothing else."""
        self.up = True
        self._life += 1
        self._book, self._orders, self._listing, self._answers = Book(), Orders(), None, ()
        self._control_life = -1
        self.world.agenda.after(0.0, self._tick, self._life)

    def crash(self) -> None:
        self.up = False
        self._life += 1
        self._leave()

    def _tick(self, life: int) -> None:
        if life == self._life and self.up:
            self._turn()
            self.world.agenda.after(_TICK_S, self._tick, life)

    def _turn(self) -> None:
        """Look, act, look again, report."""
        self._look()
        self._act()
        self._look()
        if self._session():
            self._report()

    def _look(self) -> None:
        now = self.world.now
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
        self._listing = Listing(nodes, now)

    def _act(self) -> None:
        now = self.world.now
        made = decide(self._book, self._orders, self._listing, self.kinds, now)
        self._answers = made.answers
        for stop in made.stops:
            finished(self._book, stop.group_id, self._stop(stop), now)
        for order in made.starts:
            finished(self._book, order.group_id, self._start(order), now)

    # ------------------------------------------------------------ the session

    def _session(self) -> bool:
        control = self.world.control
        if self.cut or not control.up or not control.hub.snapshot.store_id:
            return False
        known = control.live.provisioners.is_current(self.provisioner_id, self._connection)
        if self._control_life == control.life and known:
            return True
        hello = ProvisionerHello(self.provisioner_id, f"{self.provisioner_id}-{self._life}", "modelled")
        try:
            self._connection = control.live.provisioners.hello(hello, control.now())
        except AlreadyExists:
            return False
        self._control_life = control.life
        control.hub.subscribe_provisioner(self.provisioner_id, Wake(self.world.agenda, self._pull))
        control.kick(f"provisioner/{self.provisioner_id}")
        return True

    def _report(self) -> None:
        control, listing = self.world.control, self._listing
        assert listing is not None
        nodes = (*listing.nodes, *coming(self._book, listing))
        report = ProvisionerReport(tuple(self.kinds.values()), nodes, self._answers)
        control.kick(control.live.provisioners.report(self.provisioner_id, self._connection, report, control.now()))
        self._pull()

    def _pull(self) -> None:
        """The orders as they are published now; they are acted on with the next turn."""
        if self.up and not self.cut and self.world.control.life == self._control_life and self.world.control.up:
            self._orders = self.world.control.hub.orders(self.provisioner_id)

    def _leave(self) -> None:
        control = self.world.control
        if control.up and control.life == self._control_life:
            control.live.provisioners.gone(self.provisioner_id, self._connection)
            control.kick(f"provisioner/{self.provisioner_id}")

    def set_cut(self, cut: bool) -> None:
        if cut and not self.cut:
            self._leave()
            self._control_life = -1
        self.cut = cut

    # ------------------------------------------------------------ the provider

    def _start(self, order: GroupOrder) -> Outcome:
        outcome = self.outcomes.pop(0) if self.outcomes else "done"
        if self.refuses:
            return No(GroupStatus.WORKER_GROUP_TOO_MUCH, "no capacity now")
        if outcome == "nothing":
            return Unsure("timed out")
        for node_id in order.node_ids:
            assert node_id not in self.hosts, f"{node_id} is started twice"
            self.hosts[node_id] = Host(
                node_id,
                order.group_id,
                order.capability_set,
                ProvidedPhase.PENDING,
                self.world.now,
                self.rng.uniform(0.3, 3.0),
            )
        return Done() if outcome == "done" else Unsure("timed out")

    def _stop(self, order: ShutdownOrder) -> Outcome:
        outcome = self.outcomes.pop(0) if self.outcomes else "done"
        if outcome == "nothing":
            return Unsure("timed out")
        for host in self.hosts.values():
            if host.group_id == order.group_id and host.alive and host.phase is not ProvidedPhase.ENDING:
                host.phase, host.since, host.reason = ProvidedPhase.ENDING, self.world.now, "RELEASED"
                node = self.nodes.get(host.node_id)
                if node is not None and node.agent_up:
                    node.goodbye()  # it is drained; what is left of it ends in order
        return Done() if outcome == "done" else Unsure("timed out")

    def _live_on(self) -> None:
        """Hosts come up and end by themselves."""
        now = self.world.now
        for host in list(self.hosts.values()):
            if host.phase is ProvidedPhase.PENDING and now >= host.since + self.queue_s:
                host.phase, host.since = ProvidedPhase.RUNNING, now
            elif host.phase is ProvidedPhase.RUNNING and host.ends_at is not None and now >= host.ends_at:
                self.end(host, host.reason or "TIME_LIMIT")
            elif host.phase is ProvidedPhase.RUNNING and host.node_id not in self.nodes and not self.never_registers:
                if now >= host.since + host.boot_s:
                    self._boot(host)
            elif host.phase is ProvidedPhase.ENDING and now >= host.since + _ENDING_S:
                self.end(host, host.reason)
            elif not host.alive and now >= host.since + _ENDED_KEPT_S:
                del self.hosts[host.node_id]
        self.world.agenda.after(0.25, self._live_on)

    def _boot(self, host: Host) -> None:
        kind = self.kinds[host.kind]
        labels = {**kind.labels, "provisioner": self.provisioner_id}
        model = NodeModel(
            gpus=kind.gpus_per_node, labels=labels, start_s=self.rng.uniform(0.5, 3.0), start_jitter_s=1.0
        )
        node = self.nodes[host.node_id] = self.world.add_node(host.node_id, model)
        self.joined(node)
        node.start_agent()

    def end(self, host: Host, reason: str) -> None:
        """The host is gone, and all that ran there."""
        host.phase, host.since, host.reason = ProvidedPhase.ENDED, self.world.now, reason
        node = self.nodes.pop(host.node_id, None)
        if node is not None:
            node.ended = True
            node.switch_off()
            del self.world.nodes[host.node_id]

    # ------------------------------------------------------------ faults

    def inject(self, rng: random.Random) -> str:
        """Does one random thing; what it was."""
        running = [host for host in self.hosts.values() if host.phase is ProvidedPhase.RUNNING]
        kind = rng.choice(("crash", "cut", "outcomes", "refuses", "silent", "queue", "end", "preempt"))
        if kind == "crash":
            self.crash() if self.up else self.start()
        elif kind == "cut":
            self.set_cut(not self.cut)
        elif kind == "outcomes":
            self.outcomes += [rng.choice(("done", "lost", "nothing")) for _ in range(3)]
        elif kind == "refuses":
            self.refuses = not self.refuses
        elif kind == "silent":
            self.never_registers = not self.never_registers
        elif kind == "queue":
            self.queue_s = rng.choice((0.0, 1.0, 20.0))
        elif running and kind == "end":
            self.end(rng.choice(running), "NODE_FAIL")
        elif running:
            host = rng.choice(running)
            host.ends_at, host.reason = self.world.now + rng.choice((2.0, 10.0, 30.0)), "PREEMPTED"
        return f"{kind} {self.provisioner_id}"

    def heal(self) -> None:
        self.outcomes, self.refuses, self.never_registers, self.queue_s = [], False, False, 0.5
        self.set_cut(False)
        if not self.up:
            self.start()

    def unrest(self) -> str:
        """Why its nodes are not what is recorded; empty when they are."""
        alive = {host.node_id for host in self.hosts.values() if host.alive}
        records = self.world.store.records
        here = {
            node.node_id: node
            for node in records.nodes.values()
            if node.provided is not None
            and node.provided.provisioner_id == self.provisioner_id
            and node.state.value != "GONE"
        }
        if alive != set(here):
            return f"{self.provisioner_id} has {sorted(alive)}, recorded are {sorted(here)}"
        moving = [key for key, node in here.items() if node.state.value != "UP"]
        if moving:
            return f"{moving[0]} is {here[moving[0]].state}"
        used = {worker.intent.node_id for worker in records.workers.values() if worker.intent.gpu_ids}
        units = {node.provided.group_id for key, node in here.items() if key in used and node.provided is not None}
        idle = [key for key, n in here.items() if n.provided is not None and n.provided.group_id not in units]
        return f"{idle[0]} is idle and not given back" if idle else ""
