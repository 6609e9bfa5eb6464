"""The mock engine of native/engine.c in Python: same arguments, same answers; no gRPC.

python -m bench.fallback.engine --port P [--host H] [--unix PATH] [--grpc-port ignored]
"""

import argparse
import asyncio
import random
import re
import time
from typing import cast
from urllib.parse import parse_qs, urlsplit

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,"model":"m",'
    b'"choices":[{"index":0,"text":" t%016x","logprobs":null,"finish_reason":%b,"stop_reason":null}]}\n\n'
)
ANSWER = (
    b'{"id":"cmpl-0123456789abcdef0123","object":"text_completion","created":1790000000,"model":"m","choices":[{"index":0,'
    b'"text":" Paris is the capital.","logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":5,"completion_tokens":4,"total_tokens":9}}'
)


class Settings:
    """Shared by all connections."""

    def __init__(self) -> None:
        self.rate = 50.0
        self.burst = False
        self.tokens = 0
        self.streams: set[Connection] = set()


class Connection(asyncio.Protocol):
    """One client; at most one stream at a time."""

    transport: asyncio.Transport

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._buffer = b""
        self._left = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n") + 4) >= 4:
            head = self._buffer[:end]
            length = re.search(rb"\ncontent-length: *(\d+)", head, re.IGNORECASE)
            size = end + (int(length[1]) if length else 0)
            if len(self._buffer) < size:
                return
            body, self._buffer = self._buffer[end:size], self._buffer[size:]
            self._serve(head.split(b" ", 2)[1].decode(), body)

    def _serve(self, target: str, body: bytes) -> None:
        settings = self._settings
        if target.startswith("/bench"):
            query = parse_qs(urlsplit(target).query)
            settings.rate = float(query["rate"][0])
            settings.burst = query.get("burst", ["0"])[0] == "1"
            self._answer(b'{"tokens":%d,"streams":%d}' % (settings.tokens, len(settings.streams)))
        elif re.search(rb'"stream": ?true', body):
            tokens = re.search(rb'"max_tokens":(\d+)', body)
            self._left = int(tokens[1]) if tokens else 16
            self.transport.write(HEAD)
            self._token()
            if self._left:
                settings.streams.add(self)
                now, interval = asyncio.get_running_loop().time(), 1 / settings.rate
                self._due = (now // interval + 1) * interval if settings.burst else now + random.random() * interval
                self._timer = asyncio.get_running_loop().call_at(self._due, self._tick)
        else:
            self._answer(ANSWER)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def _tick(self) -> None:
        self._token()
        if self._left:
            self._due += 1 / self._settings.rate
            self._timer = asyncio.get_running_loop().call_at(self._due, self._tick)
        else:
            self._end()

    def _token(self) -> None:
        self._settings.tokens += 1
        self._left -= 1
        event = EVENT % (time.monotonic_ns(), b"null" if self._left else b'"stop"')
        out = b"%x\r\n%b\r\n" % (len(event), event)
        self.transport.write(out if self._left else out + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _end(self) -> None:
        self._settings.streams.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def serve(arguments: argparse.Namespace) -> None:
    """Until it is killed."""
    loop, settings = asyncio.get_running_loop(), Settings()
    server = await loop.create_server(lambda: Connection(settings), arguments.host, arguments.port, backlog=4096)
    if arguments.unix:
        await loop.create_unix_server(lambda: Connection(settings), arguments.unix, backlog=4096)
    print(f"http={server.sockets[0].getsockname()[1]} grpc=-1", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--unix")
    uvloop.run(serve(parser.parse_args()))
