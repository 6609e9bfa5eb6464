"""The public gRPC port: health, reflection, channelz and ListModels by grpc.aio, and `Generate` by the front of choice.

With `h2`, our own HTTP/2 server has the port and passes on what is not `Generate`; with `grpcio`, grpc.aio has it.
"""

import asyncio
import contextlib
import socket

from router.grpc_front import GenerationService
from router.h2.front import GenerateFront
from router.private_folder import PrivateFolder
from router.upstream import Dispatcher
from springtide.dataplane import Limits
from springtide.errors import InvalidArgument
from springtide.rpc import Security, Server
from springtide.rpc.fronted import authorizer, tls_context
from springtide.rpc.server import in_use
from springtide.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server

SERVICE = "springtide.v1.GenerationService"
FRONTS = ("h2", "grpcio")


class GrpcPort:
    """`listen`, `start`, `stop`, in this order. `server` is grpc.aio's."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        security: Security,
        generate_front: str,
        reuse_port: bool = False,
    ) -> None:
        if generate_front not in FRONTS:
            raise InvalidArgument(
                field="generate_front",
                value=generate_front,
                problem="is no front for Generate",
                remedy=f"Set one of: {', '.join(FRONTS)}.",
            )
        self.server = Server(security, reuse_port=reuse_port)
        self._reuse_port = reuse_port
        self.service = GenerationService(dispatcher, limits)
        self.server.add(add_GenerationServiceServicer_to_server, self.service, SERVICE)
        self.front: GenerateFront | None = None
        self._security = security
        self._tls = tls_context(security) if generate_front == "h2" else None
        self._socket: socket.socket | None = None
        self._folder: PrivateFolder | None = None
        if generate_front == "h2":
            self._folder = PrivateFolder()
            self.front = GenerateFront(dispatcher, str(self._folder.path / "grpc"), limits, authorizer(security))

    def listen(self, address: str, setting: str = "listen") -> str:
        """Takes the port; gives the bound host:port. Raises InvalidArgument or FailedPrecondition with a remedy."""
        if self.front is None:
            return self.server.listen(address, setting)
        parsed = self.server.checked(address, setting)
        family = socket.AF_INET6 if ":" in parsed.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listening.bind((parsed.host, parsed.port))
        except OSError:
            listening.close()
            raise in_use(parsed, setting) from None
        self._socket = listening
        return f"{str(parsed).rpartition(':')[0]}:{listening.getsockname()[1]}"

    async def start(self) -> None:
        """Serves. Health says NOT_SERVING until it is told otherwise."""
        if self.front is not None:
            assert self._folder is not None
            self.server.listen_privately(str(self._folder.path / "grpc"))
        await self.server.start()
        if self.front is not None:
            assert self._socket is not None
            await self.front.start(self._socket, self._tls)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls; running ones get `grace_s` seconds. Idle connections to workers are closed."""
        async with asyncio.TaskGroup() as ending:
            ending.create_task(self.server.stop(grace_s))  # health says so at once
            if self.front is not None:
                ending.create_task(self.front.close(grace_s))
        self.service.pool.close()

    def close(self) -> None:
        """Leaves nothing behind, also where `start` was never reached."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        if self._folder is not None:
            self._folder.close()
