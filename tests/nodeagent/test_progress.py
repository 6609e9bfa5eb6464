"""Busy is not dead, and an answer to a probe is not work."""

from typing import Any

from nodeagent.core.progress import Facts, Progress


def _after(*steps: tuple[float, dict[str, Any]], held: bool = False) -> Progress:
    progress = Progress()
    for at, facts in steps:
        progress.note(at, Facts(**facts), held=held)
    return progress


BUSY = {"in_flight": 3, "counts_live": True, "generation_tokens": 100}


def test_work_that_goes_on_is_no_stall() -> None:
    progress = _after((0.0, BUSY), (30.0, {**BUSY, "generation_tokens": 101}))
    assert progress.moved
    assert progress.stalled_s(40.0) == 10.0


def test_requests_of_which_nothing_comes() -> None:
    progress = _after((0.0, BUSY), (30.0, BUSY), (60.0, BUSY))
    assert not progress.moved
    assert progress.stalled_s(60.0) == 60.0


def test_an_idle_engine_never_stalls() -> None:
    idle = {**BUSY, "in_flight": 0}
    assert _after((0.0, idle), (500.0, idle)).stalled_s(500.0) == 0.0


def test_a_stall_begins_with_the_work() -> None:
    idle = {**BUSY, "in_flight": 0}
    assert _after((0.0, idle), (500.0, idle), (510.0, BUSY)).stalled_s(520.0) == 20.0


def test_a_long_answer_of_an_engine_that_counts_at_the_end_is_no_stall() -> None:
    """SGLang's totals move when a request ends: only its event streams can be judged."""
    whole = {"in_flight": 1, "generation_tokens": 100}
    assert _after((0.0, whole), (900.0, whole)).stalled_s(900.0) == 0.0
    stream = {**whole, "streams": 1, "relayed_bytes": 500}
    assert _after((0.0, stream), (900.0, stream)).stalled_s(900.0) == 900.0
    assert _after((0.0, stream), (900.0, {**stream, "relayed_bytes": 600})).stalled_s(900.0) == 0.0


def test_a_long_prompt_shows_in_the_cache() -> None:
    """No token comes while a prompt is read, but the cache fills."""
    reading = {**BUSY, "kv_use": 0.25}
    assert _after((0.0, reading), (90.0, {**reading, "kv_use": 0.5})).stalled_s(90.0) == 0.0


def test_what_one_probe_could_not_learn_is_no_progress() -> None:
    """Metrics that fail are unknown, not changed."""
    unknown = {"in_flight": 3, "counts_live": True, "streams": 1}
    progress = _after((0.0, {**BUSY, "streams": 1}), (30.0, unknown))
    assert not progress.moved
    assert progress.stalled_s(30.0) == 30.0


def test_a_pause_on_purpose_is_no_stall() -> None:
    assert _after((0.0, BUSY), (300.0, BUSY), held=True).stalled_s(300.0) == 0.0
