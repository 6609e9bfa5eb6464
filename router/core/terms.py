"""Which streams can be continued on another worker, and what a continuation must keep of their requests. Pure.

A stream goes on from token ids. That is exact where the next token depends on the ids before it and on nothing else
that the first engine held: a grammar's state, a seeded generator, counts of earlier output (penalties), a second answer
(n > 1), a parser in the middle of a tool call. A field that is not known here may be any of those: it bars too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENGINES_WITH_IDS = frozenset(("vllm", "sim"))
"""Engines whose OpenAI routes give token ids (`return_token_ids`); vLLM from 0.10 on."""

_COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; engines keep it for completions, and have none for chats

# Handed to the resumed part as they are.
_SAMPLING = frozenset(
    (
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "logit_bias",
        "allowed_token_ids",
        "user",
        "priority",
        "cache_salt",
    )
)
# Replaced in the resumed part, or done with once the prompt's ids are known.
_SPENT = frozenset(
    (
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "include_stop_str_in_output",
        "return_token_ids",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "truncate_prompt_tokens",
        "documents",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "include_reasoning",
        "return_tokens_as_token_ids",
    )
)
# Values that say no more than the field's absence. Null says nothing anywhere.
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "suffix": ("",),
    "reasoning_effort": ("none",),
    "bad_words": ([],),
}


@dataclass(frozen=True, slots=True)
class Terms:
    """What a continuation must keep. `exact`: greedy, so that the joined text is the undisturbed one."""

    chat: bool
    sampling: Mapping[str, Any]
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool
    usage: bool
    usage_each: bool
    ids_visible: bool
    """The client asked for token ids itself."""
    exact: bool

    lag: int = 0
    """Characters by which the engine's text stays behind its tokens, so that a stop string is never shown in part."""
    foresees: bool = False
    """The simulated engine knows its answer beforehand: it holds back only what a stop string will take."""


def terms(chat: bool, body: Mapping[str, Any], engine: str) -> Terms | str:
    """The terms of a streamed request; or, in a few words, why its stream cannot be continued."""
    if engine not in ENGINES_WITH_IDS:
        return f"the engine {engine or 'of this pool'} gives no token ids"
    for name, value in body.items():
        if value is None or name in _SAMPLING or name in _SPENT:
            continue
        if not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())):
            return f"{str(name)[:64]} is set"
    if not (_text_only(body.get("messages")) if chat else _one_prompt(body.get("prompt"))):
        return "the input is not one text"
    asked = body.get("max_completion_tokens") if chat else None
    asked = asked if asked is not None else body.get("max_tokens")
    if asked is None and not chat:
        asked = _COMPLETIONS_MAX_TOKENS
    minimum = body.get("min_tokens") or 0
    stops = body.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    include_stop = bool(body.get("include_stop_str_in_output"))
    options = body.get("stream_options") or {}
    if (
        not (asked is None or type(asked) is int)
        or type(minimum) is not int
        or not isinstance(stops, list | tuple)
        or not all(isinstance(stop, str) and stop for stop in stops)
        or not isinstance(options, Mapping)
    ):
        return "a field has an unusual value"
    return Terms(
        chat=chat,
        sampling={name: value for name, value in body.items() if name in _SAMPLING and value is not None},
        max_tokens=asked,
        min_tokens=minimum,
        stops=tuple(stops),
        include_stop=include_stop,
        usage=bool(options.get("include_usage")),
        usage_each=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        ids_visible=bool(body.get("return_token_ids")),
        exact=body.get("temperature") == 0,
        lag=0 if include_stop else max((len(stop) for stop in stops), default=1) - 1,
        foresees=engine == "sim",
    )


def _text_only(messages: object) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else 0
        if isinstance(content, list):
            if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
                return False
        elif content is not None and not isinstance(content, str):
            return False
    return True


def _one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return bool(prompt) and all(type(token_id) is int for token_id in prompt)
    return isinstance(prompt, str)
