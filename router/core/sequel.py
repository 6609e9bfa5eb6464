"""The resumed part of a stream: the request that asks for it, and what its events add to what the client has. Pure."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from router.core.kept import Kept
from router.core.terms import Terms
from springtide.dataplane.messages import ShapeError

_CONTEXT_IDS = 8  # more than the tokens of any one character
_HALF = "\ufffd"
TARGET = "/v1/completions"
"""Resumed parts run token-in, whatever the stream began as."""


class Diverged(ShapeError):
    """The resumed part does not fit to what the client has."""


class Unfit(Exception):
    """What is kept does not fit together: the stream cannot be continued."""


class Piece(NamedTuple):
    """What one event adds. `total`: completion tokens up to here."""

    text: str
    ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    total: int


def resumed_body(terms: Terms, kept: Kept, room: int | None) -> bytes:
    """The request for the rest. `room`: tokens that fit the model's context behind the prompt, for a chat that named
    no bound."""
    count = kept.count()
    bound = terms.max_tokens if terms.max_tokens is not None else room
    fields: dict[str, Any] = {**terms.sampling, "stream": True, "return_token_ids": True}
    if bound is not None:
        fields["max_tokens"] = bound - count
    if terms.stops:
        fields |= {"stop": list(terms.stops), "include_stop_str_in_output": True}
    if terms.min_tokens > count:
        fields["min_tokens"] = terms.min_tokens - count
    ids = kept.answer_json()
    prompt = kept.prompt + (b"," + ids if ids else b"")
    return orjson.dumps(fields)[:-1] + b',"prompt":[' + prompt + b"]}"


def left(terms: Terms, kept: Kept) -> int | None:
    """Tokens that the answer may still have; None: no bound was named."""
    return None if terms.max_tokens is None else terms.max_tokens - kept.count()


async def align(kept: Kept, terms: Terms, text_of: Callable[[list[int]], Awaitable[str]]) -> str:
    """Cuts what is kept at the last whole character; gives the text of it that the client does not have.

    `text_of` asks an engine for the text of ids; most streams need no such question. May be repeated. Raises Unfit.
    """
    drop = 0
    last = len(kept.last_ids())
    if last > 1:  # several tokens in one event: its last ones may be half a character
        ids = kept.clean_ids()[-(last + _CONTEXT_IDS) :]
        while drop < last and (await text_of(ids[: len(ids) - drop])).endswith(_HALF):
            drop += 1
    kept.cut(drop)
    if kept.withheld is not None or not terms.lag:
        return kept.withheld or ""
    shown = kept.text()
    if not shown:
        kept.clean = 0
        kept.cut()  # none of its tokens has shown
        return ""
    whole = await text_of(kept.answer_ids())
    for text in (whole, " " + whole):  # tokenizers of one family drop a leading space
        # The length tells whether the text is what the engine held back: it has no special tokens in it, for example.
        if text.startswith(shown) and (terms.foresees or len(text) == len(shown) + terms.lag):
            return text[len(shown) :]
    raise Unfit("its text and its token ids do not fit together")


def find_stop(window: str, new_from: int, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """The stop string that is complete first, ending behind `new_from`: (its end, its begin, itself)."""
    found = []
    for order, stop in enumerate(stops):
        at = window.find(stop, max(0, new_from - len(stop) + 1))
        if at >= 0:
            found.append((at + len(stop), order, at, stop))
    if not found:
        return None
    end, _, at, stop = min(found)
    return end, at, stop


class Sequel:
    """Reads the events of one resumed part. `withheld`: text of the kept ids that the client has not been given.

    The engine finds stop strings that are whole in its part, and shows them; those that begin before the cut are looked
    for here. Text is held back here, as engines do, so that a stop string is never shown in part.
    """

    __slots__ = ("_border", "_hold", "_kept", "_sent", "_stops", "_terms", "_total", "_window", "stopped")

    def __init__(self, terms: Terms, kept: Kept, withheld: str = "") -> None:
        self._terms = terms
        self._kept = kept
        self._total = kept.count()
        self._stops = terms.stops
        longest = max((len(stop) for stop in terms.stops), default=1)
        self._hold = longest - 1
        delivered = kept.text()[-self._hold :] if self._hold and terms.stops else ""
        self._window = delivered + withheld
        self._border = len(self._window)  # what is behind it is this part's
        self._sent = len(delivered)
        kept.withheld = withheld
        self.stopped = False
        """A stop string has ended the answer here: the engine's rest is not wanted."""

    def read(self, event: Mapping[str, Any]) -> Piece | None:
        """One event; None where it adds nothing. Raises Diverged."""
        choices = event.get("choices")
        if not choices or self.stopped:
            return None
        choice = choices[0]
        text: str = choice.get("text") or ""
        ids: list[int] = choice.get("token_ids") or []
        finish: str | None = choice.get("finish_reason")
        stop_reason = choice.get("stop_reason")
        self._total += len(ids)
        shown = text
        if self._stops:
            shown, finish, stop_reason = self._scan(text, len(ids), finish, stop_reason)
        new = self._pay(ids) if self._kept.owed else ids
        self._kept.note(ids, bool(text), shown)
        if finish is not None:
            self._kept.finish = finish
        if not shown and finish is None and not (new and self._terms.ids_visible):
            return None
        return Piece(shown, new, finish, stop_reason, self._total)

    def _scan(
        self, text: str, count: int, finish: str | None, stop_reason: str | int | None
    ) -> tuple[str, str | None, str | int | None]:
        new_from = len(self._window)
        window = self._window + text
        hit = None
        if text and self._border > 0 and self._total > self._terms.min_tokens:
            hit = find_stop(window, new_from, self._stops)
            if hit is not None and hit[1] >= self._border:
                hit = None  # whole in this part: the engine finds it itself
        if hit is not None:
            if self._total - count < self._terms.min_tokens:
                raise Diverged("a stop string and min_tokens meet in one event: which came first is not known")
            self.stopped = True
        elif finish == "stop" and isinstance(stop_reason, str):
            hit = len(window), len(window) - len(stop_reason), stop_reason
        if hit is not None:
            end, begin, stop = hit
            shown = window[self._sent : max(self._sent, end if self._terms.include_stop else begin)]
            return shown, "stop", stop
        to = len(window) if finish is not None or self._terms.include_stop else len(window) - self._hold
        to = max(to, self._sent)
        shown = window[self._sent : to]
        start = max(0, min(to, len(window) - self._hold))
        self._window = window[start:]
        self._sent = to - start
        self._kept.withheld = window[to:]
        self._border -= start
        return shown, finish, stop_reason

    def _pay(self, ids: list[int]) -> list[int]:
        """Takes off ids that the client has already seen; gives those that are new to it."""
        owed = self._kept.owed
        count = min(len(owed), len(ids))
        if ids[:count] != owed[:count]:
            raise Diverged("the resumed part gave other token ids than those that the client has seen")
        del owed[:count]
        return ids[count:]


def usage(prompt: int, completion: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
