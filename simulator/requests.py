"""One request on its way, and what became of it."""

from router.core.admission import Ticket


class Request:
    """Times are virtual seconds; None until it happened. `error` empty: it ended well, or has not ended."""

    __slots__ = (
        "arrived_at",
        "attempts",
        "decode_pool",
        "dispatched_at",
        "done_at",
        "error",
        "first_at",
        "labels",
        "number",
        "output_tokens",
        "pool",
        "prefill_ticket",
        "produced",
        "prompt_tokens",
        "queue_s",
        "retries",
        "ticket",
        "transfer_s",
        "worker",
    )

    def __init__(
        self,
        number: int,
        arrived_at: float,
        prompt_tokens: int,
        output_tokens: int,
        pool: str,
        decode_pool: str = "",
    ) -> None:
        self.number = number
        self.arrived_at = arrived_at
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.pool = pool
        self.decode_pool = decode_pool
        self.ticket: Ticket | None = None
        self.prefill_ticket: Ticket | None = None
        self.labels: tuple[tuple[str, str], ...] = ()
        self.worker = ""
        self.attempts = 0
        self.retries = 0
        self.produced = 0
        self.queue_s = 0.0
        self.transfer_s = 0.0
        self.dispatched_at: float | None = None
        self.first_at: float | None = None
        self.done_at: float | None = None
        self.error = ""

    @property
    def ended(self) -> bool:
        return self.done_at is not None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    @property
    def tbt_s(self) -> float | None:
        """Mean time between tokens; None for fewer than two."""
        if self.first_at is None or self.done_at is None or self.error or self.output_tokens < 2:
            return None
        return (self.done_at - self.first_at) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.done_at is None else self.done_at - self.arrived_at
