"""Join tokens and certificates: what is refused, and how clearly; a renewed certificate needs no restart."""

import asyncio
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from springtide.clock import ManualClock
from springtide.errors import FailedPrecondition, InvalidArgument, Unauthenticated
from springtide.rpc import ChannelSecurity, Security, Server, channel, decoded_errors
from springtide.rpc.fronted import tls_context
from springtide.rpc.tokens import JoinTokens, load_secret
from springtide.v1 import controlplane_pb2 as pb
from springtide.v1 import controlplane_pb2_grpc as pb_grpc

HERE = Path(__file__).parent
SECRET = b"s" * 64


class Service(pb_grpc.ControlPlaneServiceServicer):
    async def GetSummary(self, request: pb.GetSummaryRequest, context: Any) -> pb.GetSummaryResponse:
        return pb.GetSummaryResponse(active_instances=3)


def test_a_token_says_who_may_show_it_and_until_when() -> None:
    """Rule 13: read back as made; expired ones are told apart from forged ones."""
    clock = ManualClock()
    tokens = JoinTokens(SECRET, clock)
    token = tokens.for_provisioner("hpc", 60.0)
    found = tokens.read(token)
    assert (found.kind, found.ids, found.expired) == ("provisioner", ("hpc",), False)
    assert found.opens("/springtide.v1.ProvisionerService/Session")
    assert not found.opens("/springtide.v1.AgentService/Session")
    assert not found.opens("/springtide.v1.ControlPlaneService/DeletePool")
    clock.advance(60.0)
    assert tokens.read(token).expired
    node = tokens.read(tokens.for_nodes(["n1", "n2"], 60.0))
    assert node.ids == ("n1", "n2")
    assert node.opens("/springtide.v1.AgentService/Session")


@pytest.mark.parametrize("spoil", ["other secret", "claims", "signature", "cut", "nothing", "no base64"])
def test_a_token_that_is_not_ours_is_refused(spoil: str) -> None:
    """Rule 13: whatever was changed; the error says what to do and does not repeat the token."""
    tokens = JoinTokens(SECRET, ManualClock())
    token = tokens.for_provisioner("hpc", 60.0)
    prefix, body, signature = token.split(".")
    spoilt = {
        "other secret": JoinTokens(b"t" * 64, ManualClock()).for_provisioner("hpc", 60.0),
        "claims": f"{prefix}.{body[:-2]}AA.{signature}",
        "signature": f"{prefix}.{body}.{signature[:-2]}AA",
        "cut": token[:-10],
        "nothing": "stj1.",
        "no base64": "stj1.%%%.%%%",
    }[spoil]
    with pytest.raises(Unauthenticated) as refused:
        tokens.read(spoilt)
    assert refused.value.reason == "BAD_JOIN_TOKEN"
    assert "springtide token create" in str(refused.value)
    assert body not in str(refused.value)


def test_the_secret_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    """Rule 13: mode 0600; one that others may read is not used."""
    first = load_secret(tmp_path / "cp")
    assert load_secret(tmp_path / "cp") == first
    path = tmp_path / "cp" / "join.secret"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(FailedPrecondition) as refused:
        load_secret(tmp_path / "cp")
    assert refused.value.reason == "JOIN_SECRET_UNSAFE"


def test_what_a_killed_process_left_does_not_keep_the_next_from_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 13: in a container the next process has the same pid: a file half made under it is no obstacle."""
    with monkeypatch.context() as killed:
        killed.setattr(os, "link", _dies)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            load_secret(tmp_path / "cp")
    assert len(list((tmp_path / "cp").iterdir())) == 1, "something was left"
    assert load_secret(tmp_path / "cp") == (tmp_path / "cp" / "join.secret").read_bytes()


def _dies(*_: object) -> None:
    raise KeyboardInterrupt


async def test_a_network_listener_needs_tls_from_the_start() -> None:
    """Rule 13: join tokens alone open nothing in clear text."""
    server = Server(Security(), join=JoinTokens(SECRET, ManualClock()))
    with pytest.raises(InvalidArgument) as refused:
        server.listen("0.0.0.0:0")
    assert refused.value.reason == "INSECURE_LISTENER"


async def test_a_join_token_opens_its_own_service_only() -> None:
    """Rule 13: on a network listener without a token_file nobody but provisioners and agents gets in."""
    tokens = JoinTokens(SECRET, ManualClock())
    tls = Security(str(HERE / "localhost.pem"), str(HERE / "localhost-key.pem"))
    server = Server(tls, join=tokens)
    service = Service()  # type: ignore[abstract]
    server.add(pb_grpc.add_ControlPlaneServiceServicer_to_server, service, "springtide.v1.ControlPlaneService")
    port = server.listen("0.0.0.0:0").rpartition(":")[2]
    await server.start()
    try:
        for token, reason in (("", "UNAUTHENTICATED"), (tokens.for_provisioner("p", 9.0), "JOIN_TOKEN_OF_ANOTHER")):
            shown = ChannelSecurity(tls_ca=str(HERE / "localhost.pem"), token=token)
            async with channel(f"127.0.0.1:{port}", shown) as ch:
                with pytest.raises(Unauthenticated) as refused, decoded_errors():
                    await pb_grpc.ControlPlaneServiceStub(ch).GetSummary(pb.GetSummaryRequest())
                assert refused.value.reason == reason
    finally:
        await server.stop(0)


async def _summary(port: str, ca: Path) -> int:
    shown = ChannelSecurity(tls_ca=str(ca), token="secret")
    async with channel(f"127.0.0.1:{port}", shown) as ch:
        return int(
            (await pb_grpc.ControlPlaneServiceStub(ch).GetSummary(pb.GetSummaryRequest(), timeout=10)).active_instances
        )


async def test_a_renewed_certificate_is_taken_without_a_restart(tmp_path: Path) -> None:
    """infra §8: new handshakes use the new pair; a broken pair leaves the good one in force."""
    cert, key, tokens = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "tokens"
    shutil.copy(HERE / "localhost.pem", cert)
    shutil.copy(HERE / "localhost-key.pem", key)
    tokens.write_text("secret\n")
    server = Server(Security(str(cert), str(key), token_file=str(tokens)))
    service = Service()  # type: ignore[abstract]
    server.add(pb_grpc.add_ControlPlaneServiceServicer_to_server, service, "springtide.v1.ControlPlaneService")
    port = server.listen("127.0.0.1:0").rpartition(":")[2]
    await server.start()
    try:
        assert await _summary(port, HERE / "localhost.pem") == 3
        cert.write_text("no certificate")
        assert await _summary(port, HERE / "localhost.pem") == 3
        shutil.copy(HERE / "renewed-key.pem", key)
        shutil.copy(HERE / "renewed.pem", cert)
        assert await _summary(port, HERE / "renewed.pem") == 3
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _summary(port, HERE / "localhost.pem")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


async def _certificate(port: int) -> bytes:
    """The certificate that a listener shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.close()
    await reader.read()
    return bytes(shown)


async def test_our_own_listeners_take_a_renewed_certificate_too(tmp_path: Path) -> None:
    """infra §8: the HTTP and HTTP/2 fronts; a broken pair leaves the good one in force."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(HERE / "localhost.pem", cert)
    shutil.copy(HERE / "localhost-key.pem", key)
    context = tls_context(Security(str(cert), str(key)))

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        first = await _certificate(port)
        cert.write_text("no certificate")
        assert await _certificate(port) == first
        shutil.copy(HERE / "renewed-key.pem", key)
        shutil.copy(HERE / "renewed.pem", cert)
        assert await _certificate(port) == ssl.PEM_cert_to_DER_cert((HERE / "renewed.pem").read_text())
    finally:
        server.close()
