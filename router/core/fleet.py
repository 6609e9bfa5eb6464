"""The workers as routed now: the table, a seat for each, and which of them serve which model."""

from collections.abc import Iterable, Iterator, Sequence

from router.core.board import ALONE, ONE_PROCESS, Board, Cell, pool_key
from router.core.pair import partners
from router.core.policies.role import pool_for
from router.core.seat import Seat
from router.core.table import Change, apply_delta, apply_snapshot
from springtide.errors import NotFound, Unavailable
from springtide.model.enums import Role
from springtide.model.routing import RoutedPool, RoutingDelta, RoutingTable, WorkerLoad

_LOUDEST = 16.0


class Fleet:
    """`table` is the last known good one; `known` is True once any has arrived."""

    def __init__(self, board: Board = ONE_PROCESS) -> None:
        self._board = board
        self._waiting_cells: dict[str, Cell] = {}
        self.table = RoutingTable()
        self.known = False
        self._seats: dict[str, Seat] = {}
        self._leaving: set[Seat] = set()
        self._by_pool: dict[str, list[Seat]] = {}
        self._by_model: dict[str, dict[Role, str]] = {}
        self._usual: dict[str, RoutedPool] = {}
        """Of requests that wish for no role."""
        self.pairs: dict[str, str] = {}
        """The prefill pool of each decode pool whose requests are served by two workers."""

    def snapshot(self, table: RoutingTable, now: float) -> Change:
        """Takes a snapshot."""
        self.table, change = apply_snapshot(self.table, table)
        self.known = True
        if change is Change.APPLIED:
            self._reseat(now, renewed=())
        return change

    def delta(self, delta: RoutingDelta, now: float) -> Change:
        """Takes a delta."""
        self.table, change = apply_delta(self.table, delta)
        if change is Change.APPLIED:
            self._reseat(now, renewed={worker.worker_id for worker in delta.workers})
        return change

    def loads(self, loads: Iterable[WorkerLoad], now: float) -> None:
        """Takes the shims' counts; those of another incarnation and unknown ones are ignored."""
        pools = set()
        for load in loads:
            seat = self._seats.get(load.worker_id)
            if seat is not None and seat.worker.incarnation == load.incarnation and load.in_flight is not None:
                seat.reported(load.in_flight, now, load.kv_use)
                pools.add(seat.worker.pool)
        for pool in pools:
            hear_others(self._by_pool.get(pool, ()))

    def _reseat(self, now: float, renewed: Iterable[str]) -> None:
        """Seats for the table's workers; a known incarnation keeps its own. `renewed`: said anew, so tombstones go."""
        old, self._seats, self._by_pool = self._seats, {}, {}
        for worker in self.table.workers.values():
            if not worker.endpoint.rpartition(":")[2].isdigit():
                continue  # unroutable, never fatal
            seat = old.get(worker.worker_id)
            if seat is None or seat.id != (worker.worker_id, worker.incarnation):
                seat = self._returned(worker.worker_id, worker.incarnation) or Seat(worker, now)
            seat.worker = worker
            if worker.worker_id in renewed:
                seat.blocked_until = 0.0
            self._seats[worker.worker_id] = seat
            self._by_pool.setdefault(worker.pool, []).append(seat)
        kept = set(self._seats.values())
        self._leaving = {seat for seat in (*old.values(), *self._leaving) if seat not in kept and seat.own > 0}
        self._share()
        self._by_model = {}
        for name, pool in self.table.pools.items():
            if pool.role is None:
                continue
            self._by_model.setdefault(pool.served_model_name, {})[pool.role] = name
        self.pairs = partners(self.table.pools, self._by_model)
        usual = ((model, pool_for(by_role, None)) for model, by_role in self._by_model.items())
        self._usual = {model: self.table.pools[name] for model, name in usual if name is not None}

    def _share(self) -> None:
        """A cell of the processes' common view for each seat and each pool."""
        seats = list(self.all())
        cells = self._board.cells([seat.id for seat in seats] + [pool_key(name) for name in self.table.pools])
        for seat in seats:
            seat.cell = cells.get(seat.id, ALONE)
            seat.cell.put(seat.own)
        self._waiting_cells = {name: cells.get(pool_key(name), ALONE) for name in self.table.pools}

    def waiting_cell(self, pool: str) -> Cell:
        """Where it is told how many requests wait for a pool."""
        return self._waiting_cells.get(pool, ALONE)

    def _returned(self, worker_id: str, incarnation: int) -> Seat | None:
        """A drain that was cancelled brings the same incarnation back."""
        for seat in self._leaving:
            if seat.id == (worker_id, incarnation):
                seat.blocked_until = 0.0
                return seat
        return None

    def pool_of(self, model: str, role: Role | None = None) -> RoutedPool:
        """The pool of a served model name, and of a role where it has several; or a pool by its own name.

        Raises NotFound that names the known models or roles.
        """
        if role is None and (found := self._usual.get(model)) is not None:
            return found
        by_role = self._by_model.get(model)
        name = model if by_role is None and model in self.table.pools else pool_for(by_role or {}, role)
        if name is None and by_role:
            known = [str(role).lower() for role in by_role]
            raise NotFound(kind="role", name=str(role).lower(), known=known)
        if name is None:
            if not self.known:
                raise Unavailable(
                    "This router has not heard from its control plane yet.",
                    reason="NO_ROUTING_TABLE",
                    remedy="Try again; if it lasts, check the router's controlplane address.",
                    retry_after_s=1.0,
                )
            raise NotFound(kind="model", name=model, known=self.models())
        return self.table.pools[name]

    def pools_of_models(self) -> dict[str, list[str]]:
        """By served model name; a model has a pool for each of its roles."""
        return {model: list(self._by_model[model].values()) for model in self.models()}

    def models(self) -> list[str]:
        """Served model names, sorted."""
        return sorted(self._by_model)

    def active(self, pool: str) -> int:
        """Routable workers of a pool."""
        return len(self._by_pool.get(pool, ()))

    def of(self, pool: str) -> Sequence[Seat]:
        """Seats of a pool's routable workers."""
        return self._by_pool.get(pool, ())

    def all(self) -> Iterator[Seat]:
        """All seats, those that leave with requests included."""
        yield from self._seats.values()
        yield from self._leaving

    def holds(self, seat: Seat) -> bool:
        """Whether this incarnation is in the table."""
        return self._seats.get(seat.worker.worker_id) is seat

    def emptied(self, seat: Seat) -> None:
        """The last request of a seat ended: one that was leaving is forgotten."""
        self._leaving.discard(seat)


def hear_others(seats: Sequence[Seat]) -> None:
    """After a report: how many requests of other routers there are for each of ours."""
    ours = sum(seat.own + seat.cell.siblings() for seat in seats)
    echo = min(_LOUDEST, sum(seat.others for seat in seats) / ours) if ours else 0.0
    for seat in seats:
        seat.echo = echo
