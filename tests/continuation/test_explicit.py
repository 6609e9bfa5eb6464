"""What cannot be continued exactly ends with an explicit error that says why, never with a silent end (RT5, F31)."""

from typing import Any

import pytest

from router.core.kept import Budget
from router.upstream import Continuing
from tests.continuation.test_exact import CHAT, TEXT, Script, request
from tests.continuation.world import Cut, World, ask, same, world

BARRED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"seed": 7}, "seed is set"),
    (TEXT, {"presence_penalty": 0.5}, "presence_penalty is set"),
    (TEXT, {"frequency_penalty": -1}, "frequency_penalty is set"),
    (TEXT, {"repetition_penalty": 1.1}, "repetition_penalty is set"),
    (TEXT, {"logprobs": 0}, "logprobs is set"),
    (CHAT, {"logprobs": True, "top_logprobs": 2}, "logprobs is set"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format is set"),
    (TEXT, {"guided_choice": ["a", "b"]}, "guided_choice is set"),
    (TEXT, {"structured_outputs": {"regex": "a"}}, "structured_outputs is set"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is set"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice is set"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort is set"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the input is not one text"),
    (TEXT, {"echo": True}, "echo is set"),
    (TEXT, {"best_of": 2}, "best_of is set"),
    (TEXT, {"something_new": 1}, "something_new is set"),
]
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"seed": None, "n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None}),
    (CHAT, {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tools": []}),
    (CHAT, {"logprobs": False, "top_logprobs": 0, "user": "u", "metadata": {"a": "b"}, "logit_bias": {"5": 1}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "tide"}]}]}),
]


async def explicit(w: World, script: Script, path: str, body: dict[str, Any], why: str) -> None:
    script.cuts = [Cut(4)]
    told = await ask(w.http_port, path, body)
    assert told.text
    assert why in told.error
    assert not told.done
    assert not told.clean
    assert w.in_flight == 0


async def test_barred_requests_say_why() -> None:
    script = Script()
    async with world(script) as w:
        for number, (path, fields, why) in enumerate(BARRED, 1):
            await explicit(w, script, path, request(path, **fields), f"cannot be continued: {why}")
            assert w.count("not_continuable") == number
            told = await ask(w.http_port, path, request(path, **fields))
            assert told.headers["x-springtide-continuation"] == "none"
            assert b"return_token_ids" not in w.blades[0].asked[-1:]


@pytest.mark.parametrize(("path", "fields"), NEUTRAL)
async def test_fields_that_say_nothing_bar_nothing(path: str, fields: dict[str, Any]) -> None:
    script = Script()
    async with world(script) as w:
        undisturbed = await ask(w.http_port, path, request(path, **fields))
        assert undisturbed.headers["x-springtide-continuation"] == "exact"
        script.cuts = [Cut(4)]
        same(await ask(w.http_port, path, request(path, **fields)), undisturbed)


async def test_sampling_is_reported_as_of_the_same_distribution() -> None:
    script = Script(Cut(4))
    async with world(script) as w:
        body = request(TEXT, temperature=0.8)
        told = await ask(w.http_port, TEXT, body)
        assert told.done
        assert told.headers["x-springtide-continuation"] == "same-distribution"
        assert w.count("same_distribution") == 1


@pytest.mark.parametrize("engine", ["llamacpp", "sglang", ""])
async def test_engines_without_ids(engine: str) -> None:
    script = Script()
    async with world(script, engine_name=engine) as w:
        await explicit(w, script, TEXT, request(TEXT), "gives no token ids")
        assert all(b"return_token_ids" not in body for blade in w.blades for body in blade.asked)


async def test_an_engine_that_should_give_ids_and_does_not() -> None:
    """An old vLLM ignores the wish."""
    script = Script()
    async with world(script) as w:
        for blade in w.blades:
            blade.forget_ids = True
        await explicit(w, script, CHAT, request(CHAT), "the engine gave no token ids")


@pytest.mark.parametrize("continuing", [Continuing(enabled=False), Continuing(max_continuations=0)])
async def test_switched_off(continuing: Continuing) -> None:
    script = Script()
    async with world(script, continuing=continuing) as w:
        await explicit(w, script, TEXT, request(TEXT), "continue_streams is off")
        assert all(b"return_token_ids" not in body for blade in w.blades for body in blade.asked)


async def test_the_number_of_continuations_is_bounded() -> None:
    script = Script()
    async with world(script, continuing=Continuing(max_continuations=2)) as w:
        undisturbed = await ask(w.http_port, TEXT, request(TEXT))
        script.cuts = [Cut(2), Cut(2)]
        same(await ask(w.http_port, TEXT, request(TEXT)), undisturbed)
        script.cuts = [Cut(2), Cut(2), Cut(2)]
        told = await ask(w.http_port, TEXT, request(TEXT))
        assert "it has been continued 2 times" in told.error
        assert not told.done
        assert w.count("failed") == 1
        assert w.in_flight == 0


async def test_memory_is_bounded() -> None:
    """A stream for which nothing can be kept is not continued; when others end, there is room again."""
    script = Script()
    budget = Budget(20_000)
    async with world(script, continuing=Continuing(budget=budget)) as w:
        long_prompt: dict[str, Any] = {"prompt": "tide " * 4000}
        await explicit(w, script, TEXT, request(TEXT, **long_prompt), "too much is kept for other streams")
        assert budget.left == 20_000
        undisturbed = await ask(w.http_port, TEXT, request(TEXT))
        script.cuts = [Cut(4)]
        same(await ask(w.http_port, TEXT, request(TEXT)), undisturbed)
        assert budget.left == 20_000


async def test_the_clients_own_fault_is_no_reason_to_go_on() -> None:
    script = Script()
    async with world(script) as w:
        script.cuts = [Cut(3, "bad request")]
        told = await ask(w.http_port, TEXT, request(TEXT))
        assert "too long after all" in told.error
        assert not told.done
        assert sum(len(blade.asked) for blade in w.blades) == 1


@pytest.mark.slow
async def test_a_pool_without_another_worker_gives_up_in_time() -> None:
    """An engine's own error with nobody else to ask: the client is told, after the pause in which others may come."""
    script = Script()
    async with world(script, workers=1) as w:
        script.cuts = [Cut(3, "error")]
        told = await ask(w.http_port, TEXT, request(TEXT))
        assert told.error
        assert not told.done
        assert w.in_flight == 0
        assert w.dispatcher.admission.waiting("p") == 0
