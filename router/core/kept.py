"""What a stream must leave behind to be continued: ids of its prompt and answer, as raw as they came.

On the path of every token: a few substring searches and two slices, no parsing. Everything else waits until a stream is
really lost. What is kept is bounded, per stream and for all of them together; a stream over a bound is not continued.
"""

import re
from collections.abc import Sequence
from typing import Any

import orjson

from router.core.terms import Terms
from springtide.dataplane.events import event_data, is_done_event, split_events

_IDS = b',"token_ids":['
_TOKENS = re.compile(rb',"token_ids":\s*\[([\d,\s]*)\]')
_PROMPT = re.compile(rb',"prompt_token_ids":\s*\[([\d,\s]*)\]')
_BOTH = re.compile(rb',"(?:prompt_)?token_ids":\s*\[[\d,\s]*\]')
_QUOTE = ord('"')
_NOWHERE = 1 << 40
_STEP_BYTES = 16 * 1024
MAX_STREAM_BYTES = 2 * 1024 * 1024


class Budget:
    """Bytes that all streams of one router may keep together."""

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes


class Kept:
    """One stream's. A Shaper for its first attempt: notes what passes, and takes out the ids that nobody asked for.

    `ids` is `1]2,3]` in ASCII: as many numbers an event as it had. Up to `clean` of it the client has the whole text;
    what follows gave none yet (half a character, a special token) and is made again. `spoiled` says why the stream
    cannot be continued, if it cannot.
    """

    __slots__ = (
        "_mark",
        "_opened",
        "_room",
        "_taken",
        "_text_at",
        "budget",
        "clean",
        "clean_from",
        "ended",
        "finish",
        "head",
        "ids",
        "last",
        "owed",
        "prompt",
        "spoiled",
        "terms",
        "text_bytes",
        "texts",
        "usage_sent",
        "withheld",
    )

    def __init__(self, terms: Terms, budget: Budget) -> None:
        self.terms = terms
        self.budget = budget
        self.ended = False
        self.ids = bytearray()
        self.clean = 0
        self.clean_from = 0
        self.prompt = b""
        self.head = b""
        self.last = b""
        self.finish: str | None = None
        self.usage_sent = False
        self.owed: list[int] = []
        """Ids that the client has seen and that the next part must give again."""
        self.withheld: str | None = None
        """Text of the ids that was held back here, of a resumed part; None: it is the engine that holds back."""
        self.spoiled = ""
        self.texts: list[bytes | str] | None = [] if terms.stops else None
        self.text_bytes = 0
        self._mark = b'"content":"' if terms.chat else b'"text":"'
        self._opened = False
        self._text_at = _NOWHERE
        self._room = 0
        self._taken = 0

    # ------------------------------------------------------------ on the path of every token

    def feed(self, events: bytes) -> bytes:
        """Notes the ids in whole events; gives the events as the client gets them."""
        text = self._text_at  # where the text began in the event before: everything in front of it stays the same
        at = events.find(_IDS, text)
        if at < 0 or not events.startswith(self._mark, text - len(self._mark)) or events.find(_IDS, at + 14) >= 0:
            return self._look(events)
        end = events.find(b"]", at) + 1
        ids = self.ids
        before = len(ids)
        ids += events[at + 14 : end]
        if events[text] != _QUOTE:
            self.clean_from = before
            self.clean = len(ids)
        self.last = events
        if self.texts is not None:
            self.texts.append(events)
            self.text_bytes += len(events)
        if before + self.text_bytes > self._room:
            self._grow()
        return events if self.terms.ids_visible else events[:at] + events[end:]

    def _look(self, events: bytes) -> bytes:
        """The same for the first events, several at once, and unusual ones."""
        if self.spoiled:
            return events if self.terms.ids_visible else _BOTH.sub(b"", events)
        self.last = events
        shown = [event if b'"choices"' not in event else self._one(event) for event in split_events(events)]
        if len(self.ids) + self.text_bytes > self._room:
            self._grow()
        return b"".join(shown)

    def _one(self, event: bytes) -> bytes:
        bare = event
        prompt = _PROMPT.search(bare)
        if prompt is not None:
            if not self._opened:
                self._opened = True
                self.prompt = prompt[1]
            bare = bare[: prompt.start()] + bare[prompt.end() :]
        tokens = _TOKENS.search(bare)
        if tokens is not None:
            bare = bare[: tokens.start()] + bare[tokens.end() :]
        if not self.head:
            self.head = bare
        text = bare.find(self._mark)
        some_text = text >= 0 and bare[text + len(self._mark)] != _QUOTE
        if tokens is not None and tokens[1]:
            if text < 0:
                self.spoil("the engine parses reasoning or tool calls out of this answer")
            elif not self._opened:
                self.spoil("the engine gave no ids of the prompt")
            else:
                self._add(tokens[1], some_text)
                self._text_at = text + len(self._mark)
        elif some_text:
            self.spoil("the engine gave no token ids")
        if self.texts is not None and some_text and not self.spoiled:
            self.texts.append(event)
            self.text_bytes += len(event)
        return event if self.terms.ids_visible else bare

    def _add(self, ids: bytes, some_text: bool) -> None:
        if self.spoiled:
            return
        before = len(self.ids)
        self.ids += ids
        self.ids += b"]"
        if some_text:
            self.clean_from = before
            self.clean = len(self.ids)

    # ------------------------------------------------------------ from who parses each event anyway

    def open(self, prompt: Sequence[int], head: bytes = b"") -> None:
        """The prompt's ids."""
        self._opened = True
        self.prompt = orjson.dumps(list(prompt))[1:-1]
        self.head = head
        self._grow()

    def note(self, ids: Sequence[int], produced: bool, delivered: str) -> None:
        """Ids of one event; whether the engine `produced` text with them; and the text that the client got."""
        if self.spoiled:
            return
        if produced and not ids:
            self.spoil("the engine gave no token ids")
        elif ids and not self._opened:
            self.spoil("the engine gave no ids of the prompt")
        elif ids:
            self._add(b",".join(b"%d" % token_id for token_id in ids), produced)
        if self.texts is not None and delivered:
            self.texts.append(delivered)
            self.text_bytes += len(delivered)
        if len(self.ids) + self.text_bytes > self._room:
            self._grow()

    def restart(self) -> None:
        """The attempt before gave the client nothing: its answer counts for nothing."""
        if self.spoiled:
            return
        self.ids.clear()
        self.clean = self.clean_from = self.text_bytes = 0
        self.head = self.last = b""
        self.finish = None
        self._opened = False
        self._text_at = _NOWHERE
        self.texts = None if self.texts is None else []

    # ------------------------------------------------------------ once the stream is lost

    def settle(self) -> None:
        """Reads what the last events said of the answer's end."""
        for event in split_events(self.last):
            if is_done_event(event):
                continue
            try:
                parsed: Any = orjson.loads(event_data(event))
            except orjson.JSONDecodeError:
                continue
            choices = parsed.get("choices") if isinstance(parsed, dict) else None
            for choice in choices or ():
                self.finish = choice.get("finish_reason") or self.finish
            if choices == [] and parsed.get("usage"):
                self.usage_sent = True
                self.finish = self.finish or "stop"  # it was in an event before
        self.last = b""

    def cut(self, drop: int = 0) -> None:
        """Forgets ids whose text the client does not have: those from `clean` on, and `drop` more before it.

        Those that it has seen are owed.
        """
        clean = self.clean
        for _ in range(drop):
            clean = max(self.ids.rfind(b",", 0, clean - 1), self.ids.rfind(b"]", 0, clean - 1)) + 1
        if self.terms.ids_visible:
            self.owed = _numbers(self.ids[clean:]) + self.owed
        del self.ids[clean:]
        self.clean = clean

    def clean_ids(self) -> list[int]:
        """The answer's ids up to `clean`."""
        return _numbers(self.ids[: self.clean])

    def answer_ids(self) -> list[int]:
        """The answer's ids."""
        return _numbers(self.ids)

    def answer_json(self) -> bytes:
        """The same as the inside of a JSON list."""
        return bytes(self.ids).replace(b"]", b",").rstrip(b",")

    def last_ids(self) -> list[int]:
        """Ids of the last event with text."""
        return _numbers(self.ids[self.clean_from : self.clean])

    def count(self) -> int:
        """How many ids the answer has."""
        return len(_numbers(self.ids))

    def prompt_count(self) -> int:
        """How many ids the prompt has."""
        return len(_numbers(self.prompt))

    def text(self) -> str:
        """The answer's text as the client has it. Only kept where stop strings need it."""
        parts = []
        for kept in self.texts or ():
            if isinstance(kept, str):
                parts.append(kept)
                continue
            for event in split_events(kept):
                if is_done_event(event):
                    continue
                for choice in orjson.loads(event_data(event)).get("choices") or ():
                    part = choice.get("delta") or {} if self.terms.chat else choice
                    parts.append(part.get("content" if self.terms.chat else "text") or "")
        return "".join(parts)

    # ------------------------------------------------------------ bounds

    def spoil(self, why: str) -> None:
        """This stream is not to be continued."""
        self.spoiled = self.spoiled or why
        self.release()

    def release(self) -> None:
        """Gives back what it took."""
        self.budget.left += self._taken
        self._taken = self._room = 0
        self._text_at = _NOWHERE
        self.ids = bytearray()
        self.clean = self.clean_from = 0
        self.prompt = b""
        self.texts = None if self.texts is None else []
        self.text_bytes = 0

    def _grow(self) -> None:
        if self.spoiled:
            return
        needed = len(self.prompt) + len(self.ids) + self.text_bytes
        more = min(needed + max(_STEP_BYTES, needed // 2), MAX_STREAM_BYTES) - self._taken
        if needed >= MAX_STREAM_BYTES:
            self.spoil("it has become too long to keep")
        elif more > self.budget.left:
            self.spoil("too much is kept for other streams")
        elif more > 0:
            self.budget.left -= more
            self._taken += more
            self._room = self._taken - len(self.prompt)


def _numbers(raw: bytes | bytearray) -> list[int]:
    return [int(number) for number in raw.replace(b"]", b",").split(b",") if number.strip()]
