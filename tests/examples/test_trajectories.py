"""examples/trajectories: formats, tools, the loop, and all of it through a router on the simulated engine; offline."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.trajectories import tools as toolbox
from examples.trajectories.formats import Harmony, Hermes, Tool, ToolCall
from examples.trajectories.generate import HERE, SYSTEM, Limits, Server, generate, main, questions, run
from nodeagent.engines.sim.tokens import answer_text
from tests.system.conftest import TIMING, apply_demo
from tests.system.stack import Stack

CALL = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "spring tide"}'
THINKS = "<|channel|>analysis<|message|>I should search.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Twice a month."


class Scripted:
    """An OpenAI server that answers completions from a list, and remembers what it was asked."""

    def __init__(self, *answers: tuple[int, dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self._send(*outer.answers.pop(0))

            def _send(self, status: int, body: dict[str, Any]) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.send_header("retry-after", "0")
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def scripted() -> Iterator[list[Scripted]]:
    made: list[Scripted] = []
    yield made
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def said(text: str, stop: str = "", finish: str = "stop") -> tuple[int, dict[str, Any]]:
    choice = {"text": text, "finish_reason": finish, "stop_reason": stop or None}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def offline() -> toolbox.Tools:
    return toolbox.offline(HERE / "pages.json")


def test_a_call_is_executed_and_fed_back(scripted: list[Scripted]) -> None:
    """3.10: generation stops at <|call|>, the tool runs, the text goes on; a busy server is asked again."""
    busy = (503, {"error": {"message": "no worker"}})
    server = Scripted(said(THINKS + CALL, "<|call|>"), busy, said(ANSWER, "<|return|>"))
    scripted.append(server)
    found = generate(Server(server.url, "", "EMPTY", 10), Harmony(), offline(), 0, "How often?", Limits())
    assert (found.status, found.answer, found.error) == ("answered", "Twice a month.", "")
    assert [turn.tool for turn in found.turns] == ["search", ""]
    assert "https://tides.example/spring" in found.turns[0].result
    first, _, last = server.asked
    assert first["stop"] == ["<|call|>", "<|return|>"]
    assert first["skip_special_tokens"] is False
    assert last["prompt"].startswith(first["prompt"] + THINKS + CALL + "<|call|>"), "a prefix that a cache can use"
    told = last["prompt"].removeprefix(first["prompt"] + THINKS + CALL + "<|call|>")
    assert told.startswith("<|start|>functions.search to=assistant<|channel|>commentary<|message|>Spring and neap")
    assert told.endswith("<|end|><|start|>assistant")
    assert (found.prompt_tokens, found.completion_tokens) == (10, 6)


def test_ends(scripted: list[Scripted], tmp_path: Path) -> None:
    """length, turns and failed are said; a failed one does not end the others."""
    many = [said(CALL, "<|call|>")] * 2
    server = Scripted(said("cut", finish="length"), *many, (400, {"error": {"message": "too long"}}))
    scripted.append(server)
    done = run(
        Server(server.url, "m", "EMPTY", 10),
        Harmony(),
        offline(),
        ["a", "b", "c"],
        1,
        Limits(max_turns=2),
        tmp_path / "out",
    )
    assert [found.status for found in done] == ["length", "turns", "failed"]
    assert "too long" in done[2].error
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["length", "turns", "failed"]


def test_hermes() -> None:
    """The other format: a call, an answer after thinking, and a call that is none."""
    form = Hermes()
    prompt = form.begin("Be brief.", offline().described, "Why?")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert '"name": "fetch"' in prompt
    body = '\n{"name": "fetch", "arguments": {"url": "https://tides.example/power"}}\n'
    call = form.call("<tool_call>" + body, "</tool_call>")
    assert call == ToolCall("fetch", {"url": "https://tides.example/power"})
    assert "Rance" in offline().run(call)
    assert form.call("Because.", "<|im_end|>") is None
    assert form.answer("<think>hm</think>\nBecause.") == "Because."
    broken = form.call("<tool_call>{", "</tool_call>")
    assert broken is not None
    assert "no JSON" in offline().run(broken)


def test_tools_say_what_is_wrong() -> None:
    """A model that errs is told, and goes on."""
    tools = offline()
    assert "there is no tool dig" in tools.run(ToolCall("dig", {}))
    assert "query must be given" in tools.run(ToolCall("search", {"q": "x"}))
    assert tools.run(ToolCall("search", {"query": "zzzz"})) == "Nothing found."
    assert tools.run(ToolCall("fetch", {"url": "https://nowhere"})).startswith("Error:")


def test_the_web_tools_ask_serper_and_jina(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go into headers; results are told as titles, addresses and texts; other addresses are not read."""
    asked: list[tuple[str, Any, Any]] = []

    def get(url: str, headers: Any, body: Any = None) -> str:
        asked.append((url, dict(headers), body))
        return json.dumps({"organic": [{"title": "T", "link": "https://t", "snippet": "S"}]}) if body else "the page"

    monkeypatch.setattr(toolbox, "_get", get)
    tools = toolbox.web({"SERPER_API_KEY": "s", "JINA_API_KEY": "j"})
    assert tools.run(ToolCall("search", {"query": "tide"})) == "T\nhttps://t\nS"
    assert tools.run(ToolCall("fetch", {"url": "https://t"})) == "the page"
    assert "no web address" in tools.run(ToolCall("fetch", {"url": "file:///etc/passwd"}))
    assert asked[0][1]["X-API-KEY"] == "s"
    assert asked[1][0].endswith("/https://t")
    assert len(asked) == 2
    with pytest.raises(ValueError, match="SERPER_API_KEY is not set"):
        toolbox.web({})


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with one line."""
    assert main(["--num-samples", "0"]) == 2
    assert main(["--dataset", str(tmp_path / "none"), "--tools", "offline"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert len(questions("sample", 12)) == 12


class SimFormat:
    """The simulated engine writes words like `w0a3f7 `: one that ends in 7 stands for a tool call."""

    stops = ("7 ",)

    def begin(self, system: str, tools: Sequence[Tool], question: str) -> str:
        return f"{system} {question}"

    def call(self, text: str, stop: str) -> ToolCall | None:
        return ToolCall("search", {"query": "tide moon"}) if stop == "7 " else None

    def after_call(self, text: str, call: ToolCall, result: str) -> str:
        return f"{text}7 [{result}]"

    def answer(self, text: str) -> str:
        return text


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    found = Stack(tmp_path, gpus=2, timing=TIMING)
    try:
        yield found.start()
    finally:
        found.stop()
        assert found.strays() == []


@pytest.mark.slow
def test_through_the_router(stack: Stack, tmp_path: Path) -> None:
    """3.10: eight samples, four at a time, over a real router and two workers; every turn is what the engine writes."""
    apply_demo(stack, min_workers=2, max_workers=2)
    url = tmp_path / ".scheduler_url"
    url.write_text(stack.http + "\n")
    server = Server(stack.http, "", "EMPTY", 60)
    asked = questions("sample", 8)
    limits = Limits(max_turns=4, max_tokens=40)
    done = run(server, SimFormat(), offline(), asked, 4, limits, tmp_path / "out.jsonl")
    assert {found.status for found in done} <= {"length", "turns"}, [found.error for found in done]
    calls = 0
    for found in done:
        prompt = SimFormat().begin(SYSTEM, (), found.question)
        for turn in found.turns:
            whole = answer_text(prompt, limits.max_tokens)
            assert turn.text == whole.partition("7 ")[0]
            calls += bool(turn.tool)
            prompt += SimFormat().after_call(turn.text, ToolCall("search", {}), turn.result)
    assert calls > 0
    code = main(
        [
            *("--scheduler-url", str(url), "--tools", "offline", "--format", "hermes", "--num-samples", "3"),
            *("--max-tokens", "20", "--output", str(tmp_path / "main.jsonl")),
        ]
    )
    assert code == 0
    assert len((tmp_path / "main.jsonl").read_text().splitlines()) == 3
