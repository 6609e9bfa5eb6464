"""The modelled engine against the sim engine's own model, token by token."""

import random

import pytest

from nodeagent.engines.sim.batching import Batch, Timing
from nodeagent.engines.sim.batching import Sequence as Stepped
from simulator.agenda import Agenda
from simulator.engine import Engine, Sequence
from simulator.performance import Constants


class Sink:
    """Hears of tokens and keeps nothing."""

    def first_token(self, sequence: Sequence, at: float) -> None: ...

    def finished(self, sequence: Sequence, at: float) -> None: ...


def stepped(timing: Timing, load: list[tuple[float, int, int]]) -> list[tuple[float | None, float | None]]:
    """Times of first and last tokens by the model that goes step by step."""
    batch = Batch(timing, max_catch_up_s=1e9)
    sequences = []
    pending = sorted(load)
    while pending or batch.next_at() is not None:
        due = batch.next_at()
        if pending and (due is None or pending[0][0] < due):
            at, prompt, wanted = pending.pop(0)
            sequence = Stepped(prompt, wanted, at)
            sequences.append(sequence)
            batch.submit(sequence, at)
        else:
            assert due is not None
            batch.advance(due)
    return [(s.first_token_at, s.last_token_at) for s in sequences]


def closed_form(timing: Timing, load: list[tuple[float, int, int]]) -> tuple[list[Sequence], Agenda]:
    agenda = Agenda()
    engine = Engine(agenda, Constants(timing))
    sequences = []
    for at, prompt, wanted in sorted(load):
        sequence = Sequence(prompt, wanted, Sink())
        sequences.append(sequence)
        agenda.at(at, engine.submit, sequence)
    agenda.run_until(1e6)
    assert engine.idle
    assert engine.kv_tokens == 0
    return sequences, agenda


@pytest.mark.parametrize("seed", range(12))
def test_closed_form_equals_step_by_step(seed: int) -> None:
    """SM1: no token comes earlier or later than in the model that goes token by token, at a fraction of its events."""
    rng = random.Random(seed)
    timing = Timing(
        max_num_seqs=rng.choice((2, 8, 256)), max_num_batched_tokens=rng.choice((512, 2048, 8192)), kv_blocks=10**6
    )
    at, load = 0.0, []
    for _ in range(80):
        at += rng.expovariate(rng.choice((0.5, 5.0, 40.0)))
        load.append((at, rng.randint(1, 4000), rng.choice((1, 2, rng.randint(1, 400)))))
    expected = stepped(timing, load)
    found, agenda = closed_form(timing, load)
    for (first_at, last_at), sequence in zip(expected, found, strict=True):
        assert sequence.first_at == pytest.approx(first_at, abs=1e-6)
        assert sequence.last_at == pytest.approx(last_at, abs=1e-6)
    assert agenda.calls_total < sum(wanted for _, _, wanted in load) / 5


def test_memory_runs_out() -> None:
    """The youngest is computed again; everyone ends with all its tokens, and nothing is left behind."""
    timing = Timing(kv_blocks=64, block_size=16)
    load = [(0.1 * number, 300, 200) for number in range(6)]
    found, _ = closed_form(timing, load)
    assert all(sequence.produced == 200 for sequence in found)
    lone = closed_form(timing, load[:1])[0][0]
    assert found[-1].last_at is not None
    assert lone.last_at is not None
    assert found[-1].last_at > lone.last_at


def test_abort_frees_at_once() -> None:
    agenda = Agenda()
    engine = Engine(agenda, Constants(Timing()))
    sequences = [Sequence(100, 1000, Sink()) for _ in range(4)]
    for sequence in sequences:
        engine.submit(sequence)
    agenda.run_until(2.0)
    assert 0 < engine.produced_by(sequences[0]) < 1000
    for sequence in sequences:
        engine.abort(sequence)
    assert engine.idle
    agenda.run_until(10.0)
    assert engine.kv_tokens == 0
