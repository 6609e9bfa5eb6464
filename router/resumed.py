"""Resumed parts in the shape in which their streams began: the shaper of an HTTP stream's later attempts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from router.continuation import Continuation, Ready
from router.core.kept import Kept
from router.core.sequel import Piece, Sequel, usage
from router.core.terms import Terms
from springtide.dataplane import Reply, Route, ShapeError
from springtide.dataplane.events import DONE, event_data, is_done_event, split_events

_OWN = frozenset(("choices", "usage", "prompt_token_ids"))


class Writer:
    """Events of one stream, under the id, name and time with which it began."""

    def __init__(self, terms: Terms, kept: Kept) -> None:
        self._terms = terms
        self._kept = kept
        try:
            head = orjson.loads(event_data(kept.head))
        except orjson.JSONDecodeError:
            raise ShapeError("the first event of the stream was no JSON") from None
        self._envelope = {name: value for name, value in head.items() if name not in _OWN}
        self._prompt = kept.prompt_count()

    def event(self, piece: Piece) -> bytes:
        """What one event of a resumed part adds."""
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": piece.text}} if self._terms.chat else {"text": piece.text}
        choice |= {"logprobs": None, "finish_reason": piece.finish_reason}
        if piece.finish_reason is not None or not self._terms.chat:
            choice["stop_reason"] = piece.stop_reason
        if self._terms.ids_visible:
            choice["token_ids"] = piece.ids
        event: dict[str, Any] = {**self._envelope, "choices": [choice]}
        if self._terms.usage_each:
            event["usage"] = usage(self._prompt, piece.total)
        return b"data: " + orjson.dumps(event) + b"\n\n"

    def closing(self, total: int) -> bytes:
        """What follows the finish reason: usage where it was asked for, and the end mark."""
        if not self._terms.usage or self._kept.usage_sent:
            return DONE
        event = {**self._envelope, "choices": [], "usage": usage(self._prompt, total)}
        return b"data: " + orjson.dumps(event) + b"\n\n" + DONE


async def go_on(way: Continuation, request_id: bytes) -> Route | bytes:
    """The next part of a lost stream: where it comes from, or the events that end it. Raises SpringtideError."""
    kept, asked = way.kept, way.terms
    assert kept is not None
    assert asked is not None
    found = await way.next(request_id)
    try:
        if isinstance(found, Ready):
            found.route.shaper = Resumed(asked, kept, found.withheld)
            return found.route
        writer = Writer(asked, kept)
    except ShapeError as error:
        raise way.give_up(str(error)) from None
    last = b""
    if found.finish_reason is not None:
        last = writer.event(Piece(found.text, [], found.finish_reason, None, found.total))
    return last + writer.closing(found.total)


class Resumed:
    """The shaper of a resumed part."""

    __slots__ = ("_sequel", "_total", "_writer", "ended", "kept")

    def __init__(self, terms: Terms, kept: Kept, withheld: str) -> None:
        self.ended = False
        self.kept = kept
        self._sequel = Sequel(terms, kept, withheld)
        self._writer = Writer(terms, kept)
        self._total = kept.count()

    def feed(self, events: bytes) -> bytes:
        """Whole events of the resumed part, as the client gets them. Raises ShapeError."""
        shown = []
        for event in split_events(events):
            data = event_data(event)
            if is_done_event(event):
                if self.kept.finish is None:
                    raise ShapeError("the resumed part ended without a finish reason")
                shown.append(self._writer.closing(self._total))
            elif data:
                shown.append(self._read(data))
            if self.ended:
                break
        return b"".join(shown)

    def _read(self, data: bytes) -> bytes:
        try:
            piece = self._sequel.read(orjson.loads(data))
        except (orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as wrong:
            raise ShapeError(f"the resumed part has an event that is none: {wrong}") from None
        if piece is None:
            return b""
        self._total = piece.total
        shown = self._writer.event(piece)
        if self._sequel.stopped:
            self.ended = True
            shown += self._writer.closing(piece.total)
        return shown


def asking_for_ids(raw: bytes, body: Mapping[str, Any]) -> bytes:
    """The same request, which asks for token ids as well; not written anew where that can be helped."""
    raw = raw.rstrip()
    if "return_token_ids" in body or not body:
        return orjson.dumps({**orjson.loads(raw), "return_token_ids": True})
    return raw[:-1] + b',"return_token_ids":true}'


def with_reason(answer: Reply, why: str) -> Reply:
    """The error of a lost stream, with the reason why it does not go on."""
    if not why:
        return answer
    try:
        body = orjson.loads(answer.body)
        body["error"]["message"] += f" The stream cannot be continued: {why}."
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return answer
    return replace(answer, body=orjson.dumps(body))
