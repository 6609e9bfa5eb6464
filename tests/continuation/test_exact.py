"""Streams cut everywhere, and whole nevertheless (RT5, RT6, F1, F3, F32)."""

import asyncio
import random
from typing import Any

import pytest

from nodeagent.engines.sim.tokens import answer_text
from router.config import Timeouts
from springtide.model.routing import RoutedWorker, RoutingDelta
from tests.continuation.world import CUTS, Cut, ask, same, world
from tests.dataplane.fakes import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def request(path: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    """A greedy request whose answer depends on `number`."""
    asked = {"prompt": f"tide {number}"} if path == TEXT else {"messages": [{"role": "user", "content": f"{number}"}]}
    return {"model": "m", "max_tokens": 8, "temperature": 0, **asked, **fields}


class Script:
    """Cuts for the requests to come; afterwards none."""

    def __init__(self, *cuts: Cut) -> None:
        self.cuts = list(cuts)

    def __call__(self, body: bytes) -> Cut | None:
        return self.cuts.pop(0) if self.cuts else None


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True}},
    "each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "ids": {"return_token_ids": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_cut_at_every_border(path: str, variant: str) -> None:
    """Before the role, before the first token, after the last, after the finish reason, before [DONE]: all the same."""
    script = Script()
    async with world(script) as w:
        undisturbed = await ask(w.http_port, path, request(path, **VARIANTS[variant]))
        assert undisturbed.done
        borders = undisturbed.raw.count(b"\n\n")
        for how in ("close", "half", "error", "drained", "reset"):
            for after in range(borders):
                script.cuts = [Cut(after, how)]
                told = await ask(w.http_port, path, request(path, **VARIANTS[variant]))
                same(told, undisturbed)
                assert (b"token_ids" in told.raw) == (variant == "ids")
        assert w.in_flight == 0
        assert w.dispatcher.continuing.budget.left == 256 * 1024 * 1024


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_cut_again_and_again(path: str) -> None:
    """Every part of a stream is lost after one more event, until none is left."""
    async with world(lambda body: Cut(2)) as w:
        told = await ask(w.http_port, path, request(path, max_tokens=12, stream_options={"include_usage": True}))
        w.blades[0].plan = Script()
        for blade in w.blades:
            blade.plan = Script()
        same(told, await ask(w.http_port, path, request(path, max_tokens=12, stream_options={"include_usage": True})))
        assert sum(blade.cuts for blade in w.blades) >= 6


@pytest.mark.slow
async def test_hundreds_of_streams_lost_at_random() -> None:
    """Eight hundred streams, each lost at random tokens and in random ways, a seventh of them again and again."""
    rng = random.Random(20)
    kinds = [how for how in CUTS if how != "stall"]

    def plan(body: bytes) -> Cut | None:
        return Cut(rng.randrange(30), rng.choice(kinds)) if rng.random() < 0.8 else None

    async with world(plan, "--max-num-seqs", "64", workers=24) as w:
        gate = asyncio.Semaphore(48)

        async def one(number: int) -> None:
            path = TEXT if number % 3 else CHAT
            fields = list(VARIANTS.values())[number % 4]
            tokens = rng.randrange(1, 40)
            body = request(path, number, max_tokens=tokens, **fields)
            async with gate:
                told = await ask(w.http_port, path, body)
            assert not told.error, (number, told.error)
            assert told.done
            assert told.clean
            if path == TEXT:
                assert told.text == answer_text(f"tide {number}", tokens)
            assert len(told.text) == 7 * tokens
            assert told.finish == ["length"]
            assert told.roles == (path == CHAT)
            assert len(told.names) == 1
            if told.usage:
                assert [usage["completion_tokens"] for usage in told.usage] == [tokens]

        async with asyncio.TaskGroup() as group:
            for number in range(800):
                group.create_task(one(number))
        assert sum(blade.cuts for blade in w.blades) > 500
        assert w.count("exact") > 400
        assert w.in_flight == 0
        assert w.dispatcher.admission.demand("p").failed_total == 0


async def test_a_stalled_stream_goes_on_elsewhere() -> None:
    """F32"""
    script = Script()
    async with world(script, timeouts=Timeouts(idle_timeout_s=0.2)) as w:
        undisturbed = await ask(w.http_port, CHAT, request(CHAT))
        script.cuts = [Cut(4, "stall")]
        same(await ask(w.http_port, CHAT, request(CHAT)), undisturbed)
        assert w.count("exact") == 1
        assert w.in_flight == 0


STOPS = ("one char", "two tokens", "long", "never")


def _stops(text: str, kind: str) -> list[str]:
    """Stop strings made of the answer itself: inside a token, over the border of two, over three."""
    at = 5 * 7
    return {
        "one char": [text[at + 2]] if text.index(text[at + 2]) == at + 2 else [text[at : at + 6]],
        "two tokens": [text[at + 3 : at + 9], "zzz"],
        "long": ["zzz", text[at - 9 : at + 9]],
        "never": ["no such thing", "w w w"],
    }[kind]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_over_the_cut(path: str, kind: str, include: bool) -> None:
    """A stop string that begins before the cut ends the answer behind it, where it would have ended."""
    script = Script()
    async with world(script) as w:
        plain = request(path, max_tokens=10)
        text = (await ask(w.http_port, path, plain)).text
        body = {
            **plain,
            "stop": _stops(text, kind),
            "stream_options": {"include_usage": True},
            "include_stop_str_in_output": include,
        }
        undisturbed = await ask(w.http_port, path, body)
        assert undisturbed.finish == ["length" if kind == "never" else "stop"]
        for after in range(undisturbed.raw.count(b"\n\n")):
            script.cuts = [Cut(after)]
            same(await ask(w.http_port, path, body), undisturbed)
        script.cuts = [Cut(3), Cut(1), Cut(1), Cut(1)]
        same(await ask(w.http_port, path, body), undisturbed)
        assert w.in_flight == 0


async def test_a_natural_end_and_a_chat_without_a_bound() -> None:
    """The resumed part ends where the answer ends by itself; its bound is what fits the context."""
    script = Script()
    async with world(script, "--natural-length", "12", "--max-model-len", "4096") as w:
        variants: list[dict[str, Any]] = [
            {"max_tokens": None},
            {"max_tokens": 100},
            {"max_tokens": 100, "min_tokens": 3},
        ]
        for fields in variants:
            body = request(CHAT, stream_options={"include_usage": True}, **fields)
            undisturbed = await ask(w.http_port, CHAT, body)
            assert undisturbed.finish == ["stop"]
            for after in (1, 2, 7, 12):
                script.cuts = [Cut(after)]
                same(await ask(w.http_port, CHAT, body), undisturbed)


@pytest.mark.slow
async def test_the_next_part_is_of_the_same_weights() -> None:
    """A worker of the same weight version takes it, or nobody: tokens of two models never make one answer."""
    script = Script()
    async with world(script, workers=6) as w:
        undisturbed = await ask(w.http_port, TEXT, request(TEXT))

        def weights(revision: int, *versions: str) -> None:
            workers = [
                RoutedWorker(f"w{number}", "p", revision, f"127.0.0.1:{w.blades[number].port}", weight_version=version)
                for number, version in enumerate(versions)
            ]
            w.dispatcher.delta(RoutingDelta("s", revision, workers=tuple(workers)))

        weights(2, "a", "b", "b", "b", "b", "a")
        script.cuts = [Cut(4)]
        asked = {number: len(w.blades[number].asked) for number in range(6)}
        same(await ask(w.http_port, TEXT, request(TEXT)), undisturbed)
        taken = [number for number in range(6) if len(w.blades[number].asked) > asked[number]]
        assert len(taken) == 2
        assert (0 in taken) == (5 in taken)
        script.cuts = [Cut(4)]
        weights(3, *"cdefgh")
        asking = asyncio.create_task(ask(w.http_port, TEXT, request(TEXT)))
        await until(lambda: w.dispatcher.admission.waiting("p") == 1)
        weights(4, *"iiiiii")
        told = await asking
        assert "no other worker with the same weights" in told.error
        assert not told.done


async def test_prompts_as_ids_and_other_shapes() -> None:
    """Token-in prompts, one prompt in a list, and a pool asked for by another name than its engine's."""
    script = Script()
    async with world(script) as w:
        bodies: list[dict[str, Any]] = [
            {"prompt": ["tide"]},
            {"prompt": [16777313, 16777314]},
            {"prompt": [[16777313, 16777314]]},
            {"prompt": "tide", "model": "p"},
        ]
        for fields in bodies:
            body = request(TEXT, **fields)
            undisturbed = await ask(w.http_port, TEXT, body)
            assert undisturbed.done, undisturbed.error
            script.cuts = [Cut(4)]
            same(await ask(w.http_port, TEXT, body), undisturbed)


async def test_the_next_part_waits_for_a_worker() -> None:
    """With its only worker gone the stream waits, and goes on once another one is there."""
    script = Script()
    async with world(script, workers=1) as w:
        undisturbed = await ask(w.http_port, TEXT, request(TEXT))
        script.cuts = [Cut(4)]
        asking = asyncio.create_task(ask(w.http_port, TEXT, request(TEXT)))
        await until(lambda: w.dispatcher.admission.waiting("p") == 1)
        new = RoutedWorker("w0", "p", 2, f"127.0.0.1:{w.blades[0].port}")
        w.dispatcher.delta(RoutingDelta("s", 2, workers=(new,)))
        same(await asking, undisturbed)
