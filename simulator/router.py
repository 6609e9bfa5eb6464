"""A modelled router: the real table, pick, admission and retry rules between arrivals and shims.

With a prefill and a decode pool, a request is prefilled in the one, its KV cache is transferred, and the other decodes
it. From the choice of the decoding worker on, both shims count it, so a drain of either waits for the transfer.
"""

import random
from collections.abc import Callable

from router.core.admission import Admission, Granted, Ticket
from router.core.retry import Ruling, Verdict, rule
from router.core.want import NO_NEEDS, Needs, Want
from simulator.agenda import Agenda
from simulator.controlplane import ModelControlPlane
from simulator.network import Network, Stream
from simulator.requests import Request
from simulator.sessions import RouterSession
from simulator.shim import Shim
from springtide.dataplane.messages import OutcomeKind
from springtide.errors import AlreadyExists, SpringtideError
from springtide.model.routing import RoutingDelta, RoutingTable, WorkerLoad

MAX_ATTEMPTS = 5
REPORT_INTERVAL_S = 1.0
_SILENCE_S = 3.5


class ModelRouter:
    """`done(request)` hears of every request exactly once. `dispatched(router, request, shim)` sees every attempt."""

    def __init__(
        self,
        router_id: str,
        agenda: Agenda,
        network: Network,
        control: ModelControlPlane,
        rng: random.Random,
        endpoints: dict[str, Shim],
        done: Callable[[Request], None],
        transfer_s: Callable[[int], float] = lambda tokens: 0.0,
        dispatched: Callable[["ModelRouter", Request, str], None] = lambda router, request, worker_id: None,
    ) -> None:
        self.router_id = router_id
        self.agenda = agenda
        self.network = network
        self.control = control
        self.rng = rng
        self.endpoints = endpoints
        self.done = done
        self.transfer_s = transfer_s
        self.dispatched = dispatched
        self.admission = Admission(self.rng)
        self.up = False
        self.life = 0
        self.acked_revision = 0
        self._requests: dict[int, Request] = {}  # all that have not ended
        self._held: dict[int, Request] = {}
        self._session: RouterSession | None = None
        self._stream: Stream | None = None
        self._heard_at = 0.0
        self._pump_at: dict[str, float] = {}
        self._waited: set[str] = set()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self.up = True
        self.life += 1
        self.admission = Admission(self.rng)
        self.acked_revision = 0
        self._pump_at, self._waited = {}, set()
        self._connect()
        self.agenda.after(REPORT_INTERVAL_S, self._tick, self.life)

    def crash(self) -> None:
        """Its clients' connections break, and its requests are aborted at the shims."""
        self.up = False
        self.life += 1
        if self._session is not None:
            self.network.send(self.router_id, self._session.end)
        self._session = None
        if self._stream is not None:
            self._stream.open = False
        requests, self._requests = self._requests, {}
        self._held = {}
        for request in requests.values():
            for ticket in (request.prefill_ticket, request.ticket):
                seat = ticket.seat if ticket is not None else None
                shim = self.endpoints.get(seat.worker.endpoint) if seat is not None else None
                if shim is not None:
                    shim.abort(request)
            self._end(request, "ROUTER_LOST")

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------ control plane

    def _connect(self) -> None:
        self._heard_at = self.agenda.now
        self._session = None
        self._stream = Stream(self.network, self.router_id)
        self.network.send(self.router_id, self._arrive_at_control, self._stream, self.life)

    def _arrive_at_control(self, stream: Stream, life: int) -> None:
        control = self.control
        if life == self.life and stream is self._stream and control.up and control.hub.snapshot.store_id:
            try:
                self._session = RouterSession(control, self, f"{self.router_id}-{life}", stream)
            except AlreadyExists:  # nobody has heard yet that its earlier process ended
                stream.open = False

    def _tick(self, life: int) -> None:
        if life != self.life:
            return
        stream = self._stream
        if stream is None or not stream.open or self.agenda.now - self._heard_at > _SILENCE_S:
            if stream is not None:
                stream.open = False
            self._connect()
        self._report()
        self.agenda.after(REPORT_INTERVAL_S, self._tick, life)

    def _report(self) -> None:
        if self._session is not None and self.admission.fleet.known:
            self._waited = set(self.admission.waiting_pools())
            self.network.send(self.router_id, self._session.report, self.admission.report(self.agenda.now))

    def table(self, stream: Stream, table: RoutingTable) -> None:
        if self.up and stream is self._stream:
            self.admission.fleet.snapshot(table, self.agenda.now)
            self._after_table()

    def changes(self, stream: Stream, delta: RoutingDelta) -> None:
        if self.up and stream is self._stream:
            self.admission.fleet.delta(delta, self.agenda.now)
            self._after_table()

    def loads(self, stream: Stream, loads: tuple[WorkerLoad, ...]) -> None:
        if self.up and stream is self._stream:
            self._heard_at = self.agenda.now
            self.admission.fleet.loads(loads, self.agenda.now)

    def _after_table(self) -> None:
        self._heard_at = self.agenda.now
        table = self.admission.fleet.table
        self.acked_revision = table.revision
        if self._session is not None:
            self.network.send(self.router_id, self._session.ack, table.store_id, table.revision)
        for pool in self.admission.waiting_pools():
            self._pump(pool)

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """A client's request."""
        self._requests[request.number] = request
        try:
            needs = Needs(request.labels) if request.labels else NO_NEEDS
            want = Want(prompt_tokens=request.prompt_tokens, needs=needs)
            request.ticket = self.admission.open(request.pool, self.agenda.now, want=want)
        except SpringtideError as error:
            self._end(request, error.reason)
            return
        self._admit(request, request.ticket)

    def _admit(self, request: Request, ticket: Ticket) -> None:
        """Dispatches, holds or refuses."""
        while True:
            try:
                seated = self.admission.admit(ticket, self.agenda.now)
            except SpringtideError as error:
                self._refuse(request, ticket, error.reason)
                return
            if not seated:
                self._held[ticket.number] = request
                self._pump_soon(ticket.pool, self.agenda.now + 0.05)
                if ticket.pool not in self._waited:
                    self._report()
                return
            if self._dispatch(request, ticket):
                return

    def _dispatch(self, request: Request, ticket: Ticket) -> bool:
        """Whether the shim has it; else it is to be admitted again."""
        seat = ticket.seat
        assert seat is not None
        self.dispatched(self, request, seat.worker.worker_id)
        shim = self.endpoints.get(seat.worker.endpoint)
        if shim is None or not shim.alive:
            return self._ended(request, ticket, OutcomeKind.CONNECT_FAILED)
        decodes = request.prefill_ticket is not None
        take = shim.reserve if decodes else shim.admit
        refusal = take(request, self, seat.worker.incarnation)
        if refusal:
            return self._ended(request, ticket, OutcomeKind.REFUSED, refusal=refusal)
        request.worker = seat.worker.worker_id
        request.dispatched_at = self.agenda.now
        if decodes:
            seconds = self.transfer_s(request.prompt_tokens)
            request.transfer_s += seconds
            self.agenda.after(seconds, self._transferred, request, ticket, shim, self.life)
        return True

    def _ended(
        self, request: Request, ticket: Ticket, kind: OutcomeKind, *, refusal: str = "", fault: str = ""
    ) -> bool:
        """An attempt ended without an answer. False: admit it again; True: that was all."""
        started = request.first_at is not None
        ruling: Ruling = rule(
            kind,
            response_started=started,
            refusal=refusal,
            timeout="",
            attempts=ticket.attempts,
            max_attempts=MAX_ATTEMPTS,
            fault=fault,
        )
        self.admission.settle(ticket, ruling, refusal, self.agenda.now)
        if ruling.verdict in (Verdict.REQUEUE, Verdict.RETRY):
            request.retries += ruling.verdict is Verdict.RETRY
            return False
        self._drop_prefill(request)
        self._end(request, "STREAM_CUT" if started else "WORKER_FAILED")
        return True

    def _refuse(self, request: Request, ticket: Ticket, reason: str) -> None:
        self._drop_prefill(request)
        self._end(request, reason)

    def _end(self, request: Request, error: str) -> None:
        self._requests.pop(request.number, None)
        request.error = error
        request.done_at = self.agenda.now
        if request.ticket is not None:
            request.attempts += request.ticket.attempts
            request.queue_s += request.ticket.waited_s
        self.done(request)

    # ------------------------------------------------------------ what shims say

    def first_token(self, request: Request, shim: Shim) -> None:
        if request.first_at is None:
            request.first_at = self.agenda.now
            self.admission.demand(request.pool).first_token(self.agenda.now - request.arrived_at)
            if request.ticket is not None and request.ticket.seat is not None:
                self.admission.first_byte(request.ticket, request.ticket.seat)
        if request.decode_pool and request.prefill_ticket is None and request.output_tokens > 1:
            self._hand_over(request)

    def attempt_ended(self, request: Request, shim: Shim, kind: OutcomeKind, fault: str = "") -> None:
        if not self.up or request.number not in self._requests:
            return
        ticket = self._ticket_at(request, shim)
        if ticket is None:
            return
        if kind is OutcomeKind.OK:
            self.admission.settle(
                ticket,
                rule(kind, response_started=True, refusal="", timeout="", attempts=1, max_attempts=MAX_ATTEMPTS),
                "",
                self.agenda.now,
            )
            self.admission.answered(ticket, request.output_tokens)
            self._end(request, "")
        elif ticket is request.prefill_ticket:
            # The KV cache was lost on its way: the stream has begun, so its end is explicit.
            self._ended(request, ticket, kind, fault=fault)
            self._leave_decode(request)
        elif not self._ended(request, ticket, kind, fault=fault):
            self._admit(request, ticket)
        if self.admission.waiting(ticket.pool):
            self._pump(ticket.pool)

    def _ticket_at(self, request: Request, shim: Shim) -> Ticket | None:
        for ticket in (request.ticket, request.prefill_ticket):
            if ticket is not None and ticket.seat is not None and ticket.seat.id == (shim.worker_id, shim.incarnation):
                return ticket
        return None

    # ------------------------------------------------------------ prefill to decode

    def _hand_over(self, request: Request) -> None:
        request.prefill_ticket, now = request.ticket, self.agenda.now
        if request.prefill_ticket is not None:
            request.queue_s += request.prefill_ticket.waited_s
        try:
            request.ticket = self.admission.open(request.decode_pool, now)
        except SpringtideError as error:
            request.ticket = None
            self._drop_prefill(request)
            self._end(request, error.reason)
            return
        self._admit(request, request.ticket)

    def _transferred(self, request: Request, ticket: Ticket, shim: Shim, life: int) -> None:
        if life != self.life or request.ended or request.ticket is not ticket or ticket.seat is None:
            return
        self._drop_prefill(request)
        if shim.alive:
            shim.transferred(request)

    def _drop_prefill(self, request: Request) -> None:
        """The prefilling worker is done with it."""
        ticket = request.prefill_ticket
        if ticket is None or ticket.seat is None:
            return
        shim = self.endpoints.get(ticket.seat.worker.endpoint)
        if shim is not None:
            shim.release(request)
        ok = rule(OutcomeKind.OK, response_started=True, refusal="", timeout="", attempts=1, max_attempts=1)
        self.admission.settle(ticket, ok, "", self.agenda.now)
        if self.admission.waiting(ticket.pool):
            self._pump_soon(ticket.pool, self.agenda.now)

    def _leave_decode(self, request: Request) -> None:
        """The stream has ended while its second half was being placed."""
        ticket = request.ticket
        if ticket is None or ticket is request.prefill_ticket:
            return
        if ticket.seat is not None:
            shim = self.endpoints.get(ticket.seat.worker.endpoint)
            if shim is not None:
                shim.abort(request)
            gone = rule(OutcomeKind.ABORTED, response_started=True, refusal="", timeout="", attempts=1, max_attempts=1)
            self.admission.settle(ticket, gone, "", self.agenda.now)
        else:
            self.admission.cancel(ticket)
            self._held.pop(ticket.number, None)

    # ------------------------------------------------------------ queues

    def _pump(self, pool: str) -> None:
        verdicts, wake_at = self.admission.pump(pool, self.agenda.now)
        for verdict in verdicts:
            request = self._held.pop(verdict.ticket.number, None)
            if request is None:
                continue
            if not isinstance(verdict, Granted):
                self._refuse(request, verdict.ticket, verdict.error.reason if verdict.error else "WORKER_FAILED")
            elif not self._dispatch(request, verdict.ticket):
                self._admit(request, verdict.ticket)
        if wake_at is not None:
            self._pump_soon(pool, wake_at)

    def _pump_soon(self, pool: str, at: float) -> None:
        due = self._pump_at.get(pool)
        if due is None or at < due or due < self.agenda.now:
            self._pump_at[pool] = max(at, self.agenda.now)
            self.agenda.at(self._pump_at[pool], self._pump_due, pool, self._pump_at[pool], self.life)

    def _pump_due(self, pool: str, due: float, life: int) -> None:
        if life == self.life and self._pump_at.get(pool) == due:
            del self._pump_at[pool]
            self._pump(pool)
