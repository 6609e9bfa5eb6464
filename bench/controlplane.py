"""A control plane that knows one worker: what a router needs in order to route.

    python -m bench.controlplane WORKER_ENDPOINT [ENGINE]

Gives every router the same table (pool `m`, one worker that admits everything) and takes what it reports. A process of
its own on the load core: gRPC's threads have no place in the harness.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from bench.engine import INCARNATION, MANY
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingTable
from springtide.v1 import routing_pb2 as pb
from springtide.v1.routing_pb2_grpc import RoutingServiceServicer, add_RoutingServiceServicer_to_server
from springtide.wire.routing import snapshot_to_proto


class Routing(RoutingServiceServicer):
    """See the module."""

    def __init__(self, endpoint: str, engine: str = "") -> None:
        pool = RoutedPool("m", "m", max_waiting=MANY, waiting_timeout_s=30.0, max_workers=1, engine=engine)
        worker = RoutedWorker("w1", "m", INCARNATION, endpoint, max_in_flight=MANY)
        self._table = RoutingTable("bench", 1, {"m": pool}, {"w1": worker})

    async def Watch(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        """The snapshot, then nothing more."""
        await anext(request_iterator)
        yield pb.WatchResponse(snapshot=snapshot_to_proto(self._table))
        async for _ in request_iterator:
            pass


async def serve(endpoint: str, engine: str = "") -> None:
    """Prints its port, serves until it is killed."""
    server = grpc.aio.server()
    add_RoutingServiceServicer_to_server(Routing(endpoint, engine), server)
    print(f"port={server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
