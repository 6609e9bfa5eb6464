"""Channels to other processes: where they are, how they are secured, and their errors as ours."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from springtide.errors import InvalidArgument
from springtide.rpc.address import parse_address
from springtide.rpc.server import MAX_MESSAGE_BYTES
from springtide.rpc.status import decode_error

DEFAULT_ADDRESS = "127.0.0.1:7400"


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """What a client shows: CA for TLS, certificate and key for mTLS, a token. Secrets come from the environment."""

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "ChannelSecurity":
        env = os.environ if environ is None else environ
        token = env.get("SPRINGTIDE_TOKEN", "")
        if not token and env.get("SPRINGTIDE_TOKEN_FILE"):
            lines = _read("SPRINGTIDE_TOKEN_FILE", env["SPRINGTIDE_TOKEN_FILE"]).decode().split()
            token = lines[0] if lines else ""
        return cls(
            tls_ca=env.get("SPRINGTIDE_TLS_CA", ""),
            tls_cert=env.get("SPRINGTIDE_TLS_CERT", ""),
            tls_key=env.get("SPRINGTIDE_TLS_KEY", ""),
            token=token,
        )


def controlplane_address(environ: Mapping[str, str] | None = None) -> str:
    """Where the control plane is: SPRINGTIDE_ADDRESS, else the default."""
    return (os.environ if environ is None else environ).get("SPRINGTIDE_ADDRESS") or DEFAULT_ADDRESS


def channel(
    address: str | None = None,
    security: ChannelSecurity | None = None,
    *,
    max_backoff_s: float = 2.0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """An open-lazily channel to `address` (default: SPRINGTIDE_ADDRESS). Dead connections are found within 15 s."""
    target = address or controlplane_address()
    parse_address(target, "address")
    shown = ChannelSecurity.from_environment() if security is None else security
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", int(max_backoff_s * 1000)),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    interceptors = _token_interceptors(shown.token) if shown.token else None
    if not shown.tls_ca:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(
        _read("SPRINGTIDE_TLS_CA", shown.tls_ca),
        _read("SPRINGTIDE_TLS_KEY", shown.tls_key) if shown.tls_key else None,
        _read("SPRINGTIDE_TLS_CERT", shown.tls_cert) if shown.tls_cert else None,
    )
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


@contextmanager
def decoded_errors(what: str = "server", address: str = "") -> Iterator[None]:
    """Raises springtide.errors for every gRPC error inside. `what` and `address` name the callee."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise decode_error(error, what, address) from None


def _token_interceptors(token: str) -> list[grpc.aio.ClientInterceptor]:
    def with_token(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = details.metadata if details.metadata is not None else grpc.aio.Metadata()
        metadata.add("authorization", f"Bearer {token}")
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    # One class per call kind: grpc.aio keeps an interceptor only for the first kind that it is an instance of.
    async def forward(self: Any, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(with_token(client_call_details), request)

    kinds: list[tuple[type, str]] = [
        (grpc.aio.UnaryUnaryClientInterceptor, "intercept_unary_unary"),
        (grpc.aio.UnaryStreamClientInterceptor, "intercept_unary_stream"),
        (grpc.aio.StreamUnaryClientInterceptor, "intercept_stream_unary"),
        (grpc.aio.StreamStreamClientInterceptor, "intercept_stream_stream"),
    ]
    return [type("Token" + base.__name__, (base,), {method: forward})() for base, method in kinds]


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            field=setting, value=path, problem=error.strerror or str(error), remedy=f"Set {setting} to a readable file."
        ) from None
