"""What strangers and broken clients send: each gets a clear refusal, and everybody else is served as before.

RT2 CP15 CM5, F8 and DESIGN rule 15: bytes that are no HTTP, HTTP that is none of ours, smuggling, floods, odd JSON.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import grpc
import psutil
import pytest

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import generation_pb2 as gen
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.blows import FaultStack, wait_for
from tests.faults.conftest import TIMING

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    """One stack for all of this module; each test leaves it serving."""
    stack = FaultStack(tmp_path_factory.mktemp("hostile"), gpus=2, timing=TIMING)
    try:
        stack.start()
        stack.pool()
        yield stack
    finally:
        stack.stop()
        assert stack.strays() == []


@pytest.fixture(autouse=True)
def still_serves(served: FaultStack) -> Iterator[None]:
    """After each attack a good request is answered, nothing counts as in flight and nobody died."""
    before = {name: process.pid for name, process in served.processes.items()}
    yield
    assert all(process.poll() is None for process in served.processes.values()), before
    assert served.ask(timeout_s=10).exact
    served.check_whole(active=1, timeout_s=10)


def raw(port: int, data: bytes, *, timeout_s: float = 8.0, path: str = "", closes: bool = False) -> bytes:
    """Sends bytes and reads until the other side closes, or nothing comes any more (`closes`: that is an error)."""
    with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as sock:
        sock.settimeout(timeout_s)
        sock.connect(path or ("127.0.0.1", port))
        got = b""
        with contextlib.suppress(OSError):
            sock.sendall(data)
        try:
            while chunk := sock.recv(65536):
                got += chunk
        except TimeoutError:
            assert not closes, f"the connection stays open after {got[:300]!r}"
        except OSError:
            pass
        return got


def post(
    port: int, body: bytes | dict[str, Any], path: str = "/v1/chat/completions", extra: str = ""
) -> tuple[int, bytes]:
    """One whole POST on a connection of its own."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\nconnection: close\r\n{extra}\r\n"
    answer = raw(port, head.encode() + data, timeout_s=10, closes=True)
    status, _, rest = answer.partition(b"\r\n")
    return int(status.split()[1]) if status else 0, rest.partition(b"\r\n\r\n")[2]


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
GARBAGE = {
    "grpc preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "tls hello": bytes.fromhex("16030100a5010000a10303") + bytes(200),
    "zeros": bytes(100_000),
    "random line": b"\xff\xfe\x00hello\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "http 0.9": b"GET /\r\n\r\n",
    "http 3": b"GET /v1/models HTTP/3.0\r\nhost: x\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"h%d: v\r\n" % n for n in range(500)) + b"\r\n",
    "huge header": b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"v" * 300_000 + b"\r\n\r\n",
    "obs-fold": b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length:\r\n 5\r\n\r\nhello",
    "te folded": POST + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "cl and te": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "te and cl": POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two cl": POST + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
    "same cl twice": POST + b"content-length: 4\r\ncontent-length: 4\r\n\r\nabcd",
    "cl list": POST + b"content-length: 4, 4\r\n\r\nabcd",
    "cl plus": POST + b"content-length: +4\r\n\r\nabcd",
    "cl negative": POST + b"content-length: -1\r\n\r\nabcd",
    "te xchunked": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "te twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "te tab": POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "space before colon": POST + b"content-length : 4\r\n\r\nabcd",
    "bare lf": b"POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 4\n\nabcd",
    "chunk size overflow": POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
    "chunk size text": POST + b"transfer-encoding: chunked\r\n\r\n5 x\r\nhello\r\n0\r\n\r\n",
    "connect": b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "nul in header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: b\x00c\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("front", ["router", "shim"])
def test_bytes_that_are_no_request_of_ours(served: FaultStack, front: str) -> None:
    """A 4xx in OpenAI's shape; never a 200 or a 5xx, never two answers to one request."""
    port = served.http_port if front == "router" else int(served.workers("ACTIVE")[0].endpoint.rpartition(":")[2])
    for name, data in GARBAGE.items():
        answer = raw(port, data, timeout_s=4)
        assert answer.startswith(b"HTTP/1.1 4"), (front, name, answer[:200])
        assert answer.count(b"HTTP/1.1 ") == 1, (front, name, answer)
        assert b'"error"' in answer, (front, name, answer)


def test_a_second_request_is_never_smuggled(served: FaultStack) -> None:
    """What follows a refused head is dropped; what follows a good request is the next one, answered in order."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    both = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    answer = raw(served.http_port, both + hidden, timeout_s=4)
    assert answer.count(b"HTTP/1.1 ") == 1
    piped = (
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 20
        + b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )
    answer = raw(served.http_port, piped, closes=True)
    assert answer.count(b"HTTP/1.1 200") == 21
    assert answer.rstrip().endswith(b"]}")


def test_a_connection_closes_when_the_client_says_so(served: FaultStack) -> None:
    """Also after requests without a body, and for HTTP/1.0 clients, which read until then."""
    for request in (
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: TE, Close\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ):
        for port in (served.http_port, int(served.workers("ACTIVE")[0].endpoint.rpartition(":")[2])):
            assert raw(port, request, timeout_s=5, closes=True).startswith(b"HTTP/1.1 ")


def test_no_admin_route_of_an_engine_is_reachable(served: FaultStack) -> None:
    shim = int(served.workers("ACTIVE")[0].endpoint.rpartition(":")[2])
    for path in (
        "/sleep",
        "/fault",
        "/abort_requests",
        "/pause",
        "//fault",
        "/v1/../fault",
        "/v1/models/../../fault",
        "/%66ault",
        "/v1/chat/completions/../../../sleep",
        "http://x/fault",
        "/metrics",
        "/v1/status",
        "/v1/quit",
    ):
        for port in (shim, served.http_port):
            answer = raw(
                port, f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode()
            )
            assert answer.split()[1] in (b"404", b"405", b"400"), (path, answer[:300])


BODIES: dict[str, tuple[bytes | dict[str, Any], tuple[int, ...]]] = {
    "empty": (b"", (400,)),
    "invalid json": (b"{", (400,)),
    "invalid utf-8": (b'{"model": "demo", "messages": "\xff\xfe"}', (400,)),
    "lone surrogate": (
        b'{"model": "demo", "messages": [{"role":"user","content":"\\ud800"}], "max_tokens": 2}',
        (200, 400),
    ),
    "list": (b"[1]", (400,)),
    "number": (b"1e999", (400,)),
    "nan": (b'{"model": "demo", "max_tokens": NaN}', (400,)),
    "deep": (b'{"model": "demo", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400,)),
    "deep unclosed": (b"[" * 5_000_000, (400,)),
    "stream yes": ({**CHAT, "stream": "yes"}, (400,)),
    "stream 1": ({**CHAT, "stream": 1}, (400,)),
    "null model, one pool": ({**CHAT, "model": None}, (200,)),
    "model number": ({**CHAT, "model": 7}, (400,)),
    "model list": ({**CHAT, "model": ["demo"]}, (400,)),
    "unknown model": ({**CHAT, "model": "nobody"}, (404,)),
    "huge model name": ({**CHAT, "model": "x" * 1_000_000}, (404,)),
    "huge max_tokens": ({**CHAT, "max_tokens": 10**12, "stream": False}, (400,)),
    "max_tokens beyond 64 bits": (
        b'{"model":"demo","messages":[{"role":"user","content":"a"}],"max_tokens":1' + b"0" * 400 + b"}",
        (400,),
    ),
    "negative max_tokens": ({**CHAT, "max_tokens": -1}, (400,)),
    "messages a string": ({**CHAT, "messages": "hi"}, (400,)),
    "messages missing": ({"model": "demo"}, (400,)),
    "messages of null": ({**CHAT, "messages": [None]}, (400,)),
    "10,000 messages": ({**CHAT, "messages": [{"role": "user", "content": "x"}] * 10_000}, (200, 400)),
    "duplicate keys": (
        b'{"model":"nobody","model":"demo","messages":[{"role":"user","content":"a"}],"max_tokens":2}',
        (200,),
    ),
}


@pytest.mark.slow
def test_bodies(served: FaultStack) -> None:
    for name, (body, allowed) in BODIES.items():
        status, answer = post(served.http_port, body)
        assert status in allowed, (name, status, answer[:300])
        if status != 200:
            error = json.loads(answer)["error"]
            assert error["message"], name
            assert len(answer) < 5000, (name, len(answer))


def test_a_body_that_is_too_large_is_refused_before_it_is_read(served: FaultStack) -> None:
    status, answer = post(served.http_port, b"", extra="")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
    assert b" 413 " in raw(served.http_port, head + b"x" * 1000, timeout_s=4).split(b"\r\n")[0]
    assert status == 400, answer


@pytest.mark.slow
def test_slow_clients_hold_nobody_up(served: FaultStack) -> None:
    """Heads and bodies that drip: closed after their time, while others are served."""
    router = psutil.Process(served.processes["router"].pid)
    before = router.num_fds()
    sockets = [socket.create_connection(("127.0.0.1", served.http_port)) for _ in range(300)]
    try:
        for number, sock in enumerate(sockets):
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + (b"content-length: 9\r\n\r\n" if number % 2 else b"x")
            )
        deadline = time.monotonic() + 12
        assert served.ask(timeout_s=5).exact
        while time.monotonic() < deadline:
            for sock in sockets[::2]:
                with contextlib.suppress(OSError):
                    sock.sendall(b"x")
            time.sleep(0.5)
        assert served.ask(timeout_s=5).exact
        dripping = [sock for sock in sockets[::2] if not _closed(sock)]
        assert not dripping, f"{len(dripping)} of 150 dripping heads still open"
    finally:
        for sock in sockets:
            sock.close()
    wait_for("the descriptors back", lambda: router.num_fds() <= before + 5, 10)


def _closed(sock: socket.socket) -> bool:
    sock.settimeout(0.2)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.slow
def test_http_and_garbage_on_the_grpc_ports(served: FaultStack) -> None:
    for port in (served.controlplane_port, served.router_port):
        for data in (
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            bytes(10_000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 10_000,
        ):
            raw(port, data, timeout_s=1)
    assert served.status().pools
    channel = grpc.insecure_channel(served.address)
    with channel:
        for method in (
            "/springtide.v1.ControlPlaneService/ApplyPool",
            "/springtide.v1.ControlPlaneService/GetStatus",
            "/springtide.v1.ControlPlaneService/NoSuchMethod",
            "/springtide.v1.NoService/X",
        ):
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            with pytest.raises(grpc.RpcError) as error:
                call(b"\xff\xff\xff\xff garbage", timeout=5)
            assert error.value.code() in (
                grpc.StatusCode.INTERNAL,
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.UNKNOWN,
            ), (method, error.value)
        session = channel.stream_stream(
            "/springtide.v1.AgentService/Session", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError):
            list(session(iter([b"\xff\xff\xff"]), timeout=5))


@pytest.mark.slow
def test_odd_generation_requests_over_grpc(served: FaultStack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.router_port}") as channel:
        stub: Any = GenerationServiceStub(cast(Any, channel))
        for request in (
            gen.GenerateRequest(),
            gen.GenerateRequest(pool="nobody", prompt="x"),
            gen.GenerateRequest(pool="demo"),
            gen.GenerateRequest(pool="demo", prompt="x" * 50_000_000),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Generate(request, timeout=10))
            assert error.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            ), error.value


def test_garbage_on_a_shims_control_socket(served: FaultStack) -> None:
    worker = served.workers("ACTIVE")[0]
    path = served.entry(worker.worker_id)["control_path"]
    orders = [
        *GARBAGE.values(),
        b"POST /v1/admission HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n{",
        b'POST /v1/admission HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{"generation": "abc"}',
        b'POST /v1/stop HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\n\r\n{"graceS": "NaN"}',
        b'POST /v1/stop HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n{"graceS": []}',
        b"GET /v1/status?after=x&wait_s=y HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/status?after=0&wait_s=nan HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/quit HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    ]
    for data in orders:
        raw(0, data, path=path, timeout_s=0.5)
    after = served.by_id()[worker.worker_id]
    assert after.incarnation == worker.incarnation
    assert served.ask().exact


def test_orders_that_cannot_be(served: FaultStack) -> None:
    for order in (
        cp.ScalePoolRequest(pool="demo", workers=-5),
        cp.ScalePoolRequest(pool="demo", workers=2**31 - 1),
        cp.ScalePoolRequest(pool="nobody", workers=1),
        cp.ScalePoolRequest(pool="../../etc", workers=1),
    ):
        with pytest.raises(grpc.RpcError) as error:
            served.operator.ScalePool(order, timeout=5)
        assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), error.value
    with pytest.raises(grpc.RpcError) as error:
        served.operator.ScalePool(cp.ScalePoolRequest(pool="x" * 100_000, workers=1), timeout=5)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND, error.value
    for name in ("../x", ".", "", "A", "x" * 300, "a\x00b", "-a"):
        with pytest.raises(grpc.RpcError) as error:
            served.apply(name=name, engine="sim", min_workers=0)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, error.value)
