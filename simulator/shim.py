"""A modelled shim with its engine: admission, exact in-flight counts, and what becomes of requests when it ends."""

from collections.abc import Callable
from typing import Protocol

from simulator.agenda import Agenda
from simulator.engine import Engine, Sequence
from simulator.performance import Performance
from simulator.requests import Request
from springtide.dataplane.messages import OutcomeKind

STARTING, OPEN, PAUSED, DRAINING, GONE = "starting", "open", "paused", "draining", "gone"


class Client(Protocol):
    """The router behind an attempt."""

    def first_token(self, request: Request, shim: "Shim") -> None: ...

    def attempt_ended(self, request: Request, shim: "Shim", kind: OutcomeKind, fault: str = "") -> None: ...


class Shim:
    """One incarnation's only door. It outlives the agent."""

    def __init__(
        self, agenda: Agenda, worker_id: str, incarnation: int, endpoint: str, performance: Performance, bound: int
    ) -> None:
        self.agenda = agenda
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.endpoint = endpoint
        self.engine = Engine(agenda, performance)
        self.max_in_flight = bound or performance.timing.max_num_seqs
        self.admission = STARTING
        self.ready_at: float | None = None
        self.total_served = 0
        self.on_idle: Callable[[], None] = lambda: None  # a closed shim's last request has ended
        self._attempts: dict[int, tuple[Request, Client, Sequence | None]] = {}

    @property
    def alive(self) -> bool:
        return self.admission != GONE

    @property
    def in_flight(self) -> int:
        """Admitted and not finished; a transfer that comes in counts from its start, one that goes out to its end."""
        return len(self._attempts)

    def set_admission(self, admission: str) -> None:
        if admission == self.admission or not self.alive:
            return
        self.admission = admission

    # ------------------------------------------------------------ requests

    def admit(self, request: Request, client: Client, incarnation: int) -> str:
        """Why it refuses; empty when the request is in the engine."""
        refusal = self._refusal(incarnation)
        if not refusal:
            wanted = 1 if request.decode_pool else request.output_tokens
            sequence = Sequence(request.prompt_tokens, wanted, self, request.number)
            self._attempts[request.number] = (request, client, sequence)
            self.engine.submit(sequence)
        return refusal

    def reserve(self, request: Request, client: Client, incarnation: int) -> str:
        """As `admit`, for a request whose KV cache is about to be transferred here."""
        refusal = self._refusal(incarnation)
        if not refusal:
            self._attempts[request.number] = (request, client, None)
        return refusal

    def transferred(self, request: Request) -> None:
        """The reserved request's KV cache has arrived: it decodes."""
        found = self._attempts.get(request.number)
        if found is None or found[2] is not None:
            return
        sequence = Sequence(request.prompt_tokens, request.output_tokens, self, request.number, computed=True)
        sequence.first_at = request.first_at
        self._attempts[request.number] = (request, found[1], sequence)
        self.engine.submit(sequence)

    def release(self, request: Request) -> None:
        """A prefilled request has left for the worker that decodes it."""
        self._attempts.pop(request.number, None)
        self.total_served += 1
        self._check_idle()

    def abort(self, request: Request) -> None:
        """The client is gone."""
        found = self._attempts.pop(request.number, None)
        if found is not None and found[2] is not None:
            self.engine.abort(found[2])
        self._check_idle()

    def abort_all(self) -> None:
        """A drain's deadline: what is left is cut, each with an explicit error."""
        self._end_all(OutcomeKind.UPSTREAM_EOF, OutcomeKind.ABORTED.value)

    def die(self) -> None:
        """The process group is gone."""
        self.admission = GONE
        self._end_all(OutcomeKind.UPSTREAM_EOF, OutcomeKind.UPSTREAM_EOF.value)
        self.engine.halt()

    def _end_all(self, kind: OutcomeKind, fault: str) -> None:
        attempts, self._attempts = self._attempts, {}
        for request, client, sequence in attempts.values():
            if sequence is not None:
                self.engine.abort(sequence)
                request.produced = max(request.produced, sequence.produced)
            client.attempt_ended(request, self, kind, fault)
        self._check_idle()

    def _check_idle(self) -> None:
        if self.admission in (DRAINING, PAUSED) and not self._attempts:
            self.on_idle()

    def _refusal(self, incarnation: int) -> str:
        if incarnation != self.incarnation:
            return "incarnation"
        if self.admission != OPEN:
            return self.admission
        return "full" if len(self._attempts) >= self.max_in_flight else ""

    # ------------------------------------------------------------ the engine's word

    def first_token(self, sequence: Sequence, at: float) -> None:
        assert isinstance(sequence.tag, int)
        request, client, _ = self._attempts[sequence.tag]
        client.first_token(request, self)

    def finished(self, sequence: Sequence, at: float) -> None:
        assert isinstance(sequence.tag, int)
        found = self._attempts.get(sequence.tag)
        if found is None:
            return  # prefilled, and refused by the pool that was to decode it
        request, client, _ = found
        if request.decode_pool and sequence.wanted == 1 and request.output_tokens > 1:
            return  # prefilled: it stays until its KV cache is with the worker that decodes it
        del self._attempts[sequence.tag]
        self.total_served += 1
        request.produced = sequence.produced
        client.attempt_ended(request, self, OutcomeKind.OK)
        self._check_idle()
