"""One request in the engine: sends what the batch produces, and breaks off where a fault says so."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from nodeagent.engines.sim.answers import Writer, error_event
from nodeagent.engines.sim.batching import Sequence
from nodeagent.engines.sim.openai import ApiError, Generation
from nodeagent.engines.sim.protocol import Exchange


class Owner(Protocol):
    """The engine, as its requests see it."""

    def now(self) -> float:
        """The engine's clock in seconds."""

    def finish(self, request: "Request") -> None:
        """A request has been answered in full."""

    def forget(self, request: "Request", reason: str) -> None:
        """Drop a request: nothing more is computed for it."""

    def held(self, request: "Request") -> dict[str, object] | None:
        """Where another engine finds the KV of its prompt; None where none is to."""


class Request:
    """One request in the engine: where its tokens go, and how far they have got."""

    __slots__ = (
        "break_at",
        "break_by",
        "done",
        "engine",
        "exchange",
        "generation",
        "pull",
        "seen",
        "sent",
        "sequence",
        "writer",
    )

    def __init__(
        self, engine: Owner, exchange: Exchange, generation: Generation, done: Callable[[], None] | None
    ) -> None:
        self.engine = engine
        self.exchange = exchange
        self.generation = generation
        self.writer = Writer(generation, int(time.time()))
        self.sequence = Sequence(generation.answer.prompt_tokens, generation.wanted, engine.now(), owner=self)
        self.seen = 0
        self.sent = 0
        self.break_at: int | None = None
        self.break_by = ""
        self.done = done
        self.pull: asyncio.Task[None] | None = None
        """While its KV is fetched from another engine."""

    def deliver(self) -> None:
        """Send what the batch has produced since the last time."""
        produced = self.sequence.produced
        if self.break_at is not None and produced >= self.break_at:
            self._break(self.break_at)
        elif self.done is not None:
            if self.sequence.done:
                self.done()
                self.engine.finish(self)
        elif self.generation.stream:
            self._stream(produced)
        elif self.sequence.done:
            body = self.writer.body(produced, self.generation.finish_reason)
            if (held := self.engine.held(self)) is not None:
                body["kv_transfer_params"] = held
            self.exchange.reply(200, body, headers=self.headers())
            self.engine.finish(self)

    def abort(self) -> None:
        """End the answer where it is, with finish reason abort."""
        if self.generation.stream:
            self._start()
            pending = (
                self.writer.tokens(self.sent, self.sequence.produced) if self.sent < self.sequence.produced else b""
            )
            produced = self.sequence.produced
            self.exchange.end_events(pending + self.writer.aborted(produced) + self.writer.closing(produced))
        else:
            self.exchange.reply(200, self.writer.body(self.sequence.produced, "abort"), headers=self.headers())

    def headers(self) -> dict[str, str] | None:
        """The client's request id, given back."""
        request_id = self.exchange.headers.get("x-request-id")
        return None if request_id is None else {"x-request-id": request_id}

    def _start(self) -> None:
        if not self.exchange.streaming:
            self.exchange.start_events(b"", self.headers())

    def _stream(self, produced: int) -> None:
        if self.exchange.congested:
            self.exchange.on_relief(self.deliver)
            return
        data = self.writer.tokens(self.sent, produced)
        if self.sent == 0:
            self._start()
            data = self.writer.opening() + data
        self.sent = produced
        if self.sequence.done:
            self.exchange.end_events(data + self.writer.closing(produced))
            self.engine.finish(self)
        else:
            self.exchange.events(data)

    def fail(self) -> None:
        """Its KV could not be loaded: what vLLM answers by its failure policy `fail`."""
        self.engine.forget(self, "error")
        error = ApiError(500, "InternalServerError", "Internal server error")
        if self.generation.stream:
            self._start()
            self.exchange.end_events(error_event(error))
        else:
            self.exchange.reply(500, error.body())

    def _break(self, at: int) -> None:
        self.engine.forget(self, "error")
        error = ApiError(500, "InternalServerError", "EngineCore encountered an issue. See stack trace (above).")
        if self.generation.stream:
            self._start()
            if self.sent < at:
                data = self.writer.opening() if self.sent == 0 else b""
                self.exchange.events(data + self.writer.tokens(self.sent, at))
                self.sent = at
        if self.break_by == "cut_stream":
            self.exchange.cut()
        elif self.generation.stream:
            self.exchange.end_events(error_event(error))
        else:
            self.exchange.reply(500, error.body())
