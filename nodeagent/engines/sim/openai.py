"""Requests in OpenAI's shapes as vLLM takes them, checked and with their end already known. No I/O here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from nodeagent.engines.sim.tokens import Answer, Prompt, UnknownTokenId, encode, render_chat

WORD_CHARS = 7
NATURAL_LENGTH = 128
COMPLETIONS_MAX_TOKENS = 16


class ApiError(Exception):
    """A request that is refused; `body()` is the answer in vLLM's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, object]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400 as vLLM words its type."""
    return ApiError(400, "BadRequestError", message, param)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows: names it answers to, longest context, natural end of answers (see options)."""

    model_names: tuple[str, ...]
    max_model_len: int
    natural_length: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted generation request. `wanted` tokens, of whose text the first `clip` characters are sent."""

    request_id: str
    model: str
    chat: bool
    stream: bool
    usage: bool
    usage_each: bool
    token_ids: bool
    prompt: Prompt
    answer: Answer
    wanted: int
    clip: int
    finish_reason: str
    stop_reason: str | None
    kv: Mapping[str, Any] | None = None
    """`kv_transfer_params`."""

    def text(self, start: int, stop: int) -> str:
        """Text of tokens start..stop-1, without what a stop string cuts off."""
        text = "".join(self.answer.words(start, stop))
        return text[: max(0, self.clip - WORD_CHARS * start)]

    def prompt_ids(self) -> list[int]:
        """The prompt as ids, however it was given."""
        return encode(self.prompt) if isinstance(self.prompt, str) else list(self.prompt)


def parse_json(body: bytes) -> dict[str, Any]:
    """The request object; 400 when the body is none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "Bad Request", f"JSON decode error: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "Bad Request", "the body must be a JSON object")
    return value


def check_model(fields: Mapping[str, Any], limits: Limits) -> str:
    """The model that the request names (the first served one when it names none); 404 when it is not served."""
    model = fields.get("model")
    if model is None or model == "":
        return limits.model_names[0]
    if model not in limits.model_names:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    return str(model)


def parse_prompt(fields: Mapping[str, Any], chat: bool) -> Prompt:
    """The prompt: text, or token ids (completions only)."""
    if chat:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(entry, dict) for entry in messages):
            raise bad_request("messages must be a non-empty list of objects", "messages")
        return render_chat(messages)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise bad_request("the prompt must not be empty", "prompt")
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt):
        return prompt
    raise bad_request("prompt must be one text or one list of token ids", "prompt")


def parse_generation(fields: Mapping[str, Any], *, chat: bool, request_id: str, limits: Limits) -> Generation:
    """A whole generation request, with its end already known: answers are functions of the prompt."""
    model = check_model(fields, limits)
    if _whole(fields, "n", 1) != 1:
        raise bad_request("this engine supports n=1 only", "n")
    prompt = parse_prompt(fields, chat)
    try:
        answer = Answer(prompt)
    except UnknownTokenId as error:
        raise bad_request(str(error), "prompt") from None
    asked = _whole(fields, "max_completion_tokens", None) if chat else None
    asked = asked if asked is not None else _whole(fields, "max_tokens", None)
    room = limits.max_model_len - answer.prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise bad_request(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{asked or 1} output tokens and your prompt contains {answer.prompt_tokens} input tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens" if room < 1 else "max_tokens",
        )
    wanted, clip, finish_reason, stop_reason = _end(fields, answer, asked, room, chat, limits)
    kv = fields.get("kv_transfer_params")
    if kv is not None and not isinstance(kv, dict):
        raise bad_request("kv_transfer_params must be an object", "kv_transfer_params")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    return Generation(
        request_id=request_id,
        model=model,
        chat=chat,
        stream=bool(fields.get("stream")),
        usage=bool(options.get("include_usage")),
        usage_each=bool(options.get("continuous_usage_stats")),
        token_ids=bool(fields.get("return_token_ids")),
        prompt=prompt,
        answer=answer,
        wanted=wanted,
        clip=clip,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        kv=kv,
    )


def _end(
    fields: Mapping[str, Any], answer: Answer, asked: int | None, room: int, chat: bool, limits: Limits
) -> tuple[int, int, str, str | None]:
    if asked is not None and asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    limit = min(room, asked if asked is not None else room if chat else COMPLETIONS_MAX_TOKENS)
    minimum = _whole(fields, "min_tokens", 0) or 0
    if minimum < 0 or minimum > limit:
        raise bad_request(f"min_tokens must be between 0 and max_tokens={limit}, got {minimum}.", "min_tokens")
    wanted, reason, stop_reason = limit, "length", None
    natural = limits.natural_length or (NATURAL_LENGTH if asked is None else 0)
    if natural and not fields.get("ignore_eos"):
        left = max(natural - answer.offset, minimum, 1)
        if left <= limit:
            wanted, reason = left, "stop"
    clip = wanted * WORD_CHARS
    stops = fields.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise bad_request("stop must be a text or a list of texts", "stop")
    if stops:
        text = "".join(answer.words(0, wanted))
        ends = [(at + len(stop), at, stop) for stop in stops if (at := _find(text, stop, minimum)) >= 0]
        if ends:
            end, at, stop_reason = min(ends)
            wanted, reason = -(-end // WORD_CHARS), "stop"
            clip = end if fields.get("include_stop_str_in_output") else at
    return wanted, clip, reason, stop_reason


def _find(text: str, stop: str, minimum: int) -> int:
    return text.find(stop, max(0, WORD_CHARS * minimum - len(stop) + 1) if minimum else 0)


def _whole(fields: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise bad_request(f"{name} must be a whole number, got {value!r}", name)
    return value
