"""An open-loop load over real sockets, and the proof that every answer is exact.

The client here is written apart from the code under test: plain asyncio sockets and llhttp's parser. The simulated
engine answers with tokens that depend on the prompt and the index alone: one lost, doubled or reordered token shows.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from nodeagent.engines.sim.tokens import answer_text, render_chat
from tests.system.trace import Arrival

WORDS = ("load", "follows", "the", "tide", "and", "the", "tide", "follows", "the", "load")


@dataclass(slots=True)
class Result:
    """How one request ended. `ok`: a clean end; `exact`: and the right text; `transport`: the connection broke."""

    arrival: Arrival
    status: int = 0
    text: str = ""
    done: bool = False
    error: str = ""
    transport: str = ""
    retries: int = 0
    first_token_s: float | None = None
    took_s: float = 0.0
    exact: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.done and not self.error and not self.transport


class _Stream(asyncio.Protocol):
    """Reads one chunked or sized answer; `lines` get the body as it comes."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.status = 0
        self.body = bytearray()
        self.complete = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_body_at: float | None = None
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.first_body_at is None:
            self.first_body_at = asyncio.get_running_loop().time()
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def messages(arrival: Arrival, salt: str) -> list[dict[str, str]]:
    """A unique chat whose size follows the trace (bounded: the engine's time is simulated, the bytes are not)."""
    size = min(arrival.prompt_tokens, 400)
    filler = " ".join(WORDS[(arrival.number + i) % len(WORDS)] for i in range(size // 2))
    return [{"role": "user", "content": f"{salt} request {arrival.number}: {filler}"}]


def expected(arrival: Arrival, salt: str) -> str:
    """The only right answer."""
    return answer_text(render_chat(messages(arrival, salt)), arrival.output_tokens)


async def ask(
    base: str, model: str, arrival: Arrival, *, salt: str, stream: bool = True, timeout_s: float = 60.0
) -> Result:
    """One chat completion over HTTP."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    result = Result(arrival)
    url = urlsplit(base)
    body = json.dumps(
        {
            "model": model,
            "messages": messages(arrival, salt),
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": stream,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    protocol: _Stream | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, protocol = await loop.create_connection(lambda: _Stream(head + body), url.hostname or "", url.port or 0)
            await protocol.closed
    except TimeoutError:
        result.transport = f"no end within {timeout_s:g} s"
        if protocol is not None:
            protocol.transport.abort()
    except OSError as error:
        result.transport = f"{type(error).__name__}: {error}"
    if protocol is not None:
        _read(result, protocol, stream)
        if protocol.first_body_at is not None:
            result.first_token_s = protocol.first_body_at - began
    result.took_s = loop.time() - began
    result.exact = result.ok and result.text == expected(arrival, salt)
    return result


def _read(result: Result, protocol: _Stream, stream: bool) -> None:
    result.status = protocol.status
    if not protocol.complete and not result.transport:
        result.transport = "the connection closed before the answer's end"
    raw = bytes(protocol.body)
    if result.status != 200 or not stream:
        _read_whole(result, raw)
        return
    parts: list[str] = []
    for event in raw.split(b"\n\n"):
        if not event.startswith(b"data: "):
            continue
        data = event[6:]
        if data == b"[DONE]":
            result.done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            result.error = str(chunk["error"])
            continue
        parts.extend(choice["delta"].get("content") or "" for choice in chunk["choices"])
    result.text = "".join(parts)


def _read_whole(result: Result, raw: bytes) -> None:
    try:
        whole = json.loads(raw)
    except ValueError:
        result.error = result.error or f"not JSON: {raw[:200]!r}"
        return
    if "error" in whole:
        result.error = str(whole["error"])
        return
    result.text = whole["choices"][0]["message"]["content"]
    result.done = True


@dataclass(slots=True)
class Report:
    """All results of a replay."""

    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if not result.ok]

    @property
    def inexact(self) -> list[Result]:
        return [result for result in self.results if result.ok and not result.exact]

    def explain(self) -> str:
        """The first few failures, for an assertion's message."""
        shown = [
            f"#{r.arrival.number} at {r.arrival.at_s:.2f}s status={r.status} {r.error[:200]!r} {r.transport!r}"
            for r in (self.failed + self.inexact)[:5]
        ]
        return f"{len(self.results)} requests, {len(self.failed)} failed, {len(self.inexact)} inexact: " + "; ".join(
            shown
        )


async def replay(
    arrivals: Iterable[Arrival],
    send: Callable[[Arrival], "asyncio.Future[Result] | asyncio.Task[Result]"],
) -> Report:
    """Sends each request at its time, whatever became of the others, and waits for all."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    pending = []
    for arrival in arrivals:
        delay = began + arrival.at_s - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        pending.append(send(arrival))
    return Report(list(await asyncio.gather(*pending)))
