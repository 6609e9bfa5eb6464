"""The running engine: the batch model on the loop's clock, its requests, pause and sleep, and due faults."""

import asyncio
import math
import sys
import time
import uuid
from collections.abc import Callable

from nodeagent.engines.sim.batching import Batch, Sequence
from nodeagent.engines.sim.faults import Fault, FaultBoard
from nodeagent.engines.sim.harm import crash, hang, spawn_orphans
from nodeagent.engines.sim.kv import KvLost, KvTransfer
from nodeagent.engines.sim.memory import Memory
from nodeagent.engines.sim.metrics import Gauges, SimMetrics
from nodeagent.engines.sim.openai import Generation
from nodeagent.engines.sim.options import SimOptions
from nodeagent.engines.sim.protocol import Exchange
from nodeagent.engines.sim.request import Request

_ALL_TAGS = frozenset({"weights", "kv_cache"})


class SimEngine:
    """All requests and states of one simulated engine. Every method runs on the loop."""

    def __init__(self, options: SimOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options
        self.batch = Batch(options.timing)
        self.metrics = SimMetrics()
        self.faults = FaultBoard()
        self.orphans: list[int] = []
        self.draining = False
        self.ignore_sigterm = False
        self.pause_mode: str | None = None
        self.sleep_level: int | None = None
        self.resident: set[str] = set(_ALL_TAGS)
        self.memory = Memory(options.memory_bytes)
        self.weight_version = ""
        self.weights_path = ""
        self.profiling = False
        self.flushes = 0
        self.requests: set[Request] = set()
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.kv: KvTransfer | None = None
        if options.kv is not None:
            self.kv = KvTransfer(options.kv, str(uuid.uuid4()), lambda: self.faults.claim("kv_dropped") is not None)

    def now(self) -> float:
        """The engine's clock in seconds."""
        return time.monotonic()

    def submit(self, exchange: Exchange, generation: Generation, done: Callable[[], None] | None = None) -> None:
        """Take a request; its answer goes to the exchange, or `done` is called instead when all is computed."""
        request = Request(self, exchange, generation, done)
        for kind in ("cut_stream", "stream_error"):
            fault = self.faults.claim(kind)
            if fault is not None:
                request.break_at, request.break_by = fault.whole("after_tokens"), kind
                break
        self.requests.add(request)
        exchange.on_gone = lambda: self.forget(request, "abort")
        if generation.stream:
            exchange.start_events(b"", request.headers())
        if self.kv is not None and generation.kv is not None and generation.kv.get("do_remote_prefill"):
            request.pull = self._loop.create_task(self._pull(self.kv, request, generation))
            return
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        self._tick()
        self.batch.submit(request.sequence, self.now())
        self._arm()

    async def _pull(self, kv: KvTransfer, request: Request, generation: Generation) -> None:
        """The prompt's KV from the engine that computed it: all but the last token, whose logits are still needed."""
        assert generation.kv is not None
        hangs = self.faults.claim("pull_hangs") is not None
        kv.counts.pulling += 1
        try:
            if hangs:
                await self._loop.create_future()  # until the client leaves
            await kv.fetch(generation.kv, generation.prompt_ids(), self.batch.timing.block_size)
            request.sequence.computed = request.sequence.prompt_tokens - 1
        except KvLost as lost:
            kv.counts.failed += 1
            print(f"sim: {generation.request_id}: {lost}", file=sys.stderr, flush=True)
            if not kv.config.recompute:
                request.fail()
                return
            kv.counts.recomputed += 1
        finally:
            kv.counts.pulling -= 1
        request.pull = None
        if request in self.requests:
            self._schedule(request)

    def held(self, request: Request) -> dict[str, object] | None:
        """Where another engine finds the KV of its prompt; None where none is to."""
        generation = request.generation
        if self.kv is None or generation.kv is None or not generation.kv.get("do_remote_decode"):
            return None
        return self.kv.hold(generation.request_id, generation.prompt_ids(), self.batch.timing.block_size)

    def forget(self, request: Request, reason: str) -> None:
        """Drop a request: nothing more is computed for it."""
        if request in self.requests:
            self.requests.discard(request)
            if request.pull is not None:
                if request.pull is not asyncio.current_task():
                    request.pull.cancel()
            else:
                self.batch.abort(request.sequence)
            self.metrics.finished[reason] += 1
            self._check_idle()

    def finish(self, request: Request) -> None:
        """A request has been answered in full."""
        if request in self.requests:
            self.requests.discard(request)
            self.metrics.finished[request.generation.finish_reason] += 1
            self.metrics.e2e.observe(self.now() - request.sequence.arrived_at)
            self._check_idle()

    def abort(self, request_ids: list[str]) -> int:
        """Abort by id (the client's, or the answer's; none: all); how many there were."""
        chosen = [
            request
            for request in self.requests
            if not request_ids
            or request.generation.request_id in request_ids
            or request.exchange.headers.get("x-request-id") in request_ids
        ]
        for request in chosen:
            self.forget(request, "abort")
            request.abort()
        return len(chosen)

    async def pause(self, mode: str) -> None:
        """Stop scheduling: `abort` what runs, `wait` for it, or `keep` it frozen."""
        self.pause_mode = mode
        if mode == "abort":
            self.abort([])
        elif mode == "wait":
            await self.idle()
        self.batch.hold()
        self._arm()

    def resume(self) -> None:
        """Schedule again, unless memory is still released."""
        self.pause_mode = None
        if self.sleep_level is None:
            self.batch.release(self.now())
            self._arm()

    async def sleep(self, level: int, mode: str) -> None:
        """Pause, then release memory: level 0 none, 1 keeps weights on the host, 2 drops them."""
        await self.pause(mode)
        self.sleep_level = level
        if level > 0:
            self.give_back(_ALL_TAGS)

    def occupy(self) -> None:
        """Takes its memory, at the start."""
        for tag in sorted(_ALL_TAGS):
            self.memory.occupy(tag)

    def give_back(self, tags: frozenset[str]) -> None:
        """These parts are no longer resident, and their memory is the kernel's, unless a fault keeps it."""
        self.resident -= tags
        if self.faults.claim("release_nothing") is None:
            for tag in tags:
                self.memory.free(tag)

    def release_kv_cache(self) -> bool:
        """Only the cache; False unless it is paused, idle and resident."""
        if self.pause_mode is None or self.requests or self.resident != _ALL_TAGS:
            return False
        self.sleep_level = 1
        self.give_back(frozenset({"kv_cache"}))
        return True

    def wake_up(self, tags: list[str]) -> None:
        """Bring memory back (no tags: all of it); scheduling resumes once everything is resident."""
        back = _ALL_TAGS if not tags else set(tags) & _ALL_TAGS
        self.resident |= back
        for tag in sorted(back):
            self.memory.occupy(tag)
        if self.resident == _ALL_TAGS and (not tags or self.sleep_level != 0 or "scheduling" in tags):
            self.sleep_level = None
            self.resume()

    async def idle(self) -> None:
        """Wait until no request is left."""
        if self.requests:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def gauges(self) -> Gauges:
        """What /metrics shows of the present state."""
        state = ("awake", "weights_offloaded", "discard_all")[self.sleep_level or 0]
        batch, timing = self.batch, self.options.timing
        return Gauges(
            model=self.options.served_model_names[0],
            running=len(batch.running),
            waiting=len(batch.waiting) if self.sleep_level is None else 0,
            kv_use=batch.kv_use(),
            sleep_state=state,
            preemptions=batch.preemptions,
            prompt_tokens=batch.prompt_tokens_total,
            generation_tokens=batch.generation_tokens_total,
            block_size=timing.block_size,
            kv_blocks=timing.kv_blocks,
        )

    def inject(self, fault: Fault) -> None:
        """Put a fault in force, or carry it out when it is due at once."""
        fault.armed_at_tokens = self.batch.generation_tokens_total
        match fault.kind:
            case "crash" | "hang" if fault.whole("after_tokens") <= 0:
                self.faults.add(fault)
                # at the earliest after the reply to the request that asked for it
                self._loop.call_later(max(0.005, fault.number("after_s")), self._carry_out_unless_lifted, fault)
            case "ignore_sigterm":
                self.ignore_sigterm = True
            case "orphans":
                self.orphans += spawn_orphans()
            case "slow":
                self.batch.slowdown = fault.number("factor")
            case _:
                self.faults.add(fault)
                duration_s = float(fault.values.get("duration_s", 0.0))
                if duration_s > 0 and fault.kind == "refuse_health":
                    self._loop.call_later(duration_s, self.faults.remove, fault)

    def lift_faults(self) -> None:
        """Undo what can be undone."""
        self.faults.clear()
        self.ignore_sigterm = False
        self.batch.slowdown = 1.0
        if self.pause_mode is None and self.sleep_level is None:
            self.batch.release(self.now())
            self._arm()

    def _tick(self) -> None:
        now = self.now()
        touched = self.batch.advance(now)
        if not touched:
            return
        step_s = self.batch.timing.decode_base_s * self.batch.timing.scale
        late = 0
        for sequence in touched:
            request = sequence.owner
            assert isinstance(request, Request)
            late += sequence.produced - request.seen
            if request.seen == 0:
                late -= 1
                self._observe_first(sequence)
            request.seen = sequence.produced
            request.deliver()
        if late:
            self.metrics.inter_token.observe(step_s, late)
        for fault in self.faults.due_by_tokens(self.batch.generation_tokens_total):
            self._carry_out(fault)

    def _observe_first(self, sequence: Sequence) -> None:
        if sequence.scheduled_at is not None and sequence.first_token_at is not None:
            self.metrics.queue.observe(sequence.scheduled_at - sequence.arrived_at)
            self.metrics.ttft.observe(sequence.first_token_at - sequence.arrived_at)

    def _on_timer(self) -> None:
        self._timer = None
        self._due = None
        self._tick()
        self._arm()

    def _arm(self) -> None:
        due = self.batch.next_at()
        if due == self._due:
            return
        self._due = due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            # The loop's timers count whole milliseconds; shorter steps are finished several at a time.
            delay_ms = max(1, math.ceil((due - self.now()) * 1000))
            self._timer = self._loop.call_later(delay_ms / 1000, self._on_timer)

    def _check_idle(self) -> None:
        if not self.requests and self._idle_waiters:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _carry_out_unless_lifted(self, fault: Fault) -> None:
        if fault in self.faults.faults:
            self.faults.remove(fault)
            self._carry_out(fault)

    def _carry_out(self, fault: Fault) -> None:
        if fault.kind == "crash":
            crash(fault)
        elif fault.values["scope"] == "process":
            hang(fault)
        else:
            self.batch.hold()
            self._arm()
            if (duration_s := fault.number("duration_s")) > 0:
                self._loop.call_later(duration_s, self.lift_faults)
