"""Trajectories with tools over /v1/completions: `python -m examples.trajectories.generate --help`.

Each sample is a question. The model writes until it calls a tool (generation stops at the call's token), the tool runs
here, its result is appended, and the model goes on, until it answers. One line of JSON for each sample. Needs only
Python's own library and a server of the OpenAI API.
"""

import argparse
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.trajectories import tools as toolbox
from examples.trajectories.formats import FORMATS, Format, format_of

HERE = Path(__file__).parent
SYSTEM = "Answer the question. Search the web and read pages until you are sure; name the pages that you relied on."
RETRIES = 8
MAX_PAUSE_S = 30.0


@dataclass
class Turn:
    """One thing the model wrote, and what the tool answered."""

    text: str
    tool: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""


@dataclass
class Trajectory:
    """One sample. `status`: answered, length (the model was cut), turns (too many calls), failed."""

    number: int
    question: str
    status: str = "failed"
    answer: str = ""
    error: str = ""
    turns: list[Turn] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    took_s: float = 0.0


class ServerError(Exception):
    """The server refused, or did not answer, for good."""


class Server:
    """POST /v1/completions. What may be tried again (busy, scaling up, gone) is, as long as the server says."""

    def __init__(self, url: str, model: str, api_key: str, timeout_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        found = [entry["id"] for entry in self._ask("/v1/models", None)["data"]]
        if len(found) != 1:
            raise ServerError(f"--model is needed; the server has {', '.join(found) or 'none'}")
        return str(found[0])

    def complete(self, prompt: str, stops: Sequence[str], max_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stop": list(stops), **options}
        return self._ask("/v1/completions", body)

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(RETRIES):
            try:
                request = urllib.request.Request(self._url + path, data, self._headers)
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    found: dict[str, Any] = json.load(answer)
                    return found
            except urllib.error.HTTPError as error:
                words = error.read(2000).decode(errors="replace")
                if error.code not in (429, 500, 502, 503, 504) or attempt == RETRIES - 1:
                    raise ServerError(f"{error.code}: {words}") from None
                after = error.headers.get("retry-after", "")
                pause_s = float(after) if after.isdigit() else 2.0**attempt
            except (OSError, ValueError) as error:
                if attempt == RETRIES - 1:
                    raise ServerError(str(error)) from None
                pause_s = 2.0**attempt
            time.sleep(min(pause_s, MAX_PAUSE_S))
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class Limits:
    max_turns: int = 20
    max_tokens: int = 4096
    temperature: float = 1.0


def generate(
    server: Server, form: Format, tools: toolbox.Tools, number: int, question: str, limits: Limits
) -> Trajectory:
    """One trajectory; it never raises: what went wrong is in it."""
    result = Trajectory(number, question)
    began = time.monotonic()
    prompt = form.begin(SYSTEM, tools.described, question)
    # Engines leave special tokens out of texts unless they are told; the format's own marks are such tokens.
    options = {"temperature": limits.temperature, "skip_special_tokens": False}
    try:
        for _ in range(limits.max_turns):
            answer = server.complete(prompt, form.stops, limits.max_tokens, options)
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            result.prompt_tokens += usage.get("prompt_tokens") or 0
            result.completion_tokens += usage.get("completion_tokens") or 0
            text = str(choice["text"])
            turn = Turn(text)
            result.turns.append(turn)
            if choice.get("finish_reason") == "length":
                result.status = "length"
                break
            call = form.call(text, str(choice.get("stop_reason") or ""))
            if call is None:
                result.status, result.answer = "answered", form.answer(text)
                break
            turn.tool, turn.arguments = call.name, call.arguments
            turn.result = tools.run(call)
            prompt += form.after_call(text, call, turn.result)
        else:
            result.status = "turns"
    except (ServerError, KeyError, IndexError, TypeError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.took_s = round(time.monotonic() - began, 3)
    return result


def questions(dataset: str, count: int) -> list[str]:
    """`sample`, or a file with {"question": ...} on each line; again from the start when there are too few."""
    path = HERE / "sample.jsonl" if dataset == "sample" else Path(dataset)
    found = [str(json.loads(line)["question"]) for line in path.read_text().splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{path} has no questions")
    return [found[number % len(found)] for number in range(count)]


def scheduler_url(given: str) -> str:
    """An address, or the file that `serve-slurm --advertise-file` wrote."""
    return given if "://" in given else Path(given).read_text().strip()


def run(
    server: Server,
    form: Format,
    tools: toolbox.Tools,
    asked: Sequence[str],
    concurrency: int,
    limits: Limits,
    out: Path,
) -> list[Trajectory]:
    """All samples, `concurrency` at a time, each written when it is done."""
    lock = threading.Lock()
    done: list[Trajectory] = []
    with out.open("w") as file, ThreadPoolExecutor(concurrency) as pool:

        def one(number: int) -> None:
            found = generate(server, form, tools, number, asked[number], limits)
            with lock:
                done.append(found)
                file.write(json.dumps(asdict(found), ensure_ascii=False) + "\n")
                file.flush()
                print(f"{len(done)}/{len(asked)}  #{number} {found.status}, {len(found.turns)} turns", file=sys.stderr)

        list(pool.map(one, range(len(asked))))
    return sorted(done, key=lambda found: found.number)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every sample came to an end, 1 when one failed, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="trajectories", description=__doc__.partition("\n")[0])
    parser.add_argument("--scheduler-url", default="http://127.0.0.1:8780", help="address, or a file with it")
    parser.add_argument("--model", default="", help="default: the only one that is served")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--dataset", default="sample", help="sample, or a file of JSON lines with `question`")
    parser.add_argument("--num-samples", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--tools", default="web", help="web, offline, or a JSON file of pages")
    parser.add_argument("--format", choices=FORMATS, default="harmony")
    parser.add_argument("--reasoning-effort", choices=("low", "medium", "high"), default="medium")
    parser.add_argument("--max-turns", type=int, default=Limits.max_turns)
    parser.add_argument("--max-tokens", type=int, default=Limits.max_tokens)
    parser.add_argument("--temperature", type=float, default=Limits.temperature)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one completion")
    parser.add_argument("--output", type=Path, default=Path("trajectories.jsonl"))
    given = parser.parse_args(argv)
    try:
        if given.num_samples < 1 or given.concurrency < 1:
            raise ValueError("--num-samples and --concurrency must be at least 1")
        asked = questions(given.dataset, given.num_samples)
        tools = toolbox.web() if given.tools == "web" else toolbox.offline(_pages(given.tools))
        server = Server(scheduler_url(given.scheduler_url), given.model, given.api_key, given.timeout_s)
    except (OSError, ValueError, KeyError, ServerError) as error:
        print(f"trajectories: {error}", file=sys.stderr)
        return 2
    limits = Limits(given.max_turns, given.max_tokens, given.temperature)
    form = format_of(given.format, given.reasoning_effort)
    done = run(server, form, tools, asked, given.concurrency, limits, given.output)
    counts = {
        status: sum(found.status == status for found in done) for status in ("answered", "length", "turns", "failed")
    }
    calls = sum(bool(turn.tool) for found in done for turn in found.turns)
    tokens = sum(found.completion_tokens for found in done)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{len(done)} samples: {told}; {calls} tool calls, {tokens} tokens. {given.output}")
    return 1 if counts["failed"] else 0


def _pages(name: str) -> Path:
    return HERE / "pages.json" if name == "offline" else Path(name)


if __name__ == "__main__":
    sys.exit(main())
