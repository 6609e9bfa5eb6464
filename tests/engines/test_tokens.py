"""What the simulated engine answers is a pure function, and continuation from ids is exact or shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.sim.tokens import (
    EOS_ID,
    Answer,
    UnknownTokenId,
    answer_ids,
    answer_text,
    answer_tokens,
    count_tokens,
    decode,
    encode,
    render_chat,
)

PROMPTS = st.text(min_size=1, max_size=60)
COUNTS = st.integers(0, 80)


@given(PROMPTS)
def test_text_survives_encoding(prompt: str) -> None:
    assert decode(encode(prompt)) == prompt.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert len(encode(prompt)) == count_tokens(prompt)


@given(PROMPTS, COUNTS, COUNTS)
def test_token_depends_on_prompt_and_index_alone(prompt: str, start: int, n: int) -> None:
    whole = answer_tokens(prompt, start + n)
    assert answer_tokens(prompt, n, start) == whole[start:]
    assert answer_text(prompt, start + n) == "".join(whole) == decode(answer_ids(prompt, start + n))


@given(PROMPTS, COUNTS)
def test_a_prompt_as_ids_is_answered_like_its_text(prompt: str, n: int) -> None:
    assert answer_ids(encode(prompt), n) == answer_ids(prompt, n)


@given(PROMPTS, COUNTS, COUNTS)
def test_continuation_from_ids_is_exact(prompt: str, k: int, n: int) -> None:
    """Groundwork for continuing a stream elsewhere (DESIGN rule 6)."""
    continued = [*encode(prompt), *answer_ids(prompt, k)]
    assert answer_ids(continued, n) == answer_ids(prompt, n, start=k)
    assert Answer(continued).offset == k


@given(PROMPTS, st.integers(2, 40), st.data())
def test_an_inexact_continuation_shows(prompt: str, k: int, data: st.DataObject) -> None:
    right = answer_ids(prompt, k)
    at = data.draw(st.integers(0, k - 2))
    lost = right[:at] + right[at + 1 :]
    doubled = [*right[: at + 1], *right[at:]]
    swapped = [*right[:at], right[at + 1], right[at], *right[at + 2 :]]
    following = answer_ids(prompt, 8, start=k)
    for wrong in (lost, doubled, swapped):
        if wrong != right:
            assert answer_ids([*encode(prompt), *wrong], 8) != following
    # as text, what was produced is part of a new prompt
    assert answer_ids(prompt + decode(right), 8) != following


def test_known_answer_stays_the_same() -> None:
    """Recorded answers of earlier versions stay valid."""
    assert answer_text("hello", 3) == "wa2617 w0d91b w37771 "


def test_ids_out_of_vocabulary_are_named() -> None:
    with pytest.raises(UnknownTokenId) as caught:
        Answer([*encode("x"), 0x7000_0000])
    assert caught.value.token_id == 0x7000_0000
    assert decode([EOS_ID]) == ""


def test_chat_rendering_joins_parts_and_tells_roles_apart() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render_chat(parts) == render_chat([{"role": "user", "content": "ab"}]) == "<|user|>\nab\n<|assistant|>\n"
    assert render_chat([{"role": "system", "content": "ab"}]) != render_chat(parts)
