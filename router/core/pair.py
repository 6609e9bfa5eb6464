"""Prefill and decode pairs: which requests are served by two workers, what each is asked, who is at fault. Pure.

The protocol is vLLM's: the prefill worker computes the prompt, keeps its KV and says where it is
(`kv_transfer_params`); the decode worker is given that, unread, fetches the KV and streams the answer.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from router.core.seat import Seat
from springtide.dataplane.messages import OutcomeKind
from springtide.model.enums import Role
from springtide.model.routing import RoutedPool

ENGINES = frozenset(("vllm", "sim"))
"""Those that speak it."""
TARGETS = frozenset(("/v1/chat/completions", "/v1/completions"))
MOST_LOSSES = 3
"""After so many lost partners a request is computed by its decode worker alone."""
_FIELD = "kv_transfer_params"
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What asks for numbers of the prompt that only a worker has which computed it, or for several answers at once.
_WHOLE = ("echo", "prompt_logprobs", "use_beam_search")
# Of the answer, which the prefill worker does not give.
_ANSWERS = frozenset(
    ("stream", "stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids", "max_completion_tokens")
)
_SHORT_PAUSE_S = 0.5
"""A worker that is full, starting or paused is asked again within it; a longer one is as good as gone."""


def partners(pools: Mapping[str, RoutedPool], by_model: Mapping[str, Mapping[Role, str]]) -> dict[str, str]:
    """The prefill pool of each decode pool: of models that have both, no mixed one, and engines that speak it."""
    found = {}
    for by_role in by_model.values():
        prefill, decode = by_role.get(Role.PREFILL), by_role.get(Role.DECODE)
        if prefill is None or decode is None or Role.MIXED in by_role:
            continue
        if pools[prefill].engine == pools[decode].engine and pools[decode].engine in ENGINES:
            found[decode] = prefill
    return found


def pairable(body: Mapping[str, Any]) -> bool:
    """Whether two workers may share this OpenAI request."""
    if body.get(_FIELD) is not None or body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return False  # several prompts at once
    return all(body.get(name) is None or body[name] is False for name in _WHOLE)  # a 0 asks for something


def prefill_body(body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """What the prefill worker is asked: the same prompt, one token, no stream."""
    asked = {name: value for name, value in body.items() if name not in _ANSWERS}
    asked |= {"stream": False, "max_tokens": 1, _FIELD: _ASKED}
    if chat:
        asked["max_completion_tokens"] = 1
    return asked


def transfer(answer: bytes) -> dict[str, Any] | None:
    """Where the KV is, by the prefill worker's answer; None where it does not say, as an engine without a connector."""
    try:
        params = orjson.loads(answer)[_FIELD]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def decode_body(raw: bytes, params: Mapping[str, Any]) -> bytes:
    """The client's request, with where the KV is; not written anew where that can be helped."""
    raw = raw.strip()
    if b'"kv_transfer_params"' in raw or raw == b"{}":
        return orjson.dumps({**orjson.loads(raw), _FIELD: params})
    return raw[:-1] + b',"kv_transfer_params":' + orjson.dumps(params) + b"}"


def hopeful(seats: Sequence[Seat], excluded: Collection[tuple[str, int]], weight_version: str, now: float) -> bool:
    """Whether one of these prefill workers may take the request, now or as soon as it has room."""
    return any(
        seat.id not in excluded
        and seat.worker.weight_version == weight_version
        and seat.breaker.admits(now)
        and seat.blocked_until <= now + _SHORT_PAUSE_S
        for seat in seats
    )


def doubtful(kind: OutcomeKind, fault: str, timeout: str) -> bool:
    """An attempt of a decode worker that was given KV ended before its first token: whether the partner may be why.

    `fault`: what the shim says of its engine. A decode worker that is dead is its own fault; one that answers an error,
    or nothing, may not have got the KV.
    """
    if kind is OutcomeKind.TIMEOUT:
        return timeout in ("first_byte", "total")
    return kind in (OutcomeKind.ERROR_STATUS, OutcomeKind.UPSTREAM_ERROR_EVENT) and not fault
