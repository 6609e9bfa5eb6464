"""Clients of the router for the GPU proof: plain threads and the standard library, one connection for each stream."""

import http.client
import json
import socket
import threading
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit

import grpc

from springtide.v1 import generation_pb2 as g
from springtide.v1.generation_pb2_grpc import GenerationServiceStub


@dataclass
class Answer:
    """How one stream ended. `tokens`: as the engine counted them."""

    number: int
    status: int = 0
    events: int = 0
    tokens: int = 0
    text: str = ""
    finish: str = ""
    done: bool = False
    error: str = ""
    first_s: float | None = None
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.done and not self.error


def stream_http(base: str, model: str, tokens: int, number: int = 0, timeout_s: float = 280.0) -> Answer:
    """One streamed chat, read to its end."""
    answer, began = Answer(number), monotonic()
    url = urlsplit(base)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
    try:
        body = json.dumps(_body(model, tokens, number))
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = response.read(2000).decode(errors="replace")
            return answer
        while line := response.readline():
            if line.startswith(b"data: "):
                _take(answer, line[6:].strip(), began)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        answer.took_s = monotonic() - began
    return answer


def _body(model: str, tokens: int, number: int) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"hello {number}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def _take(answer: Answer, data: bytes, began: float) -> None:
    if data == b"[DONE]":
        answer.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = str(chunk["error"])[:500]
        return
    answer.events += 1
    if answer.first_s is None:
        answer.first_s = monotonic() - began
    if chunk.get("usage"):
        answer.tokens = int(chunk["usage"]["completion_tokens"])
    for choice in chunk.get("choices", ()):
        answer.text += choice["delta"].get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish


def stream_grpc(address: str, pool: str, tokens: int) -> tuple[list[str], int]:
    """One Generate over gRPC: the kinds of its events in order, and the tokens that Finished counts."""
    with grpc.insecure_channel(address) as channel:
        request = g.GenerateRequest(pool=pool, sampling=g.Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        request.chat.messages.add(role="user", content="hello")
        events = list(GenerationServiceStub(channel).Generate(request, timeout=120))  # type: ignore[arg-type, call-overload]
    return [str(event.WhichOneof("event")) for event in events], events[-1].finished.completion_tokens


def open_streams(base: str, model: str, count: int, tokens: int) -> list[socket.socket]:
    """`count` streams whose first event has come; close the sockets to hang up."""
    url = urlsplit(base)
    sockets = []
    for number in range(count):
        body = json.dumps(_body(model, tokens, number)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
        sock = socket.create_connection((url.hostname or "", url.port or 80), timeout=60)
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        sockets.append(sock)
    for sock in sockets:
        read = b""
        while b"data: " not in read:
            more = sock.recv(65536)
            if not more:
                raise AssertionError(f"the stream ended before its first event: {read[:500]!r}")
            read += more
    return sockets


@dataclass
class Load:
    """`streams` clients at a time, each asking again as soon as it has its answer, until `stop`."""

    base: str
    model: str
    tokens: int
    streams: int = 8
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._number = iter(range(10**9))
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.streams)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._over.is_set():
            self.answers.append(stream_http(self.base, self.model, self.tokens, next(self._number)))

    def stop(self, bound_s: float = 300.0) -> "Load":
        """No new requests; waits for those that run."""
        self._over.set()
        end = monotonic() + bound_s
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))
        return self

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.ok]

    @property
    def facts(self) -> dict[str, object]:
        first = sorted(answer.first_s for answer in self.answers if answer.first_s is not None)
        return {
            "requests": len(self.answers),
            "failed_requests": len(self.failed),
            "tokens": sum(answer.tokens for answer in self.answers),
            "first_token_p50_s": round(first[len(first) // 2], 4) if first else None,
            "first_token_max_s": round(first[-1], 4) if first else None,
            "errors": [answer.error[:300] for answer in self.failed[:5]],
        }
