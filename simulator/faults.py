"""What goes wrong in a random world. Every fault ends by itself after a while, or when the world heals."""

import contextlib
import random
from collections.abc import Callable

from controlplane.core import orders
from simulator.network import Conditions
from simulator.node import ModelNode
from simulator.router import ModelRouter
from simulator.shim import Shim
from simulator.worker import ModelWorker
from simulator.world import World
from springtide.errors import SpringtideError
from springtide.model.worker import ExitInfo

_KILLED = ExitInfo(signal=9, reason="ENGINE_KILLED", message="killed")


class Faults:
    """`inject` does one random thing; `heal` ends all that still goes on."""

    def __init__(self, world: World, rng: random.Random, note: Callable[[str], None], intensity: float) -> None:
        self.world = world
        self.rng = rng
        self.note = note
        self.longest_s = 4.0 + 16.0 * intensity
        self.healing = False
        self.skew_s = rng.choice((0.0, 0.5, 5.0, 60.0))
        self._kinds: list[tuple[float, Callable[[], None]]] = [
            (2.0, self._cut_node),
            (2.0, self._crash_agent),
            (1.0, self._power_off),
            (3.0, self._kill_engine),
            (1.0, self._hang_engine),
            (1.0, self._fail_starts),
            (1.0, self._never_ready),
            (1.0, self._never_stops),
            (1.5, self._preempt),
            (1.0, self._goodbye),
            (2.0, self._crash_control),
            (1.0, self._break_store),
            (1.5, self._crash_router),
            (1.0, self._cut_router),
            (2.0, self._bad_network),
            (2.0, self._operate),
        ]
        # Every world has its own weaknesses: some kinds never happen there.
        self._kinds = [kind for kind in self._kinds if rng.random() < 0.7] or self._kinds
        for node in world.nodes.values():
            node.skew_s = rng.uniform(-self.skew_s, self.skew_s)

    def inject(self) -> None:
        weights = [weight for weight, _ in self._kinds]
        self.rng.choices([call for _, call in self._kinds], weights)[0]()

    def heal(self) -> None:
        """Ends everything that goes on; what is down comes up."""
        self.healing = True
        world = self.world
        world.network.cut.clear()
        world.network.conditions = Conditions()
        world.store.slow_s = world.store.fail = world.store.unseen = 0.0
        for node in world.nodes.values():
            model = node.model
            model.fail_starts = model.never_ready = model.never_stops = False
            _end_stuck(node)
            self._unhang(node)
            if not node.power:
                node.switch_on()
            elif not node.agent_up:
                node.start_agent()
            if node.stopping:
                node.stopping, node.stop_deadline_at = False, None
        if not world.control.up:
            world.control.start()
        for router in world.routers:
            if not router.up:
                router.start()
        for node_id in list(world.store.records.nodes):
            self._order(lambda s, now, node_id=node_id: orders.uncordon_node(s, node_id, now))
        for worker_id in list(world.store.records.workers):
            self._order(lambda s, now, worker_id=worker_id: orders.reclaim_worker(s, worker_id, now))
            self._order(lambda s, now, worker_id=worker_id: orders.resume_worker(s, worker_id, now))
        for name in list(world.store.records.pools):
            self._order(lambda s, now, name=name: orders.scale_pool(s, name, now, automatic=True))
            self._order(lambda s, now, name=name: orders.resume_pool(s, name, now))

    # ------------------------------------------------------------ nodes

    def _node(self) -> ModelNode:
        return self.world.nodes[self.rng.choice(sorted(self.world.nodes))]

    def _later(self, call: Callable[..., None], *args: object) -> float:
        """Undoes something after a random while, unless the world has healed by then."""
        seconds = self.rng.uniform(0.1, self.longest_s)
        self.world.agenda.after(seconds, self._undo, call, args)
        return seconds

    def _undo(self, call: Callable[..., None], args: tuple[object, ...]) -> None:
        if not self.healing:
            call(*args)

    def _cut_node(self) -> None:
        node = self._node()
        self.world.network.cut.add(node.node_id)
        self.note(f"fault cut {node.node_id} {self._later(self.world.network.cut.discard, node.node_id):.1f} s")

    def _crash_agent(self) -> None:
        node = self._node()
        if node.agent_up:
            node.crash_agent(noticed=self.rng.random() < 0.5)
            self.note(f"fault agent {node.node_id} {self._later(self._restart_agent, node):.1f} s")

    def _restart_agent(self, node: ModelNode) -> None:
        if node.power and not node.agent_up:
            node.skew_s = self.rng.uniform(-self.skew_s, self.skew_s)
            node.start_agent()

    def _power_off(self) -> None:
        node = self._node()
        if node.power:
            node.switch_off()
            if self.rng.random() < 0.3:
                node.workers.clear()  # its disk is new when it comes back
            self.note(f"fault power {node.node_id} {self._later(self._power_on, node):.1f} s")

    def _power_on(self, node: ModelNode) -> None:
        if not node.power:
            node.skew_s = self.rng.uniform(-self.skew_s, self.skew_s)
            node.switch_on()

    def _preempt(self) -> None:
        node = self._node()
        if node.agent_up and not node.stopping:
            notice_s = self.rng.choice((None, 2.0, 10.0, 30.0))
            node.preempt(notice_s)
            self.note(f"fault preempt {node.node_id} notice {notice_s}")
            if notice_s is not None:
                self.world.agenda.after(notice_s, self._undo, self._reclaim, (node,))

    def _reclaim(self, node: ModelNode) -> None:
        if node.power and node.stopping:
            node.switch_off()
            self._later(self._power_on, node)

    def _goodbye(self) -> None:
        node = self._node()
        if node.agent_up:
            node.goodbye()
            node.power = False
            self.note(f"fault goodbye {node.node_id} {self._later(self._power_on, node):.1f} s")

    # ------------------------------------------------------------ engines

    def _engine(self) -> tuple[ModelNode, ModelWorker, Shim] | None:
        found = [
            (node, worker, worker.shim)
            for _, node in sorted(self.world.nodes.items())
            for _, worker in sorted(node.workers.items())
            if worker.shim is not None
        ]
        return self.rng.choice(found) if found else None

    def _kill_engine(self) -> None:
        if (found := self._engine()) is not None:
            node, worker, shim = found
            self.note(f"fault kill {worker.worker_id} on {node.node_id}")
            node.engine_ends(worker, shim, _KILLED)

    def _hang_engine(self) -> None:
        if (found := self._engine()) is not None:
            node, worker, shim = found
            self.note(f"fault hang {worker.worker_id} on {node.node_id}")
            shim.engine.halt()
            worker.probe_failures = 5
            node.changed(worker)

    def _unhang(self, node: ModelNode) -> None:
        """A hung engine never comes back: what heals it is its death."""
        for worker in list(node.workers.values()):
            if worker.shim is not None and worker.shim.engine.hung:
                node.engine_ends(worker, worker.shim, _KILLED)

    def _fail_starts(self) -> None:
        node = self._node()
        node.model.fail_starts = True
        self.note(f"fault fail_starts {node.node_id} {self._later(self._mend, node, 'fail_starts'):.1f} s")

    def _never_ready(self) -> None:
        node = self._node()
        node.model.never_ready = True
        self.note(f"fault never_ready {node.node_id} {self._later(self._mend, node, 'never_ready'):.1f} s")

    def _never_stops(self) -> None:
        node = self._node()
        node.model.never_stops = True
        self.note(f"fault never_stops {node.node_id} {self._later(self._mend, node, 'never_stops'):.1f} s")

    @staticmethod
    def _mend(node: ModelNode, fault: str) -> None:
        setattr(node.model, fault, False)
        if fault == "never_stops":
            _end_stuck(node)

    # ------------------------------------------------------------ control plane, store, routers, network

    def _crash_control(self) -> None:
        control = self.world.control
        if control.up:
            control.crash()
            self.note(f"fault control {self._later(self._restart_control):.1f} s")

    def _restart_control(self) -> None:
        control = self.world.control
        if not control.up:
            control.skew_s = self.rng.uniform(-self.skew_s, self.skew_s)
            control.start()

    def _break_store(self) -> None:
        store = self.world.store
        store.slow_s = self.rng.choice((0.0, 0.3, 2.0))
        store.fail = self.rng.choice((0.0, 0.3, 1.0))
        store.unseen = self.rng.choice((0.0, 0.2))
        told = f"slow {store.slow_s} fail {store.fail} unseen {store.unseen}"
        self.note(f"fault store {told} {self._later(self._mend_store):.1f} s")

    def _mend_store(self) -> None:
        self.world.store.slow_s = self.world.store.fail = self.world.store.unseen = 0.0

    def _router(self) -> ModelRouter:
        return self.rng.choice(self.world.routers)

    def _crash_router(self) -> None:
        router = self._router()
        if router.up:
            router.crash()
            self.note(f"fault router {router.router_id} {self._later(self._restart_router, router):.1f} s")

    @staticmethod
    def _restart_router(router: ModelRouter) -> None:
        if not router.up:
            router.start()

    def _cut_router(self) -> None:
        router_id = self._router().router_id
        self.world.network.cut.add(router_id)
        self.note(f"fault cut {router_id} {self._later(self.world.network.cut.discard, router_id):.1f} s")

    def _bad_network(self) -> None:
        rng = self.rng
        conditions = Conditions(
            latency_s=rng.choice((0.0, 0.01, 0.2)),
            jitter_s=rng.choice((0.0, 0.05, 0.5)),
            loss=rng.choice((0.0, 0.05, 0.4)),
            duplicate=rng.choice((0.0, 0.1)),
            late=rng.choice((0.0, 0.05)),
            late_s=rng.choice((1.0, 10.0)),
        )
        self.world.network.conditions = conditions
        self.note(f"fault network {conditions}")
        self._later(self._mend_network)

    def _mend_network(self) -> None:
        self.world.network.conditions = Conditions()

    # ------------------------------------------------------------ operators

    def _operate(self) -> None:
        """An operator does something, sensible or not."""
        rng, records = self.rng, self.world.store.records
        worker_id = rng.choice(sorted(records.workers) or ["none"])
        name = rng.choice(sorted(records.pools) or ["none"])
        node_id = rng.choice(sorted(self.world.nodes))
        bounds = (
            (records.pools[name].spec.min_workers, records.pools[name].spec.max_workers) if records.pools else (0, 0)
        )
        count = rng.randint(*bounds)
        kind, order = rng.choice(
            [
                ("drain", lambda s, now: orders.drain_worker(s, worker_id, now)),
                ("undrain", lambda s, now: orders.undrain_worker(s, worker_id, now)),
                ("activate", lambda s, now: orders.activate_worker(s, worker_id, now)),
                ("cancel", lambda s, now: orders.cancel_worker(s, worker_id, now)),
                ("scale", lambda s, now: orders.scale_pool(s, name, now, workers=count)),
                ("automatic", lambda s, now: orders.scale_pool(s, name, now, automatic=True)),
                ("pause", lambda s, now: orders.pause_pool(s, name, now, hold_s=5.0)),
                ("cordon", lambda s, now: orders.cordon_node(s, node_id, now)),
                ("uncordon", lambda s, now: orders.uncordon_node(s, node_id, now)),
            ]
        )
        self.note(f"order {kind} {worker_id} {name} {node_id} {count}")
        self._order(order)

    def order_memory(self, rng: random.Random) -> None:
        """An operator or a trainer has its way with memory and weights. Draws from `rng` alone."""
        records = self.world.store.records
        worker_id = rng.choice(sorted(records.workers) or ["none"])
        name = rng.choice(sorted(records.pools) or ["none"])
        version = f"v{rng.randint(1, 9)}"
        kind, order = rng.choice(
            [
                ("sleep", lambda s, now: orders.sleep_worker(s, worker_id, now)),
                ("activate", lambda s, now: orders.activate_worker(s, worker_id, now)),
                ("lend", lambda s, now: orders.lend_worker(s, worker_id, now, to="a job")),
                ("reclaim", lambda s, now: orders.reclaim_worker(s, worker_id, now)),
                ("pause", lambda s, now: orders.pause_worker(s, worker_id, now)),
                ("resume", lambda s, now: orders.resume_worker(s, worker_id, now)),
                ("weights", lambda s, now: orders.set_weights(s, name, now, version=version, source=f"/w/{version}")),
            ]
        )
        self.note(f"order {kind} {worker_id} {name} {version}")
        self._order(order)

    def _order(self, order: Callable[..., object]) -> None:
        if self.world.control.up:
            with contextlib.suppress(SpringtideError):
                self.world.control.execute(order)  # type: ignore[arg-type]


def _end_stuck(node: ModelNode) -> None:
    """What was told to stop and did not can, now."""
    for worker in list(node.workers.values()):
        if worker.shim is not None and worker.stopping:
            node.engine_ends(worker, worker.shim, None)
