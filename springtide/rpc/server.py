"""A gRPC server as each process runs it: documented errors, health, reflection, channelz, bounds, closed by default."""

import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from springtide.errors import FailedPrecondition, InvalidArgument
from springtide.rpc.address import Address, parse_address
from springtide.rpc.certificates import Certificates
from springtide.rpc.interceptors import ErrorInterceptor, TokenInterceptor
from springtide.rpc.tokens import JoinTokens

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


@dataclass(frozen=True, slots=True)
class Security:
    """Files that open a listener to other machines. `token_file`: one token a line; `tls_client_ca`: mTLS."""

    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token_file: str = ""
    insecure: bool = False  # said explicitly: a non-loopback listener without TLS and tokens

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert and self.tls_key)

    @property
    def authenticates(self) -> bool:
        return bool(self.token_file or self.tls_client_ca)


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, reuse_port: bool = False) -> list[tuple[str, int]]:
    """Options shared by all servers: no two servers on one port unless told, dead peers found, messages bounded."""
    return [
        ("grpc.so_reuseport", int(reuse_port)),  # else a second server would share the port silently
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.enable_channelz", 1),
    ]


class Server:
    """Wraps grpc.aio.Server. Add services, listen, start; health answers per service and for "" (the whole)."""

    def __init__(
        self,
        security: Security | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        reuse_port: bool = False,
        join: JoinTokens | None = None,
    ) -> None:
        """`join`: this listener is for the network, and agents and provisioners come with join tokens."""
        self._security = security or Security()
        self._reuse_port = reuse_port  # other processes of ours listen there, too
        self._join = join
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if self._security.token_file or join is not None:
            tokens = read_tokens(self._security.token_file) if self._security.token_file else ()
            required = bool(tokens) or not (self._security.tls_client_ca or self._security.insecure)
            interceptors.append(TokenInterceptor(tokens, join, required=required))
        self._server = grpc.aio.server(interceptors=interceptors, options=server_options(max_message_bytes, reuse_port))
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []

    def add(self, register: Callable[[Any, Any], None], servicer: Any, full_name: str) -> None:
        """`register` is the generated add_...Servicer_to_server; `full_name` e.g. "springtide.v1.AgentService"."""
        register(servicer, self._server)
        self._names.append(full_name)

    def listen(self, address: str, setting: str = "listen") -> str:
        """Binds and returns the bound host:port. Raises InvalidArgument or FailedPrecondition with a remedy."""
        parsed = self.checked(address, setting)
        credentials = _credentials(self._security)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(str(parsed))
            else:
                port = self._server.add_secure_port(str(parsed), credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise in_use(parsed, setting)
        return f"{str(parsed).rpartition(':')[0]}:{port}"

    def checked(self, address: str, setting: str = "listen") -> Address:
        """An address where this server, or one in front of it with its security, may listen. Raises as `listen`."""
        parsed = parse_address(address, setting)
        has_tls = _credentials(self._security) is not None
        authenticates = self._security.authenticates or self._join is not None
        if not (parsed.is_loopback or (has_tls and authenticates) or self._security.insecure):
            raise InvalidArgument(
                field=setting,
                value=address,
                problem="is reachable from other machines, which needs TLS and tokens",
                remedy="Set tls_cert, tls_key and token_file (or tls_client_ca), or listen on 127.0.0.1.",
                reason="INSECURE_LISTENER",
            )
        if not self._reuse_port:
            _check_free(parsed, setting)
        return parsed

    def listen_privately(self, path: str) -> None:
        """Binds a unix socket, for a front on this machine that has TLS; tokens are asked for here, too."""
        if self._server.add_insecure_port(f"unix:{path}") == 0:
            raise FailedPrecondition(f"Cannot listen on {path}.", reason="PORT_IN_USE", remedy="Remove that file.")

    async def start(self) -> None:
        """Adds health, reflection and channelz, then serves. Services start NOT_SERVING until `set_serving`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        channelz.add_channelz_servicer(self._server)
        listed = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1]
        reflection.enable_server_reflection(listed, self._server)
        self._server.add_generic_rpc_handlers((_reflection_v1(listed),))
        for name in ("", *self._names):
            await self.set_serving(name, False)
        await self._server.start()

    async def set_serving(self, name: str, serving: bool) -> None:
        """Health of one service by its full name, or of the whole process by ""."""
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(name, statuses.SERVING if serving else statuses.NOT_SERVING)

    async def set_all_serving(self, serving: bool) -> None:
        for name in ("", *self._names):
            await self.set_serving(name, serving)

    async def stop(self, grace_s: float) -> None:
        """Health says NOT_SERVING, new calls are refused, running ones get `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def wait_for_termination(self) -> None:
        await self._server.wait_for_termination()


def _check_free(address: Address, setting: str) -> None:
    """Asks the kernel before gRPC does, whose own complaint goes to stderr and names no setting."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise in_use(address, setting) from None
            problem = (error.strerror or str(error)).lower()
            remedy = f"Set {setting} to an address of this machine and a port that this user may bind."
            raise InvalidArgument(field=setting, value=str(address), problem=problem, remedy=remedy) from None


def in_use(address: Address, setting: str) -> FailedPrecondition:
    """The error for an address that somebody else listens on."""
    return FailedPrecondition(
        f"{setting} = {address}: the port is in use.",
        reason="PORT_IN_USE",
        field=setting,
        value=str(address),
        remedy=f"Stop what listens there (ss -ltnp 'sport = :{address.port}'), or set {setting} to a free port.",
    )


def _reflection_v1(names: list[str]) -> grpc.GenericRpcHandler:
    """v1 has the messages of v1alpha under another service name; newer grpcurl asks for it first."""
    servicer = reflection.aio.ReflectionServicer(names)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": method})


def _credentials(security: Security) -> grpc.ServerCredentials | None:
    if not (security.tls_cert or security.tls_key or security.tls_client_ca):
        return None
    for name in ("tls_cert", "tls_key"):
        if not getattr(security, name):
            raise InvalidArgument(
                field=name, value="", problem="is missing", remedy="Set tls_cert and tls_key together, as PEM files."
            )
    for name in ("tls_key", "tls_cert", *(("tls_client_ca",) if security.tls_client_ca else ())):
        _read(name, getattr(security, name))
    try:
        certificates = Certificates(security.tls_cert, security.tls_key, security.tls_client_ca)
    except ssl.SSLError as error:
        raise InvalidArgument(
            field="tls_cert",
            value=security.tls_cert,
            problem=f"cannot be used with tls_key: {error}",
            remedy="Set tls_cert and tls_key to PEM files that belong together.",
        ) from None
    fetch: Any = certificates.fetch  # the stubs do not know that None means unchanged
    return grpc.dynamic_ssl_server_credentials(
        certificates.first, fetch, require_client_authentication=bool(security.tls_client_ca)
    )


def read_tokens(path: str) -> tuple[str, ...]:
    """Of a token_file: one token a line. Raises InvalidArgument."""
    tokens = tuple(line.strip() for line in _read("token_file", path).decode().splitlines() if line.strip())
    if not tokens:
        raise InvalidArgument(
            field="token_file", value=path, problem="holds no token", remedy="Write one token a line."
        )
    return tokens


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            field=setting, value=path, problem=error.strerror or str(error), remedy=f"Set {setting} to a readable file."
        ) from None
