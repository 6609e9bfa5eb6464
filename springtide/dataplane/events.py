"""Server-sent events: borders, and a cheap look at each event.

Events end with a blank line, LF LF or CRLF CRLF (a lone CR is used by no engine and is no border here). `EventStream`
gives out whole events only and holds back what is not complete. It counts data events, finds the closing `[DONE]`
and an engine's error event (vLLM after the death of a rank: HTTP 200, an error event, then `[DONE]`).
"""

import re
from typing import Any

import orjson

_BORDER = re.compile(rb"\n\r?\n")
_ERROR = re.compile(rb"(?:data:\s*\{\s*\"error\"\s*:(?!\s*null)|event:\s*error\b|error:)")
_DONE = re.compile(rb"data:\s*\[DONE\]\s*\Z")
DONE = b"data: [DONE]\n\n"
"""The closing event, as engines write it."""
_BORDERS = (b"\n\n", b"\n\r\n")


class EventTooLong(ValueError):
    """An event grew beyond the bound."""


def split_events(data: bytes) -> list[bytes]:
    """Cuts bytes that end on a border into events, each with its border."""
    events, at = [], 0
    for match in _BORDER.finditer(data):
        events.append(data[at : match.end()])
        at = match.end()
    return events


def event_data(event: bytes) -> bytes:
    """The joined `data:` lines of one event (also of `error:` lines, which older llama.cpp sends)."""
    lines = []
    for line in event.splitlines():
        name, colon, value = line.partition(b":")
        if colon and name in (b"data", b"error"):
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)


def is_error_event(event: bytes) -> bool:
    """True where an engine reports an error in place of a token."""
    return _ERROR.match(event) is not None or (b"\nerror:" in event or b"\nevent: error" in event)


def is_done_event(event: bytes) -> bool:
    """True for the closing `data: [DONE]`."""
    return _DONE.match(event) is not None


def error_object(event: bytes) -> dict[str, Any]:
    """The engine's error of an error event as `{"message", "type", "code", ...}`; never raises."""
    raw = event_data(event)
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError:
        parsed = None
    if isinstance(parsed, dict):
        inner = parsed.get("error", parsed)
        if isinstance(inner, dict):
            return inner
        return {"message": str(inner)}
    return {"message": raw.decode("utf-8", "replace")[:1000] or "the engine reported an error"}


class EventStream:
    """Collects payload and gives whole events. After `error` or `done` is set, nothing more is given."""

    __slots__ = ("_closed", "_held", "count", "done", "error", "max_event_bytes")

    def __init__(self, max_event_bytes: int) -> None:
        self._held = bytearray()
        self._closed = False
        self.max_event_bytes = max_event_bytes
        self.count = 0
        self.done = False
        self.error: bytes | None = None

    @property
    def partial(self) -> bool:
        """True while an incomplete event is held back."""
        return bool(self._held)

    def feed(self, payload: bytes) -> bytes:
        """The whole events that `payload` completes; the very object `payload` when it is passed on unchanged.

        Raises EventTooLong.
        """
        if (
            not self._held
            and not self._closed
            and payload.endswith(_BORDERS)
            and payload.find(b"error") < 0  # `in` raises and catches an exception first
            and payload.find(b"[DONE]") < 0
            and payload[0] != 58
            and payload.find(b"\n:") < 0
        ):
            self.count += payload.count(b"\n\n") + payload.count(b"\n\r\n")
            return payload
        return self._look(payload)

    def _look(self, payload: bytes) -> bytes:
        if self._closed:
            return b""
        if payload == DONE and not self._held:
            self.done = self._closed = True
            return payload
        if self._held:
            held = self._held
            start = max(0, len(held) - 2)
            held += payload
            cut = _last_border(held, start)
            if cut == 0:
                self._bound(len(held))
                return b""
            whole = bytes(held[:cut])
            del held[:cut]
            self._bound(len(held))
        else:
            cut = _last_border(payload, 0)
            if cut < len(payload):
                self._bound(len(payload) - cut)
                self._held += payload[cut:]
                whole = payload[:cut]
            else:
                whole = payload
        return self._inspect(whole)

    def _inspect(self, whole: bytes) -> bytes:
        at = 0
        for match in _BORDER.finditer(whole):
            event = whole[at : match.end()]
            if is_error_event(event):
                self.error = event
                self._closed = True
                self._held.clear()
                return whole[:at]
            if is_done_event(event):
                self.done = self._closed = True
                self._held.clear()
                at = match.end()
                break
            if not event.startswith(b":") and event.strip():
                self.count += 1
            at = match.end()
        return whole if at == len(whole) else whole[:at]

    def _bound(self, size: int) -> None:
        if size > self.max_event_bytes:
            raise EventTooLong(f"an event is longer than {self.max_event_bytes} bytes")


def _beginning(size: int) -> bytes:
    """How a chunk of so many bytes in all begins, as engines write it; empty where there is none."""
    for digits in (1, 2, 3):
        payload = size - 4 - digits
        if payload > 0 and len(f"{payload:x}") == digits:
            return b'%x\r\ndata: {"' % payload
    return b""


_BEGINNINGS = tuple(_beginning(size) for size in range(4096))


def is_plain_chunk(data: bytes) -> bool:
    """True where `data` is one chunk that holds one whole event of one line, which is a token's as far as a look tells.

    What this says no to may be that all the same: it is for what nearly every read of a stream is.
    """
    size = len(data)
    beginning = _BEGINNINGS[size] if size < 4096 else b""
    start = len(beginning)
    return (
        start > 0
        and data.startswith(beginning)
        and data.find(b"\n", start) == size - 4
        and data.endswith(b"\n\n\r\n")
        and not data.startswith(b"error", start)
    )


def _last_border(data: bytes | bytearray, start: int) -> int:
    """The position after the last border at or after `start`; 0 if there is none."""
    plain, carriage = data.rfind(b"\n\n", start), data.rfind(b"\n\r\n", start)
    return max(plain + 2 if plain >= 0 else 0, carriage + 3 if carriage >= 0 else 0)
