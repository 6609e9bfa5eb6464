"""Servers and channels over real sockets: errors keep their meaning, listeners are closed by default."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from springtide import errors
from springtide.rpc import (
    ChannelSecurity,
    Security,
    Server,
    channel,
    controlplane_address,
    decoded_errors,
    parse_address,
)
from springtide.v1 import controlplane_pb2 as pb
from springtide.v1 import controlplane_pb2_grpc as pb_grpc

HERE = Path(__file__).parent
NAME = "springtide.v1.ControlPlaneService"
ERRORS: list[errors.SpringtideError] = [
    errors.InvalidArgument(field="spec.min_workers", value=9, problem="is above max_workers = 8", remedy="Lower it."),
    errors.NotFound(kind="pool", name="chat", known=["demo"]),
    errors.AlreadyExists("node n1 is taken.", remedy="Choose another node id."),
    errors.FailedPrecondition("worker w is RELEASING.", remedy="Activate it later.", reason="RELEASING"),
    errors.Conflict("somebody was first."),
    errors.Unavailable("no worker.", retry_after_s=2.5),
    errors.Exhausted("queue full.", retry_after_s=1.0, metadata={"queue": "1024"}),
    errors.Unimplemented("no sleep.", remedy="Start the engine with --enable-sleep-mode."),
    errors.Unauthenticated("no token."),
    errors.Internal("ours."),
]


class Service(pb_grpc.ControlPlaneServiceServicer):
    """Raises what it is told to raise; WatchEvents raises after one answer."""

    def __init__(self) -> None:
        self.error: BaseException = errors.Internal("unset")

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        raise self.error

    async def GetSummary(self, request: pb.GetSummaryRequest, context: Any) -> pb.GetSummaryResponse:
        return pb.GetSummaryResponse(active_instances=3)

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        yield pb.WatchEventsResponse()
        raise self.error


async def started(service: Service, security: Security | None = None) -> tuple[Server, str]:
    server = Server(security)
    server.add(pb_grpc.add_ControlPlaneServiceServicer_to_server, service, NAME)
    address = server.listen("127.0.0.1:0")
    await server.start()
    return server, address


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str, Server]]:
    made = Service()  # type: ignore[abstract]
    server, address = await started(made)
    yield made, address, server
    await server.stop(0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.grpc_code)
async def test_an_error_crosses_the_wire_whole(service, error) -> None:
    """CP21, rule 15: code, reason, field, value, remedy and retry arrive as they were raised."""
    made, address, _ = service
    made.error = error
    async with channel(address) as ch:
        with pytest.raises(type(error)) as unary, decoded_errors("control plane", address):
            await pb_grpc.ControlPlaneServiceStub(ch).GetPool(pb.GetPoolRequest())
        with pytest.raises(type(error)) as stream, decoded_errors("control plane", address):
            async for _ in pb_grpc.ControlPlaneServiceStub(ch).WatchEvents(pb.WatchEventsRequest()):
                pass
    for got in (unary.value, stream.value):
        assert (got.message, got.reason, got.field, got.remedy) == (
            error.message,
            error.reason,
            error.field,
            error.remedy,
        )
        assert got.retry_after_s == error.retry_after_s
        assert got.value == (None if error.value is None else str(error.value))
        assert got.metadata == error.metadata


async def test_standard_details_are_there_for_any_client(service) -> None:
    """CP21: ErrorInfo and BadRequest as google.rpc defines them."""
    made, address, _ = service
    made.error = ERRORS[0]
    async with channel(address) as ch:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.ControlPlaneServiceStub(ch).GetPool(pb.GetPoolRequest())
    trailers = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason, info.metadata["value"]) == ("springtide", "INVALID_ARGUMENT", "9")
    assert bad.field_violations[0].field == "spec.min_workers"


async def test_an_unexpected_exception_is_internal_and_tells_nothing(service) -> None:
    made, address, _ = service
    made.error = ValueError("secret-path")
    async with channel(address) as ch:
        with pytest.raises(errors.Internal) as caught, decoded_errors():
            await pb_grpc.ControlPlaneServiceStub(ch).GetPool(pb.GetPoolRequest())
    assert caught.value.reason == "INTERNAL"
    assert "secret-path" not in str(caught.value)


async def test_a_method_that_is_not_there_and_nobody_there(service) -> None:
    _, address, server = service
    async with channel(address) as ch:
        with pytest.raises(errors.Unimplemented), decoded_errors():
            await pb_grpc.ControlPlaneServiceStub(ch).ListNodes(pb.ListNodesRequest())
    await server.stop(0)
    async with channel(address) as ch:
        with pytest.raises(errors.Unavailable) as caught, decoded_errors("control plane", address):
            await pb_grpc.ControlPlaneServiceStub(ch).GetPool(pb.GetPoolRequest(), timeout=5)
    assert caught.value.reason == "CONTROL_PLANE_UNREACHABLE"
    assert address in caught.value.message


async def test_health_reflection_and_channelz_answer(service) -> None:
    """CP21: what grpcurl and probes ask for."""
    _, address, server = service
    async with channel(address) as ch:
        stub = health_pb2_grpc.HealthStub(ch)
        for name in ("", NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_all_serving(True)
        for name in ("", NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME)
        v1 = ch.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        for call in (reflection_pb2_grpc.ServerReflectionStub(ch).ServerReflectionInfo, v1):
            answers = [answer async for answer in call(iter([asked, symbol]))]
            names = {entry.name for entry in answers[0].list_services_response.service}
            assert {NAME, "grpc.health.v1.Health"} <= names
            assert answers[1].file_descriptor_response.file_descriptor_proto
        servers = await channelz_pb2_grpc.ChannelzStub(ch).GetServers(channelz_pb2.GetServersRequest())
        assert servers.server


async def test_a_port_in_use_names_setting_and_remedy(service) -> None:
    _, address, _ = service
    with pytest.raises(errors.FailedPrecondition) as caught:
        Server().listen(address, "controlplane-port")
    assert caught.value.reason == "PORT_IN_USE"
    assert caught.value.field == "controlplane-port"
    assert address in str(caught.value)


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Server(Security(insecure=True)).listen("203.0.113.7:0")
    assert caught.value.field == "listen"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_a_listener_for_other_machines_needs_tls_and_tokens(address) -> None:
    """Rule 13: closed by default."""
    with pytest.raises(errors.InvalidArgument) as caught:
        Server().listen(address)
    assert caught.value.reason == "INSECURE_LISTENER"
    assert Server(Security(insecure=True)).listen("0.0.0.0:0").startswith("0.0.0.0:")


@pytest.mark.parametrize("text", ["", "7400", "host", "host:port", "host:70000", ":1"])
def test_a_bad_address_is_refused(text) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        parse_address(text, "listen")
    assert caught.value.field == "listen"


def test_addresses_and_the_environment() -> None:
    """CM5: SPRINGTIDE_ADDRESS."""
    assert parse_address("[::1]:7400").is_loopback
    assert str(parse_address("[::1]:7400")) == "[::1]:7400"
    assert not parse_address("10.0.0.1:1").is_loopback
    assert controlplane_address({"SPRINGTIDE_ADDRESS": "h:1"}) == "h:1"
    assert controlplane_address({}) == "127.0.0.1:7400"


async def test_tls_and_tokens(tmp_path) -> None:
    """Rule 13: with TLS and tokens, a call needs a known token; health does not."""
    cert, key, tokens = HERE / "localhost.pem", HERE / "localhost-key.pem", tmp_path / "tokens"
    tokens.write_text("first\nsecond\n")
    security = Security(tls_cert=str(cert), tls_key=str(key), token_file=str(tokens))
    server, address = await started(Service(), security)  # type: ignore[abstract]
    try:
        async with channel(address, ChannelSecurity(tls_ca=str(cert), token="second")) as ch:
            answer = await pb_grpc.ControlPlaneServiceStub(ch).GetSummary(pb.GetSummaryRequest())
            assert answer.active_instances == 3
        for token in ("", "wrong"):
            async with channel(address, ChannelSecurity(tls_ca=str(cert), token=token)) as ch:
                with pytest.raises(errors.Unauthenticated), decoded_errors():
                    await pb_grpc.ControlPlaneServiceStub(ch).GetSummary(pb.GetSummaryRequest())
                with pytest.raises(errors.Unauthenticated), decoded_errors():
                    async for _ in pb_grpc.ControlPlaneServiceStub(ch).WatchEvents(pb.WatchEventsRequest()):
                        pass
                await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest())
    finally:
        await server.stop(0)
