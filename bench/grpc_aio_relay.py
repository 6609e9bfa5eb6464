"""The plain way to serve `Generate` in Python, as a yardstick: grpc.aio, one servicer coroutine a stream.

    python -m bench.grpc_aio_relay PORT ENGINE_PORT uvloop|asyncio

Reads the engine's events with asyncio streams and yields one message a token. No policy, no accounting.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import orjson
import uvloop

from springtide.v1 import generation_pb2 as pb
from springtide.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Relay(GenerationServiceServicer):
    """Prompt in, tokens out."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """One generation."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._engine_port)
        try:
            body = orjson.dumps(
                {"model": "m", "prompt": request.prompt, "stream": True, "max_tokens": request.sampling.max_tokens}
            )
            writer.write(_HEAD % len(body) + body)
            await reader.readuntil(b"\r\n\r\n")
            yield pb.GenerateResponse(started=pb.Started(request_id="r", worker_id="w1"))
            reason = ""
            while size := int(await reader.readline(), 16):
                event = (await reader.readexactly(size + 2))[6:-4]
                if event == b"[DONE]":
                    break
                choice = orjson.loads(event)["choices"][0]
                reason = choice["finish_reason"] or ""
                yield pb.GenerateResponse(tokens=pb.Tokens(text=choice["text"]))
            yield pb.GenerateResponse(finished=pb.Finished(finish_reason=reason))
        finally:
            writer.close()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """None."""
        return pb.ListModelsResponse()


async def serve(port: int, engine_port: int) -> None:
    """Until it is killed."""
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(Relay(engine_port), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    run = {"uvloop": uvloop.run, "asyncio": asyncio.run}[sys.argv[3]]
    run(serve(int(sys.argv[1]), int(sys.argv[2])))
