"""The timing model of continuous batching, pure: sequences, steps and KV blocks, with `now` (float seconds) passed in.

A step decodes one token for every running sequence and prefills waiting ones within a token budget. It lasts
`base + per_request * sequences + prefill_tokens / prefill rate`, and everything that it produced appears at its end.
A sequence holds KV blocks for its tokens; when they run out, the youngest one is preempted and computed again later.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast the simulated engine is. `scale` multiplies every duration: 0.1 is ten times as fast."""

    prefill_tokens_per_s: float = 8000.0
    decode_base_s: float = 0.010
    decode_per_request_s: float = 0.0002
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_blocks: int = 4096
    block_size: int = 16
    scale: float = 1.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. `wanted` output tokens after `prompt_tokens`; `produced` grows by steps."""

    prompt_tokens: int
    wanted: int
    arrived_at: float
    owner: object = None
    produced: int = 0
    computed: int = 0
    """Before it is submitted: tokens of the prompt whose KV came from elsewhere; fewer than all."""
    blocks: int = 0
    running: bool = False
    gone: bool = False
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def done(self) -> bool:
        """All wanted tokens are produced."""
        return self.produced >= self.wanted


@dataclass(slots=True)
class Step:
    """One engine step in progress: who decodes, who prefills how much, and when it ends."""

    ends_at: float
    decoding: list[Sequence]
    prefilling: list[tuple[Sequence, int]]


@dataclass(slots=True)
class Batch:
    """The engine's scheduler. Call `submit`, `abort`, `hold`, `release`, then `advance(now)` at `next_at()`."""

    timing: Timing
    max_catch_up_s: float = 0.25
    slowdown: float = 1.0
    held: bool = False
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    used_blocks: int = 0
    preemptions: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    steps_total: int = 0
    _step: Step | None = None

    def submit(self, sequence: Sequence, now: float) -> None:
        """Put a sequence in the queue; it starts with the next step."""
        self.waiting.append(sequence)
        if self._step is None:
            self._plan(now)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence; its blocks are free at once."""
        if sequence.gone:
            return
        sequence.gone = True
        if sequence.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def hold(self) -> None:
        """Stop scheduling: what the current step would have produced is not produced."""
        self.held = True
        self._step = None

    def release(self, now: float) -> None:
        """Schedule again after `hold`."""
        if self.held:
            self.held = False
            self._plan(now)

    def next_at(self) -> float | None:
        """When the current step ends; None while there is nothing to do."""
        return None if self._step is None else self._step.ends_at

    def advance(self, now: float) -> list[Sequence]:
        """Finish every step that ended by `now`; the sequences that gained tokens, each once, in order.

        A caller that comes late catches up, at most `max_catch_up_s`: a stopped process does not emit a flood.
        """
        touched: dict[int, Sequence] = {}
        while self._step is not None and self._step.ends_at <= now:
            ended_at = self._step.ends_at
            for sequence in self._finish(self._step, ended_at):
                touched.setdefault(id(sequence), sequence)
            self._plan(max(ended_at, now - self.max_catch_up_s))
        return list(touched.values())

    def kv_use(self) -> float:
        """Share of KV blocks in use, 0..1."""
        return self.used_blocks / self.timing.kv_blocks

    def _finish(self, step: Step, at: float) -> list[Sequence]:
        self._step = None
        self.steps_total += 1
        gained: list[Sequence] = []
        for sequence in step.decoding:
            if not sequence.gone and sequence.running:
                sequence.computed += 1
                gained.append(sequence)
        for sequence, tokens in step.prefilling:
            if sequence.gone or not sequence.running:
                continue
            sequence.computed += tokens
            if sequence.computed >= sequence.prompt_tokens + sequence.produced:
                if sequence.produced == 0:
                    self.prompt_tokens_total += sequence.prompt_tokens
                gained.append(sequence)
        for sequence in gained:
            sequence.produced += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = at
            sequence.last_token_at = at
            if sequence.produced >= sequence.wanted:
                sequence.gone = True
                self._free(sequence)
        self.generation_tokens_total += len(gained)
        if any(sequence.gone for sequence in gained):
            self.running = [sequence for sequence in self.running if not sequence.gone]
        return gained

    def _plan(self, now: float) -> None:
        self._step = None
        if self.held:
            return
        budget = self.timing.max_num_batched_tokens
        preemptions = self.preemptions
        decoding: list[Sequence] = []
        prefilling: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            if not sequence.running:
                continue  # preempted for an older one in this very pass
            missing = sequence.prompt_tokens + sequence.produced - sequence.computed
            tokens = min(max(missing, 1), budget)
            if tokens == 0 or not self._make_room(sequence):
                continue
            budget -= tokens
            if sequence.produced and missing == 1:
                decoding.append(sequence)
            else:
                prefilling.append((sequence, tokens))
        prefilling = [entry for entry in prefilling if entry[0].running]
        decoding = [sequence for sequence in decoding if sequence.running]
        room = self.timing.max_num_seqs if self.preemptions == preemptions else 0
        while self.waiting and len(self.running) < room and budget > 0:
            sequence = self.waiting[0]
            if not self._reserve(sequence):
                break
            self.waiting.popleft()
            sequence.running = True
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
            self.running.append(sequence)
            tokens = min(sequence.prompt_tokens + sequence.produced - sequence.computed, budget)
            budget -= tokens
            prefilling.append((sequence, tokens))
        if decoding or prefilling:
            self._step = Step(now + self._duration(decoding, prefilling), decoding, prefilling)

    def _duration(self, decoding: list[Sequence], prefilling: list[tuple[Sequence, int]]) -> float:
        timing = self.timing
        prefill_s = sum(tokens for _, tokens in prefilling) / timing.prefill_tokens_per_s
        requests = len(decoding) + len(prefilling)
        seconds = timing.decode_base_s + timing.decode_per_request_s * requests + prefill_s
        return seconds * timing.scale * self.slowdown

    def _make_room(self, sequence: Sequence) -> bool:
        while not self._reserve(sequence):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _reserve(self, sequence: Sequence) -> bool:
        needed = -(-(sequence.prompt_tokens + sequence.produced + 1) // self.timing.block_size)
        more = needed - sequence.blocks
        if more > self.timing.kv_blocks - self.used_blocks:
            return False
        if more > 0:
            sequence.blocks += more
            self.used_blocks += more
        return True

    def _free(self, sequence: Sequence) -> None:
        self.used_blocks -= sequence.blocks
        sequence.blocks = 0
        sequence.running = False
