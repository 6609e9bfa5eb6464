"""The pure part of prefill and decode pairs: which requests, what is asked, whom a failure may concern (F40)."""

import json
from typing import Any

import pytest

from router.core.pair import decode_body, doubtful, hopeful, pairable, partners, prefill_body, transfer
from router.core.seat import Seat
from springtide.dataplane import OutcomeKind
from springtide.model.enums import Role
from springtide.model.routing import RoutedPool
from tests.routing.world import worker

TOLD = {"do_remote_prefill": True, "remote_block_ids": [[0, 1]], "remote_port": 5600}


def pools(*roles: tuple[str, Role, str]) -> dict[str, str]:
    known = {name: RoutedPool(name, "m", engine=engine, role=role) for name, role, engine in roles}
    return partners(known, {"m": {role: name for name, role, _ in roles}})


def test_which_pools_are_partners() -> None:
    both = (("pre", Role.PREFILL, "vllm"), ("dec", Role.DECODE, "vllm"))
    assert pools(*both) == {"dec": "pre"}
    assert pools(*both, ("mix", Role.MIXED, "vllm")) == {}
    assert pools(*both[:1]) == pools(*both[1:]) == {}
    assert pools(("pre", Role.PREFILL, "sglang"), ("dec", Role.DECODE, "sglang")) == {}
    assert pools(("pre", Role.PREFILL, "sim"), ("dec", Role.DECODE, "vllm")) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"kv_transfer_params": {}},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"use_beam_search": True},
        {"prompt": ["one", "two"]},
        {"prompt": [[1], [2]]},
    ],
)
def test_what_one_worker_must_serve(fields: dict[str, Any]) -> None:
    assert not pairable({"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 1}, {"n": None, "echo": False, "kv_transfer_params": None}, {"prompt": [1, 2]}, {"prompt": ["one"]}],
)
def test_what_two_workers_may_share(fields: dict[str, Any]) -> None:
    assert pairable({"model": "m", "prompt": "x", **fields})


def test_the_prefill_is_the_same_prompt_for_one_token() -> None:
    body = {
        "messages": [1],
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "max_completion_tokens": 9,
        "return_token_ids": True,
        "tools": [2],
    }
    asked = prefill_body(body, chat=True)
    params = asked.pop("kv_transfer_params")
    assert asked == {"messages": [1], "tools": [2], "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert "max_completion_tokens" not in prefill_body({"prompt": "x"}, chat=False)
    assert "kv_transfer_params" not in body


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"nonsense", b'{"kv_transfer_params":null}'])
def test_an_answer_that_tells_of_no_kv(raw: bytes) -> None:
    assert transfer(raw) is None


def test_what_it_tells_goes_on_unread() -> None:
    assert transfer(json.dumps({"id": "x", "kv_transfer_params": TOLD}).encode()) == TOLD
    raw = b'{"model" : "m", "odd":  1}  \n'
    assert decode_body(raw, TOLD).startswith(b'{"model" : "m", "odd":  1,"kv_transfer_params":{')
    assert json.loads(decode_body(raw, TOLD)) == {"model": "m", "odd": 1, "kv_transfer_params": TOLD}
    for raw in (b'{"kv_transfer_params":null,"a":1}', b'{"a":1, "kv_transfer_params" : null}'):
        assert json.loads(decode_body(raw, TOLD)) == {"a": 1, "kv_transfer_params": TOLD}
    assert json.loads(decode_body(b"{}", TOLD)) == {"kv_transfer_params": TOLD}


def test_whom_to_wait_for() -> None:
    """A full worker frees; one that broke, drains, has other weights or failed this request is none."""
    seat = Seat(worker("p", max_in_flight=1), 0.0)
    assert hopeful([seat], (), "", 1.0)
    assert not hopeful([], (), "", 1.0)
    assert not hopeful([seat], [seat.id], "", 1.0)
    assert not hopeful([seat], (), "2", 1.0)
    seat.enter(1.0)
    assert hopeful([seat], (), "", 1.0)
    seat.refused("full", 1.0)
    assert hopeful([seat], (), "", 1.0)
    seat.refused("draining", 1.0)
    assert not hopeful([seat], (), "", 1.0)
    broken = Seat(worker("q"), 0.0)
    broken.failed(1.0)
    assert not hopeful([broken], (), "", 1.0)
    assert hopeful([broken], (), "", 9.0)


@pytest.mark.parametrize(
    ("kind", "fault", "timeout", "expected"),
    [
        (OutcomeKind.ERROR_STATUS, "", "", True),
        (OutcomeKind.UPSTREAM_ERROR_EVENT, "", "", True),
        (OutcomeKind.TIMEOUT, "", "first_byte", True),
        (OutcomeKind.TIMEOUT, "", "total", True),
        (OutcomeKind.TIMEOUT, "", "connect", False),
        (OutcomeKind.ERROR_STATUS, "upstream_eof", "", False),
        (OutcomeKind.UPSTREAM_ERROR_EVENT, "aborted", "", False),
        (OutcomeKind.UPSTREAM_EOF, "", "", False),
        (OutcomeKind.CONNECT_FAILED, "", "", False),
        (OutcomeKind.REFUSED, "", "", False),
        (OutcomeKind.CLIENT_GONE, "", "", False),
        (OutcomeKind.BAD_RESPONSE, "", "", False),
    ],
)
def test_whom_an_end_may_concern(kind: OutcomeKind, fault: str, timeout: str, expected: bool) -> None:
    """F40: a decode worker that is dead is its own fault."""
    assert doubtful(kind, fault, timeout) is expected
