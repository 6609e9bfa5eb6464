"""An engine's events as framed GenerateResponses: Started, Tokens, Finished. The shaper of each attempt of a call."""

from collections.abc import Callable

import orjson

from router.generation import Progress, logprobs
from router.h2.wire import SHORT, frame_message, tokens_message
from springtide.dataplane import ShapeError, Shaper
from springtide.dataplane.events import event_data, is_done_event, split_events
from springtide.v1 import generation_pb2 as pb


class Messages:
    """What one call's events have said so far; it outlives the attempt that began it."""

    __slots__ = ("_after", "_before", "_mark", "_progress", "_started", "begun", "ended", "finished")

    def __init__(self, chat: bool) -> None:
        self._mark = b'"content":"' if chat else b'"text":"'
        # What stood around the text of the last short event: that of the next one is nearly always the same.
        self._before = b"\n"
        self._after = b""
        self._progress = Progress(chat)
        self._started: Callable[[], pb.Started]
        self.begun = False
        self.ended = False
        self.finished = False

    def attempt(self, started: Callable[[], pb.Started], inner: Shaper | None) -> Shaper:
        """The shaper of the next attempt. `started` is asked once, with the first message."""
        if not self.begun:
            self._started = started
        return self if inner is None else MessageShaper(self, inner)

    def resume(self, inner: Shaper | None) -> Shaper:
        """The shaper of a part that goes on with what was begun."""
        return self if inner is None else MessageShaper(self, inner)

    def feed(self, events: bytes) -> bytes:
        """Framed messages for whole events. Raises ShapeError."""
        if events.startswith(self._before) and events.endswith(self._after):
            text = events[len(self._before) : -len(self._after)]
            if len(text) < len(SHORT) and text.isascii() and b'"' not in text and b"\\" not in text and text:
                return SHORT[len(text)] + text
        try:
            return (self._quick(events) if self.begun else b"") or self._parsed(events)
        except (ValueError, AttributeError, TypeError, KeyError) as wrong:
            raise ShapeError(f"the engine sent an event that is none: {wrong}") from None

    def _quick(self, events: bytes) -> bytes:
        """The path of every token: events that bring a short text and nothing else, unparsed. Empty for any other."""
        mark = self._mark
        skip = len(mark)
        out = b""
        for event in events.split(b"\n\n"):
            at = event.find(mark) + skip
            end = event.find(b'"', at)
            size = end - at
            if at < skip or not 0 < size < len(SHORT):
                if event:
                    return b""
                break  # behind the last one
            text = event[at:end]
            if (
                b"\\" in text
                or b'"finish_reason":null' not in event
                or b'"token_ids":[' in event
                or b'"usage":{' in event
                or b'"logprobs":{' in event
                or b"\n" in event
                or event.find(mark, end) > 0
            ):
                return b""
            if not text.isascii():
                text.decode()
            out += SHORT[size] + text
            if len(events) == len(event) + 2:
                self._before, self._after = event[:at], events[end:]
        return out

    def _parsed(self, events: bytes) -> bytes:
        progress = self._progress
        out = []
        for data in _payloads(events):
            if data is None:
                self.finished = True
                if not self.begun:
                    out.append(self._begin())
                out.append(frame_message(pb.GenerateResponse(finished=progress.finished()).SerializeToString()))
                break
            event = orjson.loads(data)
            text, ids = progress.tokens(event)
            probable = logprobs(event) if b'"logprobs":' in data else None
            if text or ids or probable:
                if not self.begun:
                    out.append(self._begin())
                if probable:
                    tokens = pb.Tokens(text=text, token_ids=ids, logprobs=probable)
                    out.append(frame_message(pb.GenerateResponse(tokens=tokens).SerializeToString()))
                else:
                    out.append(tokens_message(text, ids))
        return out[0] if len(out) == 1 else b"".join(out)

    def _begin(self) -> bytes:
        self.begun = True
        return frame_message(pb.GenerateResponse(started=self._started()).SerializeToString())


class MessageShaper:
    """`inner` shapes the events first: the resumed part of a stream."""

    __slots__ = ("_inner", "_messages", "ended")

    def __init__(self, messages: Messages, inner: Shaper) -> None:
        self.ended = False
        self._messages = messages
        self._inner = inner

    def feed(self, events: bytes) -> bytes:
        """See Shaper."""
        inner = self._inner
        events = inner.feed(events)
        self.ended = inner.ended
        return self._messages.feed(events)


def _payloads(events: bytes) -> list[bytes | None]:
    """The data of each event; None for the end mark."""
    if events[:6] == b"data: " and events[-2:] == b"\n\n":
        body = events[6:-2]
        if b"\n" not in body and body != b"[DONE]":
            return [body]  # the usual read: one event of one line
    found: list[bytes | None] = []
    for event in split_events(events):
        if is_done_event(event):
            found.append(None)
        elif data := event_data(event):
            found.append(data)
    return found
