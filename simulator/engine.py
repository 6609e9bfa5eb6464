"""A modelled engine: continuous batching whose decode advances in closed form between changes of the batch.

The rules are those of nodeagent.engines.sim.batching: a step decodes one token for every running sequence and prefills
waiting ones within a token budget; it lasts `base + per_request * sequences + prefill_tokens / rate`. While nothing
joins or leaves, all steps last the same, so that thousands of tokens cost one event; a test holds both models together.
Deviations: KV memory is counted in tokens, not in blocks.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil
from typing import Protocol

from nodeagent.engines.sim.batching import Timing
from simulator.agenda import Agenda
from simulator.performance import Performance

_HAIR = 1e-9


class Owner(Protocol):
    """Who is told about a sequence."""

    def first_token(self, sequence: "Sequence", at: float) -> None: ...

    def finished(self, sequence: "Sequence", at: float) -> None: ...


class Sequence:
    """One request in an engine. With `computed`, its KV cache is there already (a transfer): it decodes at once."""

    __slots__ = (
        "computed",
        "finish_step",
        "first_at",
        "gone",
        "last_at",
        "left",
        "number",
        "owner",
        "produced",
        "prompt",
        "scheduled_at",
        "step",
        "tag",
        "wanted",
    )

    def __init__(self, prompt: int, wanted: int, owner: Owner, tag: object = None, *, computed: bool = False) -> None:
        self.prompt = prompt
        self.wanted = wanted
        self.owner = owner
        self.tag = tag
        self.produced = 1 if computed else 0
        self.computed = computed
        self.left = 0 if computed else prompt
        self.number = 0
        self.finish_step = 0
        self.step = 0  # the engine's step at which `produced` was true
        self.gone = False
        self.scheduled_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None


class Engine:
    """One engine's batch on the agenda."""

    def __init__(self, agenda: Agenda, performance: Performance) -> None:
        self.agenda = agenda
        self.performance = performance
        self.timing: Timing = performance.timing
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: dict[int, Sequence] = {}
        self.kv_tokens = 0
        self.steps_total = 0
        self.busy_s = 0.0
        self.preemptions = 0
        self.generation_tokens_total = 0
        self.prompt_tokens_total = 0
        self.slowdown = 1.0
        self.hung = False
        self._kv_limit = self.timing.kv_blocks * self.timing.block_size
        self._ends: list[tuple[int, int, Sequence]] = []
        self._number = 0
        self._version = 0
        self._chunks: list[tuple[Sequence, int]] = []
        self._run_from: float | None = None  # a run of equal decode steps is under way
        self._run_step_s = 0.0
        self._run_steps = 0
        self._in_step = False

    # ------------------------------------------------------------ requests

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding)

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def kv_use(self) -> float:
        """Share of the KV memory in use, 0..1, as of the last change of the batch."""
        return min(1.0, self.kv_tokens / self._kv_limit)

    def figures(self) -> tuple[int, int, int, int]:
        """Running and waiting sequences, tokens generated since the start, tokens whose KV cache is kept."""
        running = len(self.prefilling) + len(self.decoding)
        return running, len(self.waiting), self.generation_tokens_total, self.kv_tokens

    def submit(self, sequence: Sequence) -> None:
        self._number += 1
        sequence.number = self._number
        self.waiting.append(sequence)
        if self._run_from is not None:
            self._cut()
        elif not self._in_step:
            self._plan()

    def abort(self, sequence: Sequence) -> None:
        """Forgets a sequence; its memory is free at once."""
        if sequence.gone:
            return
        sequence.gone = True
        if sequence.number in self.decoding:
            self.kv_tokens -= sequence.prompt + sequence.produced + self.steps_total - sequence.step
            sequence.produced = self.produced_by(sequence)
            del self.decoding[sequence.number]
            if self._run_from is not None:
                self._cut()
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
            self.kv_tokens -= sequence.prompt + sequence.produced
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def halt(self) -> None:
        """Nothing happens any more: the process is gone or hangs."""
        self.hung = True
        self._version += 1
        self._run_from = None

    def produced_by(self, sequence: Sequence) -> int:
        """Tokens of a sequence that have left the engine by now."""
        if sequence.number not in self.decoding:
            return sequence.produced
        return sequence.produced + self._steps_done() - sequence.step

    # ------------------------------------------------------------ steps

    def _steps_done(self) -> int:
        if self._run_from is None:
            return self.steps_total
        done = int((self.agenda.now - self._run_from) / self._run_step_s + _HAIR)
        return self.steps_total + min(done, self._run_steps)

    def _cut(self) -> None:
        """The run of equal steps ends with the step under way."""
        assert self._run_from is not None
        passed = (self.agenda.now - self._run_from) / self._run_step_s
        steps = max(1, ceil(passed - _HAIR))
        if steps < self._run_steps:
            self._run_steps = steps
            self._schedule(self._run_from + steps * self._run_step_s, self._end_run)

    def _schedule(self, at: float, call: Callable[[int], None]) -> None:
        self._version += 1
        self.agenda.at(at, call, self._version)

    def _plan(self) -> None:
        self._run_from = None
        if self.hung:
            return
        self._make_room()
        self._chunks = self._choose_chunks() if self.waiting or self.prefilling else []
        timing, decoding = self.timing, len(self.decoding)
        if self._chunks:
            tokens = sum(count for _, count in self._chunks)
            seconds = self.performance.step_s(decoding + len(self._chunks), tokens) * self.slowdown
            self._in_step = True
            self.busy_s += seconds
            self._schedule(self.agenda.now + seconds, self._end_mixed)
        elif decoding:
            self._run_step_s = self.performance.step_s(decoding, 0) * self.slowdown
            self._run_steps = self._next_end() - self.steps_total
            room = (self._kv_limit - self.kv_tokens) // decoding
            if timing.kv_blocks and room < self._run_steps:
                self._run_steps = max(1, room)
            self._run_from = self.agenda.now
            self._schedule(self.agenda.now + self._run_steps * self._run_step_s, self._end_run)

    def _choose_chunks(self) -> list[tuple[Sequence, int]]:
        """Who prefills how much in the next step; takes sequences out of the queue while budget and memory last."""
        budget = self.timing.max_num_batched_tokens - len(self.decoding)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.prefilling:
            tokens = min(sequence.left, budget)
            if tokens > 0:
                budget -= tokens
                chunks.append((sequence, tokens))
        while self.waiting and self.running < self.timing.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            needed = sequence.prompt + sequence.produced
            if self.kv_tokens + needed + 1 > self._kv_limit and self.running:
                break
            self.waiting.popleft()
            self.kv_tokens += needed
            if sequence.scheduled_at is None:
                sequence.scheduled_at = self.agenda.now
            if sequence.left <= 0:
                budget -= 1
                self._join(sequence)
                continue
            self.prefilling.append(sequence)
            tokens = min(sequence.left, budget)
            budget -= tokens
            chunks.append((sequence, tokens))
        return chunks

    def _join(self, sequence: Sequence) -> None:
        """A sequence whose prompt is computed decodes from the next step on."""
        sequence.step = self.steps_total
        sequence.finish_step = self.steps_total + sequence.wanted - sequence.produced
        self.decoding[sequence.number] = sequence
        heappush(self._ends, (sequence.finish_step, sequence.number, sequence))

    def _next_end(self) -> int:
        ends = self._ends
        while ends[0][2].number not in self.decoding or ends[0][2].finish_step != ends[0][0]:
            heappop(ends)
        return ends[0][0]

    def _end_mixed(self, version: int) -> None:
        if version != self._version or self.hung:
            return
        self._in_step = False
        chunks, self._chunks = self._chunks, []
        self._count_steps(1)
        done = self._pop_finished()
        fresh = [sequence for sequence, tokens in chunks if not sequence.gone and self._prefill(sequence, tokens)]
        self._plan_then_tell(done, fresh)

    def _prefill(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the prompt is computed now, which gives the next token."""
        sequence.left -= tokens
        if sequence.left > 0:
            return False
        self.prefilling.remove(sequence)
        if not sequence.produced:
            self.prompt_tokens_total += sequence.prompt
        sequence.produced += 1
        self.kv_tokens += 1
        self.generation_tokens_total += 1
        return True

    def _end_run(self, version: int) -> None:
        if version != self._version or self.hung:
            return
        self.busy_s += self._run_steps * self._run_step_s
        self._count_steps(self._run_steps)
        self._run_from = None
        self._plan_then_tell(self._pop_finished(), [])

    def _count_steps(self, steps: int) -> None:
        self.steps_total += steps
        self.kv_tokens += steps * len(self.decoding)
        self.generation_tokens_total += steps * len(self.decoding)

    def _pop_finished(self) -> list[Sequence]:
        done: list[Sequence] = []
        while self._ends and self._ends[0][0] <= self.steps_total:
            end, number, sequence = heappop(self._ends)
            if number in self.decoding and sequence.finish_step == end:
                del self.decoding[number]
                self.kv_tokens -= sequence.prompt + sequence.wanted
                sequence.produced = sequence.wanted
                done.append(sequence)
        return done

    def _plan_then_tell(self, done: list[Sequence], fresh: list[Sequence]) -> None:
        """The next step is chosen before anyone hears of the last one: what they send takes the step after it."""
        at = self.agenda.now
        for sequence in fresh:
            if sequence.produced >= sequence.wanted:
                self.kv_tokens -= sequence.prompt + sequence.produced
            else:
                self._join(sequence)
        self._plan()
        for sequence in fresh:
            if sequence.first_at is None and not sequence.gone:
                sequence.first_at = at
                sequence.owner.first_token(sequence, at)
            if sequence.produced >= sequence.wanted and not sequence.gone:
                self._finish(sequence, at)
        for sequence in done:
            if not sequence.gone:  # what others heard may have ended it
                self._finish(sequence, at)

    def _finish(self, sequence: Sequence, at: float) -> None:
        sequence.gone = True
        sequence.last_at = at
        sequence.owner.finished(sequence, at)

    def _make_room(self) -> None:
        """Out of KV memory: the youngest sequence is put back and computed again later."""
        while self.decoding and self.kv_tokens + len(self.decoding) > self._kv_limit:
            if len(self.decoding) == 1 and not self.prefilling:
                return  # alone it may use what there is
            number = next(reversed(self.decoding))
            sequence = self.decoding.pop(number)
            sequence.produced += self.steps_total - sequence.step
            self.kv_tokens -= sequence.prompt + sequence.produced
            sequence.left = sequence.prompt + sequence.produced
            self.waiting.appendleft(sequence)
            self.preemptions += 1
