"""Waiting between attempts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.backoff import backoff_s, delay_s


@pytest.mark.parametrize(("attempt", "delay"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (1_000_000, 3.0)])
def test_delays_double_up_to_the_cap(attempt: int, delay: float) -> None:
    """NA13: the first is the first, a million failures are no longer than the cap."""
    assert delay_s(attempt, 0.5, 3.0) == delay


@given(st.integers(1, 100_000), st.floats(0.1, 60.0), st.integers(0, 2**32))
def test_backoff_is_capped_and_never_zero(attempt: int, cap_s: float, seed: int) -> None:
    """NA13: for ever, never longer than the cap, never all at the same moment."""
    found_s = backoff_s(attempt, 0.1, cap_s, random.Random(seed))
    assert 0.05 <= found_s <= cap_s
