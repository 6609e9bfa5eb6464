"""The pure part against a model of a real engine: characters over several tokens, text that stays behind for stop
strings, special tokens, several tokens in one event. Whatever is cut wherever, the client has what it would have had.
"""

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.core.kept import MAX_STREAM_BYTES, Budget, Kept
from router.core.sequel import Diverged, Sequel, Unfit, align, find_stop, left, resumed_body
from router.core.terms import Terms, terms

LETTERS = "ab \n😀é漢"


@dataclass
class Engine:
    """Answers token by token as vLLM does. Token `i` of the answer has the id `i + 1`; the prompt is 100, 101."""

    tokens: list[bytes]

    def text_of(self, ids: list[int]) -> str:
        """With special tokens, which a stream never shows."""
        pieces = [self.tokens[token_id - 1] or b"<|special|>" for token_id in ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def steps(self, start: int, body: dict[str, Any]) -> list[tuple[str, list[int], str | None, str | None]]:
        """Text, ids, finish reason and stop reason of each step of a request that begins with token `start`."""
        stops = body.get("stop") or []
        include = bool(body.get("include_stop_str_in_output"))
        hold = max((len(stop) for stop in stops), default=1) - 1 if not include else 0
        minimum = body.get("min_tokens", 0)
        end = min(len(self.tokens), start + body["max_tokens"])
        pending, text, sent = b"", "", 0
        found = []
        for at in range(start, end):
            pending += self.tokens[at]
            before = len(text)
            try:
                text += pending.decode()
                pending = b""
            except UnicodeDecodeError:
                pass
            hit = find_stop(text, before, stops) if len(text) > before and at + 1 - start > minimum else None
            finish = "stop" if hit else "length" if at + 1 == end else None
            if hit:
                text = text[: hit[0] if include else hit[1]]
            to = len(text) if finish else max(sent, len(text) - hold)
            found.append((text[sent:to], [at + 1], finish, hit[2] if hit else None))
            sent = max(sent, to)
            if finish:
                break
        return found

    def events(self, start: int, body: dict[str, Any], rng: random.Random, chat: bool) -> list[dict[str, Any]]:
        """Steps as events, some of them joined."""
        joined: list[tuple[str, list[int], str | None, str | None]] = []
        for step in self.steps(start, body):
            if joined and rng.random() < 0.3:
                last = joined.pop()
                joined.append((last[0] + step[0], last[1] + step[1], step[2], step[3]))
            else:
                joined.append(step)
        events: list[dict[str, Any]] = []
        for number, (text, ids, finish, stop) in enumerate(joined):
            choice: dict[str, Any] = {"index": 0}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            choice |= {"finish_reason": finish, "stop_reason": stop, "token_ids": ids}
            if not number and not chat:
                choice["prompt_token_ids"] = [100, 101]
            events.append({"id": "x", "choices": [choice]})
        if chat:
            role: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            events.insert(0, {"id": "x", "choices": [role], "prompt_token_ids": [100, 101]})
        return events


@dataclass
class Client:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: object = None

    def read(self, raw: bytes, chat: bool) -> None:
        for event in raw.split(b"\n\n")[:-1]:
            (choice,) = json.loads(event[6:])["choices"]
            part = choice["delta"] if chat else choice
            self.text += part["content" if chat else "text"]
            self.ids += choice.get("token_ids", [])
            self.finish = choice.get("finish_reason") or self.finish
            self.stop = choice.get("stop_reason") or self.stop


def raw(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _answer(rng: random.Random) -> list[bytes]:
    """Text cut into tokens anywhere, in the middle of characters too."""
    whole = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(4, 40))).encode()
    cuts = sorted({0, len(whole), *(rng.randrange(len(whole)) for _ in range(rng.randrange(1, 40)))})
    tokens = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    if rng.random() < 0.3:
        borders = [at for at in range(len(tokens)) if _whole(b"".join(tokens[:at]))]
        tokens.insert(rng.choice(borders), b"")  # a special token
    return tokens


def _whole(raw: bytes) -> bool:
    return not raw.decode("utf-8", "replace").endswith("\ufffd")


@pytest.mark.parametrize("seed", range(8))
async def test_any_answer_cut_anywhere_is_whole(seed: int) -> None:
    """RT5: 250 answers a seed, each cut up to five times."""
    rng = random.Random(seed)
    for _ in range(250):
        engine = Engine(_answer(rng))
        chat = rng.random() < 0.5
        whole = b"".join(engine.tokens).decode()
        body: dict[str, Any] = {"max_tokens": rng.randrange(1, len(engine.tokens) + 3), "temperature": 0}
        body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        if rng.random() < 0.7:
            at = rng.randrange(len(whole))
            body["stop"] = [whole[at : at + rng.randrange(1, 7)], "never"]
            body["include_stop_str_in_output"] = rng.random() < 0.3
        if rng.random() < 0.3:
            body["min_tokens"] = rng.randrange(body["max_tokens"] + 1)
        if rng.random() < 0.4:
            body["return_token_ids"] = True
        await _one(engine, body, chat, rng)


async def _one(engine: Engine, body: dict[str, Any], chat: bool, rng: random.Random) -> None:
    asked = terms(chat, body, "vllm")
    assert isinstance(asked, Terms)
    undisturbed = Client()
    for event in engine.events(0, body, random.Random(1), chat):
        undisturbed.read(raw(event), chat)
    budget = Budget(10_000_000)
    kept, told = Kept(asked, budget), Client()
    events = engine.events(0, body, rng, chat)
    cut = rng.randrange(len(events) + 1)
    at = 0
    while at < cut:  # one or several events in a read
        step = rng.randrange(1, 4)
        told.read(kept.feed(b"".join(map(raw, events[at : min(cut, at + step)]))), chat)
        at += step
    assert bool(told.ids) <= asked.ids_visible
    kept.settle()
    for _ in range(5):
        if kept.finish is not None:
            break
        if not kept.prompt:  # nothing had come: an ordinary retry
            return

        async def text_of(ids: list[int]) -> str:
            return engine.text_of(ids)

        try:
            withheld = await align(kept, asked, text_of)
        except Unfit:
            if b"" not in engine.tokens:
                raise
            return  # an explicit error: a special token among text that was held back
        if left(asked, kept) == 0:
            told.text += withheld
            told.finish = "length"
            break
        again = json.loads(resumed_body(asked, kept, None))
        assert again["prompt"][:2] == [100, 101]
        assert again["prompt"][2:] == list(range(1, len(again["prompt"]) - 1))
        sequel = Sequel(asked, kept, withheld)
        events = engine.events(len(again["prompt"]) - 2, again, rng, chat=False)
        for event in events[: rng.randrange(len(events) + 1)] if rng.random() < 0.7 else events:
            try:
                piece = sequel.read(event)
            except Diverged:
                if not asked.min_tokens:
                    raise
                return  # an explicit error, and only where nobody can know
            if piece is not None:
                told.text += piece.text
                told.ids += piece.ids if asked.ids_visible else []
                told.finish, told.stop = piece.finish_reason or told.finish, piece.stop_reason or told.stop
            if sequel.stopped:
                break
    if kept.finish is None and told.finish is None:  # five parts were not enough
        assert undisturbed.text.startswith(told.text)
        return
    assert (told.text, told.finish, told.stop) == (undisturbed.text, undisturbed.finish, undisturbed.stop)
    if asked.ids_visible:
        assert told.ids[: len(undisturbed.ids)] == undisturbed.ids
    kept.release()
    assert budget.left == 10_000_000


def test_ids_that_the_client_has_seen_must_come_again() -> None:
    asked = terms(False, {"prompt": "x", "max_tokens": 9, "return_token_ids": True}, "vllm")
    assert isinstance(asked, Terms)
    kept = Kept(asked, Budget(1_000_000))
    kept.open([100])
    kept.note([1], True, "a")
    kept.note([2], False, "")
    kept.cut()
    assert kept.owed == [2]
    with pytest.raises(Diverged):
        Sequel(asked, kept).read({"choices": [{"text": "é", "token_ids": [3]}]})


def test_one_long_stream_stops_being_kept_and_gives_everything_back() -> None:
    asked = terms(True, {"messages": [{"role": "user", "content": "x"}]}, "sim")
    assert isinstance(asked, Terms)
    budget = Budget(4 * MAX_STREAM_BYTES)
    kept = Kept(asked, budget)
    first = {"id": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1]}
    event = raw({"id": "x", "choices": [{"delta": {"content": "x"}, "token_ids": [123456789]}]})
    kept.feed(raw(first))
    for _ in range(MAX_STREAM_BYTES // 10 + 5000):
        assert b"token_ids" not in kept.feed(event)
        assert len(kept.ids) <= MAX_STREAM_BYTES + 20
    assert kept.spoiled == "it has become too long to keep"
    assert budget.left == 4 * MAX_STREAM_BYTES
    assert not kept.ids


def test_a_parser_of_the_engine_bars() -> None:
    """Ids without text of the answer's own: reasoning, or a tool call in the making."""
    asked = terms(True, {"messages": [{"role": "user", "content": "x"}]}, "vllm")
    assert isinstance(asked, Terms)
    kept = Kept(asked, Budget(1_000_000))
    first = {"id": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1]}
    thought = {"id": "x", "choices": [{"delta": {"reasoning": "hm"}, "token_ids": [5]}]}
    kept.feed(raw(first))
    assert b"token_ids" not in kept.feed(raw(thought))
    assert "reasoning" in kept.spoiled


def test_text_that_looks_like_ids_is_left_alone() -> None:
    asked = terms(True, {"messages": [{"role": "user", "content": "x"}]}, "vllm")
    assert isinstance(asked, Terms)
    kept = Kept(asked, Budget(1_000_000))
    first = {"id": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1]}
    said = ',"token_ids":[1,2],"prompt_token_ids":[3]'
    kept.feed(raw(first))
    shown = json.loads(kept.feed(raw({"id": "x", "choices": [{"delta": {"content": said}, "token_ids": [5]}]}))[6:])
    assert shown["choices"] == [{"delta": {"content": said}}]
    assert kept.answer_ids() == [5]
    assert asyncio.run(_nothing_withheld(kept, asked)) == ""


async def _nothing_withheld(kept: Kept, asked: Terms) -> str:
    async def text_of(ids: list[int]) -> str:
        raise AssertionError("no question is needed")

    return await align(kept, asked, text_of)
