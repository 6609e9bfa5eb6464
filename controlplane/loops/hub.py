"""What is committed, as agents and routers are shown it. Level-triggered: who is slow sees only the latest."""

import asyncio
import dataclasses
from collections.abc import Iterable

from controlplane.core.desired import desired_workers
from controlplane.core.nodes.orders import provisioner_orders
from controlplane.core.routing import diff, routing_table
from controlplane.core.signals import fresh_reports
from controlplane.core.snapshot import LiveView, NodeLive, Snapshot
from springtide.model.desired import DesiredWorker
from springtide.model.enums import Phase
from springtide.model.provisioning import Orders
from springtide.model.routing import RoutingDelta, RoutingTable, WorkerLoad
from springtide.model.worker import Worker


class Hub:
    """The leader publishes snapshots; sessions subscribe, and read what concerns them when they are woken."""

    def __init__(self) -> None:
        self.snapshot = Snapshot("", 0, {}, {}, {}, live=LiveView())
        self.table = RoutingTable()
        self.awaits_acks = False  # a drain waits for routers: else an acknowledgement is no news
        self._by_node: dict[str, dict[str, Worker]] = {}
        self._desired: dict[str, tuple[DesiredWorker, ...]] = {}
        self._told: dict[str, object] = {}
        self._node_wakes: dict[str, list[asyncio.Event]] = {}
        self._router_wakes: list[asyncio.Event] = []
        self._orders: dict[str, Orders] = {}
        self._provisioner_wakes: dict[str, list[asyncio.Event]] = {}
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    async def wait_closing(self) -> None:
        await self._closing.wait()

    async def wait_ready(self) -> None:
        """Returns when something was published: until then nobody is told anything."""
        await self._ready.wait()

    def publish(self, snapshot: Snapshot) -> None:
        """Shows a committed snapshot. Wakes nodes whose desired workers changed, and routers at each new revision."""
        before, self.snapshot = self.snapshot, snapshot
        steady = _same_records(before, snapshot)
        if not steady:
            self._by_node = _by_node(snapshot)
            self.awaits_acks = any(w.intent.phase is Phase.UNROUTING for w in snapshot.workers.values())
        for node_id in [node_id for node_id in self._desired if node_id not in self._node_wakes]:
            del self._desired[node_id]
        for node_id, wakes in self._node_wakes.items():
            told = _told(snapshot.live.nodes.get(node_id))
            if steady and node_id in self._desired and self._told.get(node_id) == told:
                continue  # nothing that its orders follow from has moved
            self._told[node_id] = told
            desired = self._compute(node_id)
            if self._desired.get(node_id) != desired:
                self._desired[node_id] = desired
                for wake in wakes:
                    wake.set()
        if (snapshot.store_id, snapshot.revision) != (self.table.store_id, self.table.revision):
            if steady and before.live.start_ups_s == snapshot.live.start_ups_s:  # a decision was written down, no more
                self.table = dataclasses.replace(self.table, revision=snapshot.revision)
            else:
                self.table = routing_table(snapshot)
            for wake in self._router_wakes:
                wake.set()
        for provisioner_id, wakes in self._provisioner_wakes.items():
            orders = provisioner_orders(snapshot, provisioner_id)
            if self._orders.get(provisioner_id) != orders:
                self._orders[provisioner_id] = orders
                for wake in wakes:
                    wake.set()
        self._ready.set()

    def orders(self, provisioner_id: str) -> Orders:
        """All that the provisioner is told, as last published."""
        found = self._orders.get(provisioner_id)
        if found is None:
            found = self._orders[provisioner_id] = provisioner_orders(self.snapshot, provisioner_id)
        return found

    def subscribe_provisioner(self, provisioner_id: str, wake: asyncio.Event) -> None:
        """`wake` is set whenever the provisioner's orders have changed."""
        self._orders.pop(provisioner_id, None)
        self._provisioner_wakes.setdefault(provisioner_id, []).append(wake)

    def unsubscribe_provisioner(self, provisioner_id: str, wake: asyncio.Event) -> None:
        wakes = self._provisioner_wakes.get(provisioner_id, [])
        if wake in wakes:
            wakes.remove(wake)
        if not wakes:
            self._provisioner_wakes.pop(provisioner_id, None)
            self._orders.pop(provisioner_id, None)

    def desired(self, node_id: str) -> tuple[DesiredWorker, ...]:
        """All that is wanted of the node, as last published."""
        found = self._desired.get(node_id)
        if found is None:
            found = self._desired[node_id] = self._compute(node_id)
        return found

    def subscribe_node(self, node_id: str, wake: asyncio.Event) -> None:
        """`wake` is set whenever the node's desired workers have changed."""
        self._node_wakes.setdefault(node_id, []).append(wake)

    def unsubscribe_node(self, node_id: str, wake: asyncio.Event) -> None:
        wakes = self._node_wakes.get(node_id, [])
        if wake in wakes:
            wakes.remove(wake)
        if not wakes:
            self._node_wakes.pop(node_id, None)
            self._told.pop(node_id, None)

    def wake_node(self, node_id: str) -> None:
        """The node is to be told something that no record holds."""
        for wake in self._node_wakes.get(node_id, []):
            wake.set()

    def subscribe_router(self, wake: asyncio.Event) -> None:
        """`wake` is set whenever there is a table of a new revision, also one that differs in nothing else: routers
        acknowledge revisions, and a drain waits for that."""
        self._router_wakes.append(wake)

    def unsubscribe_router(self, wake: asyncio.Event) -> None:
        self._router_wakes.remove(wake)

    def changes_since(self, table: RoutingTable) -> RoutingDelta | None:
        """From `table` to the present one; None when only a snapshot will do."""
        return diff(table, self.table)

    def loads(self, now: float) -> Iterable[WorkerLoad]:
        """In-flight of the routed workers as last published; unknown when the report is old."""
        workers = [worker for key in self.table.workers if (worker := self.snapshot.workers.get(key)) is not None]
        reports = dict(zip((w.worker_id for w in workers), fresh_reports(self.snapshot, workers, now), strict=True))
        for worker_id, routed in self.table.workers.items():
            report = reports.get(worker_id)
            in_flight, kv_use = (None, None) if report is None else (report.in_flight, report.kv_use)
            yield WorkerLoad(worker_id, routed.incarnation, in_flight, kv_use)

    def close(self) -> None:
        """Ends every session: the control plane stops."""
        self._closing.set()
        self._ready.set()
        by_id = (*self._node_wakes.values(), *self._provisioner_wakes.values())
        for wake in [*self._router_wakes, *(wake for wakes in by_id for wake in wakes)]:
            wake.set()

    def _compute(self, node_id: str) -> tuple[DesiredWorker, ...]:
        """Looks at the workers that can concern the node only, so that many nodes do not cost each other."""
        workers = dict(self._by_node.get(node_id, {}))
        live = self.snapshot.live.nodes.get(node_id)
        for worker_id in live.reports if live is not None else ():
            if worker_id in self.snapshot.workers:
                workers[worker_id] = self.snapshot.workers[worker_id]
        return desired_workers(dataclasses.replace(self.snapshot, workers=workers), node_id)


def _same_records(a: Snapshot, b: Snapshot) -> bool:
    """Whether no worker, pool or node has moved between them: a store's images share what no commit touched."""
    return a.workers is b.workers and a.pools is b.pools and a.nodes is b.nodes and a.store_id == b.store_id


def _told(live: NodeLive | None) -> object:
    """What a node's orders may follow from in its reports: engines that no record holds are to be stopped."""
    if live is None:
        return None
    return [(r.worker_id, r.store_id, r.phase, r.generation, r.gpu_ids) for r in live.reports.values()]


def _by_node(snapshot: Snapshot) -> dict[str, dict[str, Worker]]:
    found: dict[str, dict[str, Worker]] = {}
    for worker_id, worker in snapshot.workers.items():
        found.setdefault(worker.intent.node_id, {})[worker_id] = worker
    return found
