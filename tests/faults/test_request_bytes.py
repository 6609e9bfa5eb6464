"""The bytes of requests in every cut, with random damage, and with two ideas of where a body ends.

RT2 and DESIGN rule 15, F8: against a real router and a real shim; nothing worse than a 4xx, never an answer too many,
never a request that an engine sees and nobody was answered for, never a connection that stays open for ever.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httptools
import pytest
import uvloop

from nodeagent.engines.sim.tokens import answer_text
from tests.faults.blows import FaultStack, engine_metrics
from tests.faults.conftest import TIMING

QUICK = ("--startup-s", "0.05", "--decode-base-ms", "0.2", "--decode-per-request-ms", "0", "--max-num-seqs", "256")
FRONTS = ("router", "shim")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    """One stack for all of this module; each test leaves it serving."""
    made = FaultStack(tmp_path_factory.mktemp("bytes"), gpus=1, timing=TIMING)
    try:
        made.start()
        made.pool(engine_args=QUICK)
        yield made
    finally:
        made.stop()
        assert made.strays() == []


@pytest.fixture(autouse=True)
def still_serves(stack: FaultStack) -> Iterator[None]:
    """Nobody died, nothing counts as in flight, and a good request is answered."""
    before = stack.workers("ACTIVE")[0].incarnation
    yield
    assert all(process.poll() is None for process in stack.processes.values())
    assert stack.ask(timeout_s=10).exact
    stack.check_whole(active=1, timeout_s=10)
    assert stack.workers("ACTIVE")[0].incarnation == before


def port_of(stack: FaultStack, front: str) -> int:
    return stack.http_port if front == "router" else int(stack.workers("ACTIVE")[0].endpoint.rpartition(":")[2])


class Answers:
    """Reads whole answers; `statuses` and `bodies` in order."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.whole = True
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises HttpParserError for anything that is no answer."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.whole = False
        self._body = b""

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.whole = True
        if self._status != 100:
            self.statuses.append(self._status)
            self.bodies.append(self._body)

    def told(self) -> list[tuple[int, str | None, list[str]]]:
        """What does not depend on ids and times: status, text, names of fields."""
        found = []
        for status, body in zip(self.statuses, self.bodies, strict=True):
            parsed = json.loads(body) if body.startswith(b"{") else {}
            choices = parsed.get("choices") or [{}]
            found.append((status, choices[0].get("text"), sorted(parsed)))
        return found


async def send(port: int, pieces: Iterable[bytes], *, quiet_s: float = 0.0, pause_s: float = 0.002) -> Answers:
    """Sends the pieces as reads of their own, then reads to the end. `quiet_s`: what still waits for more after so long
    is told that no more comes; it must close then."""
    answers = Answers()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> None:
        while data := await reader.read(65536):
            answers.feed(data)

    reading = asyncio.create_task(read())
    try:
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(pause_s)
            if reading.done():
                break
            writer.write(piece)
        if quiet_s:
            await asyncio.wait([reading], timeout=quiet_s)
            if not reading.done() and writer.can_write_eof():
                writer.write_eof()
        async with asyncio.timeout(20):
            await reading
    except ConnectionError:
        pass  # it has answered, closed, and then got more
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.close()
    return answers


async def many(jobs: Sequence[Any], at_a_time: int = 32) -> list[Answers]:
    """Runs coroutines, so many at a time."""
    gate = asyncio.Semaphore(at_a_time)

    async def one(job: Any) -> Answers:
        async with gate:
            found: Answers = await job
            return found

    return await asyncio.gather(*map(one, jobs))


def completion(prompt: str, tokens: int = 2) -> bytes:
    return json.dumps({"model": "demo", "prompt": prompt, "max_tokens": tokens}).encode()


def sized(body: bytes, head: bytes = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n") -> bytes:
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes, size: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: Chunked\r\n\r\n"
    return head + b"".join(b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in parts) + b"0\r\n" + trailer + b"\r\n"


LAST = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
PIPELINE = b"".join(
    (
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        chunked(completion("chunks"), 20, b';name=value;other="a b"', b"x-checksum: 1\r\ncontent-length: 7\r\n"),
        b"\r\n",  # some clients end a body with it
        sized(completion("absolute"), b"POST http://x:1/v1/completions?a=b HTTP/1.1\r\nhost: y\r\n"),
        b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n",
        sized(b"{", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-odd: content-length: 9\r\n"),
        sized(completion("expected"), b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"),
        LAST,
    )
)


@pytest.mark.parametrize("front", FRONTS)
def test_a_pipeline_split_at_every_byte(stack: FaultStack, front: str) -> None:
    """Chunk extensions, trailers, absolute form, refusals in between: the same answers however the bytes come."""
    port = port_of(stack, front)

    async def all_splits() -> list[Answers]:
        splits = [[PIPELINE[:at], PIPELINE[at:]] for at in range(0, len(PIPELINE), 1 if front == "router" else 3)]
        splits.append([PIPELINE[at : at + 1] for at in range(len(PIPELINE))])
        splits.append([PIPELINE[at : at + 7] for at in range(0, len(PIPELINE), 7)])
        return await many([send(port, pieces, pause_s=0.002 if len(pieces) < 9 else 0) for pieces in splits])

    found = uvloop.run(all_splits())
    whole = found[0].told()
    texts = [answer_text(prompt, 2) for prompt in ("chunks", "absolute", "expected")]
    assert [status for status, *_ in whole] == [200, 200, 200, 404, 400, 200, 200]
    assert [text for _, text, _ in whole if text] == texts
    for answers in found:
        assert answers.told() == whole


def test_heads_that_differ_only_in_their_length(stack: FaultStack) -> None:
    """Heads are remembered but for the digits of Content-Length: each body is its own request's, over one connection
    and over many, in reads of any size."""
    rng = random.Random(5)
    heads = [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-note: content-length: 12\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-content-length: 3\r\n",
    ]

    def pipeline(number: int) -> tuple[bytes, list[str]]:
        prompts = [f"{number}-{n} " + "x" * rng.randrange(300) for n in range(12)]
        sent = [sized(completion(prompt), rng.choice(heads)) for prompt in prompts]
        return b"".join(sent) + LAST, prompts

    async def pipelines() -> None:
        made = [pipeline(number) for number in range(40)]
        jobs = []
        for data, _ in made:
            size = rng.choice((50, 400, 3000))
            jobs.append(send(port_of(stack, "router"), [data[at : at + size] for at in range(0, len(data), size)]))
        for (_, prompts), answers in zip(made, await many(jobs, 16), strict=True):
            texts = [json.loads(body)["choices"][0]["text"] for body in answers.bodies[:-1]]
            assert texts == [answer_text(prompt, 2) for prompt in prompts]

    uvloop.run(pipelines())


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
HIDDEN = sized(completion("hidden"))
TWO_IDEAS = {
    "cl then te": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "te then cl": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "te of 1.0": b"POST /v1/completions HTTP/1.0\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "te identity": POST + b"content-length: 5\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "te list": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "te quoted": POST + b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "te parameter": POST + b"transfer-encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
    "te twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "te behind nul": POST + b"transfer-encoding: chunked\x00\r\n\r\n0\r\n\r\n",
    "te behind cr": POST + b"x: y\rtransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "te with space": POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "te folded": POST + b"x: y\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "cl differs": POST + b"content-length: 0\r\ncontent-length: 200\r\n\r\n",
    "cl same": POST + b"content-length: 0\r\nContent-Length: 0\r\n\r\n",
    "cl list": POST + b"content-length: 0, 200\r\n\r\n",
    "cl hex": POST + b"content-length: 0x0\r\n\r\n",
    "cl exponent": POST + b"content-length: 0e3\r\n\r\n",
    "cl sign": POST + b"content-length: +0\r\n\r\n",
    "cl in two lines": POST + b"content-length:\r\n 0\r\n\r\n",
    "cl huge": POST + b"content-length: 18446744073709551616\r\n\r\n",
    "cl arabic": POST + "content-length: ٠\r\n\r\n".encode(),
    "cl empty": POST + b"content-length: \r\n\r\n",
    "chunk size signed": POST + b"transfer-encoding: chunked\r\n\r\n+0\r\n\r\n",
    "chunk size hex prefix": POST + b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n",
    "chunk size wraps": POST + b"transfer-encoding: chunked\r\n\r\n10000000000000000\r\n\r\n",
    "chunk size empty": POST + b"transfer-encoding: chunked\r\n\r\n\r\n\r\n",
    "chunk ends with lf": POST + b"transfer-encoding: chunked\r\n\r\n1\n{\n0\n\n",
    "chunk data too long": POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "trailer with lf": POST + b"transfer-encoding: chunked\r\n\r\n0\r\na: b\nc: d\r\n\r\n",
    "trailer with cr": POST + b"transfer-encoding: chunked\r\n\r\n0\r\na: b\rc: d\r\n\r\n",
    "chunk extension with cr": POST + b"transfer-encoding: chunked\r\n\r\n0;a\rb\r\n\r\n",
    "chunk extension with lf": POST + b"transfer-encoding: chunked\r\n\r\n0;a\nb\r\n\r\n",
    "head ends with lf": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\n\n",
    "line ends with cr": b"POST /v1/completions HTTP/1.1\rhost: x\rcontent-length: 0\r\r",
    "two targets": b"POST /v1/completions /x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    "no name": POST + b": x\r\ncontent-length: 0\r\n\r\n",
    "nul in name": POST + b"a\x00b: x\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("front", FRONTS)
def test_two_ideas_of_where_a_body_ends(stack: FaultStack, front: str) -> None:
    """One refusal each, and the request that hides behind it reaches no engine: its own count says so."""
    port = port_of(stack, front)
    worker_id = stack.workers("ACTIVE")[0].worker_id
    before = engine_metrics(stack, worker_id)["vllm:generation_tokens_total"]

    async def all_of_them() -> None:
        for name, data in TWO_IDEAS.items():
            for pieces in ([data + HIDDEN], [data, HIDDEN], [data[:-3], data[-3:] + HIDDEN]):
                answers = await send(port, pieces, quiet_s=0.2)
                assert len(answers.statuses) == 1, (name, answers.statuses, answers.bodies)
                assert 400 <= answers.statuses[0] < 500, (name, answers.statuses)
                assert b'"error"' in answers.bodies[0], (name, answers.bodies)

    uvloop.run(all_of_them())
    assert engine_metrics(stack, worker_id)["vllm:generation_tokens_total"] == before


def test_a_clients_word_for_routers_is_not_passed_on(stack: FaultStack) -> None:
    """What only routers say to shims, said by a client: the router's own word is what counts."""
    lies = b"x-springtide-incarnation: 1\r\nx-springtide-refusal: full\r\nx-springtide-fault: upstream_eof\r\n"
    body = completion("lies")
    for data in (
        sized(body, POST + lies),
        sized(body, POST + b"connection: x-springtide-incarnation, content-length, host\r\n"),
    ):
        answers = uvloop.run(send(stack.http_port, [data + LAST]))
        assert answers.statuses == [200, 200]
        assert json.loads(answers.bodies[0])["choices"][0]["text"] == answer_text("lies", 2)


SEEDS = [
    sized(completion("one")),
    sized(completion("two"), b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nconnection: keep-alive\r\nx: y\r\n"),
    chunked(completion("three"), 11, b";a=b", b"t: u\r\n"),
    sized(completion("four")) + sized(completion("five")),
    chunked(completion("six"), 30) + LAST,
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 3,
    sized(completion("seven"), b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"),
]
SPICE = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b"\x00",
        b"\xff",
        b":",
        b"0",
        b"9",
        b";",
        b"HTTP/1.1",
        b"{",
        b"}",
    ),
    *(b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"0\r\n\r\n", b"a" * 5000, b"connection: close\r\n"),
]


def damaged(rng: random.Random) -> bytes:
    """A good request with a few bytes taken, added, doubled or moved."""
    data = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.randrange(1, 12))
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at] + data[to:]
        elif kind == 1:
            data = data[:at] + rng.choice(SPICE) + data[at:]
        elif kind == 2:
            data = data[:to] + data[at:]
        elif kind == 3 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        else:
            lines = data.split(b"\r\n")
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            data = b"\r\n".join(lines)
    return data


@pytest.mark.parametrize("front", FRONTS)
def test_damaged_requests(stack: FaultStack, front: str) -> None:
    """Two thousand of them, in reads of any size: whole answers or none, none too many, and every connection ends."""
    rng = random.Random(f"bytes of {front}")
    port = port_of(stack, front)
    sent = [damaged(rng) for _ in range(2000)]

    async def all_of_them() -> list[Answers]:
        jobs = []
        for data in sent:
            size = rng.choice((len(data) + 1, 40, 300))
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            jobs.append(send(port, pieces, quiet_s=0.1, pause_s=0))
        return await many(jobs)

    found = uvloop.run(all_of_them())
    for data, answers in zip(sent, found, strict=True):
        assert len(answers.statuses) <= data.upper().count(b"HTTP/1.") + 1, (data, answers.statuses)
        for status in answers.statuses:
            assert status == 200 or 400 <= status < 500, (data, answers.statuses)
    count = Counter(status for answers in found for status in answers.statuses)
    assert count[200] > 200
    assert count[400] > 200
