"""A GenerateRequest as an OpenAI request, and the engine's events as Tokens. Pure translation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict

from router.core.want import Want, read_want
from springtide.errors import InvalidArgument
from springtide.v1 import generation_pb2 as pb

_OWN_KEYS = frozenset(("model", "prompt", "messages", "stream", "stream_options"))


def translate(request: pb.GenerateRequest, model: str) -> tuple[str, dict[str, Any]]:
    """Target and body (an OpenAI request) for the engine. Raises InvalidArgument."""
    extra = MessageToDict(request.sampling.extra) if request.sampling.HasField("extra") else {}
    for key in sorted(_OWN_KEYS & extra.keys()):
        raise InvalidArgument(
            field=f"sampling.extra.{key}", value=extra[key], problem="is set by the router", remedy=f"Leave {key} out."
        )
    if extra.get("n", 1) != 1:
        remedy = "Send one call per answer, or use the HTTP front."
        raise InvalidArgument(field="sampling.extra.n", value=extra["n"], problem="must be 1", remedy=remedy)
    body: dict[str, Any] = {key: _whole(value) for key, value in extra.items()}
    body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}, **_sampling(request.sampling)}
    if request.return_token_ids:
        body["return_token_ids"] = True
    kind = request.WhichOneof("input")
    if request.HasField("logprobs"):
        body |= _logprobs(request.logprobs, chat=kind == "chat")
    if kind == "prompt":
        return "/v1/completions", {**body, "prompt": request.prompt}
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise InvalidArgument(
                field="token_ids.ids", value="[]", problem="is empty", remedy="Send at least one token id."
            )
        return "/v1/completions", {**body, "prompt": list(request.token_ids.ids)}
    if kind == "chat":
        if not request.chat.messages:
            raise InvalidArgument(
                field="chat.messages", value="[]", problem="is empty", remedy="Send at least one message."
            )
        messages = [{"role": m.role or "user", "content": m.content} for m in request.chat.messages]
        return "/v1/chat/completions", {**body, "messages": messages}
    raise InvalidArgument(
        field="input", value=None, problem="is missing", remedy="Set one of prompt, chat and token_ids."
    )


def want_of(request: pb.GenerateRequest, headers: dict[bytes, bytes], request_id: str) -> Want:
    """What it brings to the choice of a worker. `headers`: the call's metadata that begins with x-; the session has a
    field of its own, too. Raises InvalidArgument."""
    if request.session_id:
        headers = {**headers, b"x-session-id": request.session_id.encode()[:256]}
    body: dict[str, object] = {}
    kind = request.WhichOneof("input")
    if kind == "token_ids":
        body["prompt"] = list(request.token_ids.ids)
    elif kind == "chat":
        body["messages"] = [{"role": m.role, "content": m.content} for m in request.chat.messages]
    elif kind == "prompt":
        body["prompt"] = request.prompt
    if request.sampling.HasField("max_tokens"):
        body["max_tokens"] = request.sampling.max_tokens
    return read_want(headers, body, request.ByteSize(), request_id)


def _sampling(sampling: pb.Sampling) -> dict[str, Any]:
    names = {"max_tokens", "temperature", "top_p", "seed", "ignore_eos"}
    found: dict[str, Any] = {field.name: value for field, value in sampling.ListFields() if field.name in names}
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    return found


def _logprobs(count: int, chat: bool) -> dict[str, Any]:
    if count < 0:
        raise InvalidArgument(field="logprobs", value=count, problem="is below zero", remedy="Send 0 or more.")
    return {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}


def _whole(value: Any) -> Any:
    """Struct numbers are floats; engines want whole ones where they are whole."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


@dataclass(slots=True)
class Progress:
    """What has come of one generation."""

    chat: bool
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt: list[int] | None = None
    """The prompt's ids, from the event that has them."""

    def read(self, data: bytes) -> pb.Tokens | None:
        """One event; None where it brings no text and no token. Raises ValueError for what is no such event."""
        event = orjson.loads(data)
        text, ids = self.tokens(event)
        found = logprobs(event)
        return pb.Tokens(text=text, token_ids=ids, logprobs=found) if text or ids or found else None

    def tokens(self, event: dict[str, Any]) -> tuple[str, list[int]]:
        """Text and token ids of one event. Raises AttributeError or TypeError for what is no such event."""
        if (usage := event.get("usage")) is not None and isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.completion_tokens = usage.get("completion_tokens")
        text = ""
        ids: list[int] = []
        self.prompt = event.get("prompt_token_ids") or self.prompt
        for choice in event.get("choices") or ():
            self.prompt = choice.get("prompt_token_ids") or self.prompt
            part = (choice.get("delta") or {}) if self.chat else choice
            text += part.get("content" if self.chat else "text") or ""
            ids += choice.get("token_ids") or ()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return text, ids

    def finished(self) -> pb.Finished:
        """The closing message."""
        return pb.Finished(
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )


def logprobs(event: dict[str, Any]) -> list[pb.TokenLogprob]:
    """Log-probabilities in one event, in either of OpenAI's shapes. Raises as `Progress.tokens` does, and KeyError."""
    found: list[pb.TokenLogprob] = []
    for choice in event.get("choices") or ():
        told = choice.get("logprobs")
        if not told:
            continue
        if "content" in told:  # chats
            found += (_token(item, item.get("top_logprobs") or ()) for item in told["content"] or ())
            continue
        tops = told.get("top_logprobs") or [None] * len(told["tokens"])
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True):
            others = [{"token": name, "logprob": value} for name, value in (top or {}).items()]
            found.append(_token({"token": token, "logprob": logprob}, others))
    return found


def _token(item: dict[str, Any], top: Iterable[dict[str, Any]]) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=item["token"],
        logprob=item.get("logprob"),
        top=[pb.TokenLogprob(token=other["token"], logprob=other.get("logprob")) for other in top],
    )
