"""What a request brings to the choice of a worker, whichever front it came by. Read from headers and body; pure.

Headers: x-session-id, x-priority (0 to 9, 9 first, 5 without), x-deadline-ms (longest wait for a worker),
x-require-labels (`key=value`, comma-separated), x-min-weight-version, x-max-weight-version, x-role.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from springtide.errors import InvalidArgument
from springtide.model.enums import Role

Headers = Mapping[bytes, bytes]
"""By name in lower case; those that begin with x- are enough."""

USUAL_PRIORITY = 5
_MOST_LABELS = 16
_LONGEST_DEADLINE_MS = 86_400_000
_TEXT = re.compile(r"[\x20-\x7e]{1,256}")
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]{0,62})=([A-Za-z0-9._/-]{0,63})")
_BYTES_PER_TOKEN = 4
_MOST_PROMPT_BYTES = 256 * 1024


class Needs(NamedTuple):
    """What a worker must have. Equal needs are met by the same workers."""

    labels: tuple[tuple[str, str], ...] = ()
    min_weight_version: str = ""
    max_weight_version: str = ""


NO_NEEDS = Needs()


class Want:
    """`body`, an OpenAI request of `body_bytes`, or else `prompt` and the counts: looked at only when a policy asks.

    `prompt` gives bytes that only grow at their end when a conversation goes on.
    """

    __slots__ = ("_body", "_body_bytes", "_chunks", "_output_tokens", "_prompt", "_prompt_tokens", "deadline_s",
                 "needs", "priority", "request_id", "role", "session")  # fmt: skip

    def __init__(
        self,
        *,
        priority: int = USUAL_PRIORITY,
        deadline_s: float | None = None,
        session: str = "",
        request_id: str = "",
        needs: Needs = NO_NEEDS,
        role: Role | None = None,
        prompt_tokens: int = 0,
        output_tokens: int | None = None,
        prompt: Callable[[], bytes] | None = None,
        body: Mapping[str, Any] | None = None,
        body_bytes: int = 0,
    ) -> None:
        self.priority = priority
        self.deadline_s = deadline_s
        self.session = session
        self.request_id = request_id
        self.needs = needs
        self.role = role
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._prompt = prompt
        self._body = body
        self._body_bytes = body_bytes
        self._chunks: tuple[int, tuple[int, ...]] | None = None

    @property
    def prompt_tokens(self) -> int:
        """As far as known without a tokenizer."""
        return self._prompt_tokens if self._body is None else _prompt_tokens(self._body, self._body_bytes)

    @property
    def output_tokens(self) -> int | None:
        """The most that the answer may have; None: the request does not say."""
        return self._output_tokens if self._body is None else _output_tokens(self._body)

    def prompt(self) -> bytes:
        """What prefixes are made of."""
        if self._body is not None:
            return prompt_bytes(self._body)
        return self._prompt() if self._prompt is not None else b""

    def placed(self) -> None:
        """A worker has it: what was computed for the choice is not kept for as long as the answer takes."""
        self._chunks = None

    def chunks(self, size: int, most: int = 256) -> tuple[int, ...]:
        """One hash per whole chunk of the prompt, each over all that is before it too."""
        if self._chunks is None or self._chunks[0] != size:
            text = self.prompt()
            found, last = [], 0
            for at in range(size, min(len(text), most * size) + 1, size):
                last = hash((last, text[at - size : at]))
                found.append(last)
            self._chunks = size, tuple(found)
        return self._chunks[1]


NOTHING = Want()


def read_want(
    headers: Headers, body: Mapping[str, Any] | None = None, body_bytes: int = 0, request_id: str = ""
) -> Want:
    """Raises InvalidArgument that names the header. `body` is an OpenAI request."""
    body = body or {}
    session = _text(headers, b"x-session-id") if headers else ""
    if not session and isinstance(user := body.get("user"), str):
        session = user[:256]
    if not headers:
        return Want(session=session, request_id=request_id, body=body, body_bytes=body_bytes)
    deadline, role, labels = headers.get(b"x-deadline-ms"), headers.get(b"x-role"), headers.get(b"x-require-labels")
    minimum, maximum = _text(headers, b"x-min-weight-version"), _text(headers, b"x-max-weight-version")
    needs = Needs(_labels(labels) if labels else (), minimum, maximum) if labels or minimum or maximum else NO_NEEDS
    return Want(
        priority=_priority(headers.get(b"x-priority")),
        deadline_s=None if deadline is None else _whole(b"x-deadline-ms", deadline, _LONGEST_DEADLINE_MS) / 1000,
        session=session,
        request_id=request_id,
        needs=needs,
        role=None if role is None else _role(role),
        body=body,
        body_bytes=body_bytes,
    )


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """Of an OpenAI request: the tools, which templates put first, then messages, prompt or input."""
    parts = b""
    if tools := body.get("tools"):
        parts = orjson.dumps(tools)
    for key in ("messages", "prompt", "input"):
        value = body.get(key)
        if isinstance(value, str):
            return parts + value[:_MOST_PROMPT_BYTES].encode(errors="replace")
        if isinstance(value, list):
            return parts + _joined(value)
        if value is not None:
            return parts + orjson.dumps(value)
    return parts


def _joined(items: Sequence[Any]) -> bytes:
    """Its items one after the other, as far as anybody looks: a body may hold many megabytes of images."""
    if items and isinstance(items[0], int):
        return orjson.dumps(items[:_MOST_PROMPT_BYTES])
    parts: list[bytes] = []
    size = 0
    for item in items:
        parts.append(orjson.dumps(item))
        size += len(parts[-1])
        if size > _MOST_PROMPT_BYTES:
            break
    return b",".join(parts)


def _prompt_tokens(body: Mapping[str, Any], body_bytes: int) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return body_bytes // _BYTES_PER_TOKEN


def _output_tokens(body: Mapping[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _priority(value: bytes | None) -> int:
    return USUAL_PRIORITY if value is None else _whole(b"x-priority", value, 9)


def _whole(name: bytes, value: bytes, most: int) -> int:
    if not value.isdigit() or len(value) > 9 or int(value) > most:
        problem = f"is no whole number from 0 to {most}"
        raise _bad(name, value, problem, f"Send {name.decode()} within these bounds, or leave it out.")
    return int(value)


def _role(value: bytes) -> Role:
    try:
        return Role(value.decode("latin-1").upper())
    except ValueError:
        raise _bad(b"x-role", value, "is no role", "Send mixed, prefill or decode.") from None


def _text(headers: Headers, name: bytes) -> str:
    value = headers.get(name)
    if not value:
        return ""
    text = value.decode("latin-1")
    if not _TEXT.fullmatch(text):
        raise _bad(name, value, "is not 1 to 256 printable ASCII characters", f"Correct {name.decode()}.")
    return text


def _labels(value: bytes) -> tuple[tuple[str, str], ...]:
    parts = [part.strip() for part in value.decode("latin-1").split(",") if part.strip()]
    pairs = [(match[1], match[2]) for part in parts if (match := _LABEL.fullmatch(part))]
    if len(pairs) < len(parts) or len(pairs) > _MOST_LABELS:
        problem = f"is no list of at most {_MOST_LABELS} labels"
        raise _bad(b"x-require-labels", value, problem, "Send key=value, with commas between.")
    return tuple(sorted(set(pairs)))


def _bad(name: bytes, value: bytes, problem: str, remedy: str) -> InvalidArgument:
    shown = value.decode("latin-1")[:80]
    return InvalidArgument(field=name.decode(), value=shown, problem=problem, remedy=remedy)
