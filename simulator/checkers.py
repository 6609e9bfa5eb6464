"""What must hold in every world, checked from outside: nothing here asks the code under test what is right."""

from collections import deque

from controlplane.core.routing import routing_table
from controlplane.core.snapshot import Plan
from controlplane.store.store import Records
from simulator.node import ModelNode
from simulator.provisioner import ModelProvisioner
from simulator.requests import Request
from simulator.router import ModelRouter
from simulator.shim import DRAINING
from simulator.worker import ModelWorker
from simulator.world import World
from springtide.model.enums import NodeState, Phase, State
from springtide.model.worker import Worker

# What one commit may do to a worker: an edge of the design, or two of them in a row.
_EDGES = frozenset(
    {
        (State.INACTIVE, State.STARTING),
        (State.STARTING, State.ACTIVE),
        (State.STARTING, State.INACTIVE),
        (State.ACTIVE, State.DRAINING),
        (State.ACTIVE, State.INACTIVE),
        (State.DRAINING, State.ACTIVE),
        (State.DRAINING, State.INACTIVE),
    }
)
_PATHS = _EDGES | {
    (State.ACTIVE, State.STARTING),  # it crashed and is started again at once
    (State.DRAINING, State.STARTING),
    (State.STARTING, State.DRAINING),  # it became ready and is not wanted any more
}
_ERRORS = frozenset(
    {
        "STREAM_CUT",
        "WORKER_FAILED",
        "ROUTER_LOST",
        "WAITING_TIMEOUT",
        "QUEUE_FULL",
        "POOL_AT_ZERO",
        "NO_ROUTING_TABLE",
        "MODEL_NOT_FOUND",
        "POOL_NOT_FOUND",
    }
)
_MOST_OPERATIONS = 100
_PLANS_PER_S = 150  # on average over a whole phase; more is a livelock


class Violation(AssertionError):
    """Something that must hold does not."""


class Checkers:
    """Hears of everything through the world's watchers; `look` checks what is true between two events."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transcript: deque[str] = deque(maxlen=60)
        self.commits_total = 0
        self._ended: set[int] = set()
        self._lenders: set[str] = set()  # asleep, or not awake since: what is lost or stopped in its sleep lends on
        world.watchers.committed = self._committed
        world.watchers.spawned = self._spawned
        world.watchers.dispatched = self._dispatched
        world.watchers.ended = self._request_ended
        for router in world.routers:
            router.dispatched = self._dispatched
        self.provisioners: list[ModelProvisioner] = []
        for node in world.nodes.values():
            self.watch(node)

    def watch(self, node: ModelNode) -> None:
        """Of a node that comes later, too."""
        node.spawned = self._spawned
        node.awake = self._alone

    def note(self, text: str) -> None:
        self.transcript.append(f"{self.world.now - self.world.model.start_at_s:8.3f} {text}")

    def _must(self, holds: bool, text: str) -> None:
        if not holds:
            self.note(f"VIOLATION {text}")
            raise Violation(text)

    # ------------------------------------------------------------ commits

    def _committed(self, before: Records, after: Records, made: Plan) -> None:
        self.commits_total += 1
        for event in made.events:
            self.note(f"{event.action} {event.target} {event.status} {event.reason}")
        operations = len(made.writes) + len(made.decisions) + len(made.events)
        self._must(operations <= _MOST_OPERATIONS, f"{operations} operations in one commit")
        self._must(after.revision == before.revision + 1, "a revision was left out")
        told = {event.target for event in made.events}
        for worker_id, worker in after.workers.items():
            old = before.workers.get(worker_id)
            if worker is not old:
                self._check_step(old, worker, told)
        self._lenders &= after.workers.keys()
        self._check_slices(after)
        self._check_bounds(after)

    def _check_step(self, old: Worker | None, new: Worker, told: set[str]) -> None:
        was = old.state if old is not None else State.INACTIVE
        name, now = new.worker_id, new.state
        if was is not now:
            self._must((was, now) in _PATHS, f"{name}: {was} -> {now} is no legal edge")
            self._must(name in told, f"{name}: {was} -> {now} without an event")
            self._must(bool(new.intent.reason), f"{name}: {now} without a reason")
        if old is not None:
            self._must(new.intent.generation >= old.intent.generation, f"{name}: its generation went back")
        self._must(now is State.INACTIVE or bool(new.intent.gpu_ids), f"{name} is {now} without GPUs")

    def _check_slices(self, records: Records) -> None:
        owners: dict[tuple[str, str], str] = {}
        for worker in records.workers.values():
            if worker.asleep or worker.intent.waking:
                self._lenders.add(worker.worker_id)
            elif worker.state is not State.INACTIVE or not worker.intent.gpu_ids:
                self._lenders.discard(worker.worker_id)
            if worker.worker_id in self._lenders:
                continue  # its GPUs may be lent; it is awake only when they are back, which `_alone` sees
            for gpu in worker.intent.gpu_ids:
                other = owners.setdefault((worker.intent.node_id, gpu), worker.worker_id)
                self._must(
                    other == worker.worker_id, f"GPU {gpu} of {worker.intent.node_id}: {other}, {worker.worker_id}"
                )

    def _check_bounds(self, records: Records) -> None:
        counts: dict[str, int] = {}
        for worker in records.workers.values():
            node = records.nodes.get(worker.intent.node_id)
            leaves = node is not None and node.state is NodeState.RELEASING
            if worker.state in (State.STARTING, State.ACTIVE) and not leaves and not worker.intent.spare:
                counts[worker.pool] = counts.get(worker.pool, 0) + 1
        for name, pool in records.pools.items():
            count, most = counts.get(name, 0), pool.spec.max_workers
            self._must(count <= most, f"pool {name} has {count} workers, its bound is {most}")

    # ------------------------------------------------------------ processes and requests

    def _spawned(self, node: ModelNode, worker: ModelWorker) -> None:
        self.note(f"spawn {worker.worker_id} on {node.node_id} {','.join(worker.gpu_ids)} #{worker.generation}")
        present = {str(number) for number in range(node.model.gpus)}
        self._must(present.issuperset(worker.gpu_ids), f"{worker.worker_id} runs on GPUs that {node.node_id} lacks")
        self._alone(node, worker)

    def _alone(self, node: ModelNode, worker: ModelWorker) -> None:
        """Nobody else who is awake has its GPUs."""
        for other in node.workers.values():
            if other is not worker and other.shim is not None and other.shim.alive and not other.asleep:
                both = set(worker.gpu_ids) & set(other.gpu_ids)
                self._must(not both, f"{worker.worker_id} and {other.worker_id} both run on GPU {both}")

    def _dispatched(self, router: ModelRouter, request: Request, worker_id: str) -> None:
        worker = self.world.store.records.workers.get(worker_id)
        if worker is None or worker.state is not State.DRAINING:
            return
        unrouted = worker.intent.unrouted_revision
        seen = router.acked_revision
        self._must(
            unrouted is None or seen < unrouted,
            f"{router.router_id} acknowledged revision {seen} and still routes to {worker_id}, out since {unrouted}",
        )

    def _request_ended(self, request: Request) -> None:
        self._must(request.number not in self._ended, f"request {request.number} ended twice")
        self._ended.add(request.number)
        if request.error:
            self._must(request.error in _ERRORS, f"request {request.number} ended with {request.error}")
            self.note(f"request {request.number} {request.error}")
        else:
            whole = request.produced == request.output_tokens
            self._must(whole, f"request {request.number}: {request.produced} of {request.output_tokens} tokens")

    # ------------------------------------------------------------ between events

    def look(self) -> None:
        """Counts agree, and queues are within their bounds."""
        world = self.world
        own: dict[tuple[str, int], int] = {}
        for router in world.routers:
            if not router.up:
                continue
            for seat in router.admission.fleet.all():
                own[seat.id] = own.get(seat.id, 0) + seat.own
            for name, pool in router.admission.fleet.table.pools.items():
                # What a worker had and lost again is not refused: it waits beyond the bound, once per seat.
                queue = router.admission._queues.get(name, ())
                waiting = sum(1 for ticket in queue if not ticket.had_seat)
                self._must(waiting <= max(1, pool.max_waiting), f"{waiting} requests wait for {name}")
        for shim in world.endpoints.values():
            counted = own.pop((shim.worker_id, shim.incarnation), 0)
            self._must(
                counted == shim.in_flight,
                f"{shim.worker_id} has {shim.in_flight} in flight, its routers count {counted}",
            )
            self._must(shim.in_flight <= shim.max_in_flight, f"{shim.worker_id} exceeds its bound")
        left = {seat: count for seat, count in own.items() if count}
        self._must(not left, f"routers count requests at engines that are gone: {left}")

    def check_pace(self, plans: int, seconds: float) -> None:
        """The leader looks when there is a reason to."""
        self._must(plans <= _PLANS_PER_S * max(seconds, 1.0), f"{plans} plans in {seconds:.0f} s: a livelock")

    # ------------------------------------------------------------ at rest

    def unrest(self) -> str:
        """Why the world is not yet where it should be; empty when it is."""
        world, records = self.world, self.world.store.records
        for node_id, node in world.nodes.items():
            record = records.nodes.get(node_id)
            if node.agent_up and (record is None or record.state is not NodeState.UP):
                return f"node {node_id} is {record.state if record is not None else 'not known'}"
        for name in records.pools:
            text = self._pool_unrest(records, name)
            if text:
                return text
        if world.ended_total < len(world.requests):
            return f"{len(world.requests) - world.ended_total} requests have not ended"
        given = next((text for text in (p.unrest() for p in self.provisioners) if text), "")
        return given or self._engine_unrest() or self._table_unrest()

    def _pool_unrest(self, records: Records, name: str) -> str:
        pool = records.pools[name]
        mine = [worker for worker in records.workers.values() if worker.pool == name]
        for worker in mine:
            if worker.state not in (State.ACTIVE, State.INACTIVE) or worker.intent.phase is Phase.LOST:
                return f"{worker.worker_id} is {worker.state}/{worker.intent.phase}"
            if worker.state is State.INACTIVE and worker.intent.gpu_ids and not worker.asleep:
                return f"{worker.worker_id} is INACTIVE and holds GPUs"
        serving = [worker for worker in mine if worker.state is State.ACTIVE]
        behind = [w.worker_id for w in serving if w.observed.weight_version != pool.intent.weight_version]
        if behind and pool.intent.weight_source:
            return f"{', '.join(behind)} lack the weights {pool.intent.weight_version}"
        active = len(serving)
        exhausted = sum(1 for worker in mine if _is_exhausted(worker, pool.spec.max_start_attempts))
        wanted = pool.intent.desired_workers
        unplaceable = any(text.startswith("CANNOT_PLACE") for text in pool.intent.conditions)
        if not pool.spec.min_workers <= wanted <= pool.spec.max_workers:
            return f"pool {name} wants {wanted} workers"
        if active > wanted or (active + exhausted < wanted and not unplaceable):
            return f"pool {name} has {active} ACTIVE workers and wants {wanted}"
        return ""

    def _engine_unrest(self) -> str:
        """Engines run exactly where ACTIVE workers are recorded; until a node has told of a death they may not."""
        world = self.world
        running = {
            (node_id, worker.worker_id, worker.incarnation)
            for node_id, node in world.nodes.items()
            for worker in node.workers.values()
            if worker.shim is not None and worker.shim.alive
        }
        recorded = {
            (worker.intent.node_id, worker.worker_id, worker.observed.incarnation)
            for worker in world.store.records.workers.values()
            if worker.state is State.ACTIVE or worker.asleep
        }
        return "" if running == recorded else f"engines {sorted(running)}, ACTIVE records {sorted(recorded)}"

    def _table_unrest(self) -> str:
        world = self.world
        table = routing_table(world.control.snapshot())
        for router in world.routers:
            held = router.admission.fleet.table
            if (held.revision, held.workers, held.pools) != (table.revision, table.workers, table.pools):
                return f"{router.router_id} holds the table of revision {held.revision}, it is {table.revision}"
        return ""

    def check_rest(self) -> None:
        """Nothing is left over: engines run exactly where ACTIVE workers are recorded, and nobody holds a count."""
        world = self.world
        differ = self._engine_unrest()
        self._must(not differ, differ)
        asleep = [worker.shim for node in world.nodes.values() for worker in node.workers.values() if worker.asleep]
        self._must(
            all(shim.in_flight == 0 for shim in world.endpoints.values())
            and all(shim.admission != DRAINING for shim in world.endpoints.values() if shim not in asleep),
            "an engine at rest is in use or refuses",
        )
        self._must(all(router.open_requests == 0 for router in world.routers), "a router holds requests at rest")
        self.look()


def _is_exhausted(worker: Worker, attempts: int) -> bool:
    intent = worker.intent
    return intent.phase is Phase.FAILED and not intent.held and intent.attempts >= attempts
