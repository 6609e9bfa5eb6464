"""The timing model by itself: pure, so time is what the test says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.sim.batching import Batch, Sequence, Timing

TIMING = Timing(
    prefill_tokens_per_s=1000.0,
    decode_base_s=0.010,
    decode_per_request_s=0.001,
    max_num_seqs=4,
    max_num_batched_tokens=100,
    kv_blocks=64,
    block_size=16,
)


def run(batch: Batch, until: float = 1e9) -> list[tuple[float, list[Sequence]]]:
    """Advance step by step: when, and who gained tokens."""
    steps = []
    while (at := batch.next_at()) is not None and at <= until:
        gained = batch.advance(at)
        if gained:
            steps.append((at, gained))
    return steps


def test_one_request_takes_prefill_then_one_step_per_token() -> None:
    batch = Batch(TIMING)
    batch.submit(Sequence(50, 3, 0.0), 0.0)
    times = [at for at, _ in run(batch)]
    assert times == pytest.approx([0.061, 0.072, 0.083])
    assert (batch.running, batch.used_blocks, batch.generation_tokens_total) == ([], 0, 3)


def test_a_step_serves_all_running_requests_at_once() -> None:
    batch = Batch(TIMING)
    wanted = [Sequence(1, 5, 0.0) for _ in range(3)]
    for sequence in wanted:
        batch.submit(sequence, 0.0)
    steps = run(batch)
    # the first found an idle engine and started alone; from the second step on all three share each step
    assert [len(gained) for _, gained in steps] == [1, 3, 3, 3, 3, 2]
    assert steps[2][0] - steps[1][0] == pytest.approx(0.013)


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    batch = Batch(TIMING)
    batch.submit(Sequence(250, 1, 0.0), 0.0)
    (first,) = run(batch)
    assert first[0] == pytest.approx(3 * 0.011 + 0.250)
    assert batch.steps_total == 3


def test_requests_above_the_running_limit_wait_in_order() -> None:
    batch = Batch(TIMING)
    sequences = [Sequence(1, 2 + at, 0.0) for at in range(6)]
    for sequence in sequences:
        batch.submit(sequence, 0.0)
    batch.advance(batch.next_at() or 0.0)
    assert [sequence.running for sequence in sequences] == [True] * 4 + [False] * 2
    run(batch)
    starts = [sequence.scheduled_at or 0.0 for sequence in sequences]
    assert starts == sorted(starts)


def test_requests_wait_for_kv_blocks() -> None:
    batch = Batch(TIMING)
    big = Sequence(60 * 16, 4, 0.0)
    small = Sequence(8 * 16, 4, 0.0)
    batch.submit(big, 0.0)
    batch.submit(small, 0.0)
    run(batch, until=big.arrived_at + 0.5)
    assert not small.running
    assert batch.kv_use() == pytest.approx(61 / 64)
    run(batch)
    assert big.done
    assert small.done
    assert (small.scheduled_at or 0.0) >= (big.last_token_at or 0.0)


def test_growth_beyond_the_cache_preempts_the_youngest_and_loses_nothing() -> None:
    batch = Batch(TIMING)
    old, young = Sequence(31 * 16, 40, 0.0), Sequence(31 * 16, 40, 0.0)
    batch.submit(old, 0.0)
    batch.submit(young, 0.0)
    run(batch)
    assert batch.preemptions > 0
    assert old.done
    assert young.done
    assert (old.last_token_at or 0.0) < (young.last_token_at or 0.0)
    assert batch.generation_tokens_total == 80
    assert batch.prompt_tokens_total == 2 * 31 * 16


def test_abort_frees_blocks_at_once() -> None:
    batch = Batch(TIMING)
    running, waiting = Sequence(60 * 16, 40, 0.0), Sequence(60 * 16, 1, 0.0)
    batch.submit(running, 0.0)
    batch.submit(waiting, 0.0)
    batch.abort(running)
    batch.abort(running)
    assert batch.used_blocks == 0
    run(batch)
    assert waiting.done
    assert not running.done


def test_hold_freezes_and_release_goes_on() -> None:
    batch = Batch(TIMING)
    sequence = Sequence(1, 3, 0.0)
    batch.submit(sequence, 0.0)
    batch.advance(0.0125)
    batch.hold()
    assert batch.next_at() is None
    assert batch.advance(100.0) == []
    batch.release(100.0)
    assert [at for at, _ in run(batch)] == pytest.approx([100.011, 100.022])


def test_a_late_caller_catches_up_but_never_floods() -> None:
    batch = Batch(TIMING, max_catch_up_s=0.25)
    sequence = Sequence(1, 1000, 0.0)
    batch.submit(sequence, 0.0)
    batch.advance(0.1)
    before = sequence.produced
    assert before == 9
    batch.advance(60.0)
    assert sequence.produced - before <= 0.25 / 0.011 + 2


def test_scale_and_slowdown_multiply_time() -> None:
    fast = Batch(Timing(scale=0.1))
    slow = Batch(Timing(), slowdown=3.0)
    for batch in (fast, slow):
        batch.submit(Sequence(8, 1, 0.0), 0.0)
    assert slow.next_at() == pytest.approx(30 * (fast.next_at() or 0.0))


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 60), st.floats(0, 2), st.booleans()), min_size=1, max_size=12
    )
)
def test_every_request_gets_exactly_its_tokens_and_blocks_balance(
    plan: list[tuple[int, int, float, bool]],
) -> None:
    """Whatever arrives and leaves: nothing is lost, nothing leaks, nothing runs above the limits."""
    batch = Batch(TIMING)
    sequences = []
    for prompt, wanted, at, aborted in sorted(plan, key=lambda entry: entry[2]):
        run(batch, until=at)
        sequence = Sequence(prompt, wanted, at)
        batch.submit(sequence, at)
        sequences.append((sequence, aborted))
        if aborted:
            batch.abort(sequence)
        assert len(batch.running) <= TIMING.max_num_seqs
        assert 0 <= batch.used_blocks <= TIMING.kv_blocks
    run(batch)
    for sequence, aborted in sequences:
        assert sequence.produced == (0 if aborted else sequence.wanted)
    assert (batch.used_blocks, len(batch.waiting), len(batch.running)) == (0, 0, 0)
