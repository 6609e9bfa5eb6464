"""TLS and tokens on the HTTP front; workers see no token of the router's (rule 13)."""

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from springtide.dataplane import Limits, RelayServer, Route
from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.dataplane.fakes import DONE, Client, Recorder, event, post, says, stream_of, until, upstream
from tests.router.fakes import control_plane, table, worker
from tests.router.test_http_front import STREAM


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost and 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@contextlib.asynccontextmanager
async def tls_client(port: int, cert: Path) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=ssl.create_default_context(cafile=str(cert)), server_hostname="localhost"
    )
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()


async def test_both_fronts_with_tls_and_a_token(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """One certificate and one token file for both; probes need no token; the worker never sees it."""
    cert, key = pair
    (tmp_path / "tokens").write_text("let-me-in\n")
    config = tmp_path / "router.toml"
    config.write_text(f'[security]\ntls_cert = "{cert}"\ntls_key = "{key}"\ntoken_file = "{tmp_path / "tokens"}"\n')
    async with upstream(*[says(stream_of(3))] * 3) as up, control_plane(table(worker("a", up.port))) as cp:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "--config", str(config), "--listen", "0.0.0.0:0",
            "--http-listen", "0.0.0.0:0", "--data-dir", str(tmp_path), "--controlplane", cp.address,
        )  # fmt: skip
        try:
            await until((tmp_path / "router.json").exists, 30)
            await cp.acked(1)
            found = json.loads((tmp_path / "router.json").read_text())
            async with tls_client(int(found["http"].rpartition(":")[2]), cert) as c:
                c.send(b"GET /ready HTTP/1.1\r\nhost: t\r\n\r\n")
                assert (await c.answer())[0] == 200
                for extra in (b"", b"authorization: Bearer wrong\r\n", b"authorization: Basic let-me-in\r\n"):
                    c.send(post("/v1/completions", STREAM, extra))
                    head = await c.head()
                    assert head.startswith(b"HTTP/1.1 401")
                    assert b"www-authenticate: Bearer\r\n" in head
                    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
                    assert json.loads(await c.exactly(length))["error"]["type"] == "authentication_error"
                assert not up.requests
                for _ in range(2):
                    c.send(post("/v1/completions", STREAM, b"authorization: Bearer let-me-in\r\n"))
                    assert (await c.head()).startswith(b"HTTP/1.1 200")
                    assert await c.chunks() == event(0) + event(1) + event(2) + DONE
            assert all(b"let-me-in" not in request.head for request in up.requests)
            port = found["grpc"].rpartition(":")[2]
            credentials = grpc.composite_channel_credentials(
                grpc.ssl_channel_credentials(cert.read_bytes()), grpc.access_token_call_credentials("let-me-in")
            )
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                models = await GenerationServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)
                assert [model.name for model in models.models] == ["m"]
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def tls_relay(pair: tuple[Path, Path], recorder: Recorder, limits: Limits) -> AsyncIterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    server = RelayServer(recorder, limits)
    port = await server.start("127.0.0.1", 0, tls=context)
    try:
        yield port
    finally:
        await server.close()


async def test_a_client_that_does_not_shake_hands_is_dropped(pair: tuple[Path, Path]) -> None:
    """And one that speaks plain HTTP: neither reaches the director, both connections end."""
    recorder = Recorder(lambda request: None)
    async with tls_relay(pair, recorder, Limits(head_timeout_s=0.3)) as port:
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        plain, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/v1/completions", STREAM))
        for reader in (silent, plain):
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
    assert not recorder.requests


async def test_a_large_answer_to_a_slow_client_is_bounded_and_whole(pair: tuple[Path, Path]) -> None:
    """Back-pressure goes through TLS to the worker; every byte arrives."""
    size = 4 * 1024 * 1024
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % size
    async with upstream(says(head, b"x" * size)) as up:
        recorder = Recorder(lambda request: Route(up.address))
        async with tls_relay(pair, recorder, Limits()) as port, tls_client(port, pair[0]) as c:
            c.send(post("/v1/completions", b"{}"))
            assert b"content-length: 4194304\r\n" in await c.head()
            body = await asyncio.wait_for(c.exactly(size), 30)
            assert body == b"x" * size
