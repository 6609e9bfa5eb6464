"""What is read of a request: headers and body, right and wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.want import NO_NEEDS, Needs, prompt_bytes, read_want
from springtide.errors import InvalidArgument
from springtide.model.enums import Role


def test_without_anything_it_is_the_usual() -> None:
    want = read_want({})
    assert (want.priority, want.deadline_s, want.session, want.role) == (5, None, "", None)
    assert want.needs is NO_NEEDS
    assert want.output_tokens is None
    assert want.chunks(64) == ()


def test_headers() -> None:
    want = read_want(
        {
            b"x-priority": b"9",
            b"x-deadline-ms": b"1500",
            b"x-session-id": b"conversation 7",
            b"x-require-labels": b"zone=a, gpu=h100,zone=a",
            b"x-min-weight-version": b"step-3",
            b"x-role": b"prefill",
        },
        {"user": "somebody"},
        request_id="r",
    )
    assert (want.priority, want.deadline_s, want.session, want.role) == (9, 1.5, "conversation 7", Role.PREFILL)
    assert want.needs == Needs((("gpu", "h100"), ("zone", "a")), "step-3")
    assert want.request_id == "r"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-priority", b"10"),
        (b"x-priority", b"-1"),
        (b"x-priority", b"high"),
        (b"x-priority", "٣".encode()),
        (b"x-deadline-ms", b"1.5"),
        (b"x-deadline-ms", b"99999999999999999999"),
        (b"x-require-labels", b"zone"),
        (b"x-require-labels", b"zone=a b"),
        (b"x-require-labels", b",".join(b"k%d=v" % i for i in range(17))),
        (b"x-session-id", b"a\x00b"),
        (b"x-session-id", b"x" * 257),
        (b"x-min-weight-version", b"\xff"),
        (b"x-role", b"both"),
    ],
)
def test_a_wrong_header_is_named(name: bytes, value: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_want({name: value})
    assert caught.value.field == name.decode()


@given(st.binary(max_size=40), st.sampled_from([b"x-priority", b"x-require-labels", b"x-session-id", b"x-role"]))
def test_any_bytes_are_read_or_refused(value: bytes, name: bytes) -> None:
    try:
        read_want({name: value})
    except InvalidArgument as error:
        named = error.field
    else:
        named = name.decode()
    assert named == name.decode()


def test_the_user_of_the_body_is_a_session() -> None:
    assert read_want({}, {"user": "u1"}).session == "u1"
    assert read_want({}, {"user": {"not": "text"}}).session == ""


def test_prompt_and_answer_sizes() -> None:
    want = read_want({}, {"prompt": "x" * 4000, "max_tokens": 7}, 4040)
    assert (want.prompt_tokens, want.output_tokens) == (1010, 7)
    assert read_want({}, {"prompt": [5] * 300}, 900).prompt_tokens == 300
    assert read_want({}, {"max_tokens": 9, "max_completion_tokens": 3}).output_tokens == 3
    assert read_want({}, {"max_tokens": "many"}).output_tokens is None
    assert read_want({}, {"max_tokens": True}).output_tokens is None


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    """RT13: the next turn's chunks begin with all whole chunks of the last one's."""
    turn = [{"role": "system", "content": "You help. " * 50}, {"role": "user", "content": "And?"}]
    more = [*turn, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Then?"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    a, b = (read_want({}, {"messages": m, "tools": tools}) for m in (turn, more))
    assert len(a.chunks(64)) >= 8
    assert b.chunks(64)[: len(a.chunks(64))] == a.chunks(64)
    other = read_want({}, {"messages": turn, "tools": [{**tools[0], "x": 1}]})
    assert not set(other.chunks(256)) & set(a.chunks(256))


def test_no_more_of_a_huge_prompt_is_written_than_anybody_looks_at() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 300_000}}]}
    many = prompt_bytes({"messages": [{"role": "system", "content": "s" * 999}, *[image] * 50]})
    assert 300_000 < len(many) < 700_000
    assert len(prompt_bytes({"prompt": "y" * 5_000_000})) < 700_000
    assert prompt_bytes({"prompt": [1, 2]}) == b"[1,2]"


@given(st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=9), st.lists, max_leaves=5))
def test_any_body_has_prompt_bytes(value: object) -> None:
    for key in ("messages", "prompt", "input", "tools"):
        assert isinstance(prompt_bytes({key: value}), bytes)
