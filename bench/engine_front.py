"""What a streamed token costs at vLLM's own fronts: HTTP (SSE) beside its gRPC server, and a client of each.

    .venv-vllm/bin/python bench/engine_front.py [--streams 8] [--tokens 200] [--rounds 3]

Run with the Python of an environment that has vLLM and `smg-grpc-servicer` (scripts/install_vllm_cpu.sh). One server
at a time, the same tiny model and flags; CPU of the server's front process (not of its engine core) from /proc, and of
a client that does nothing but read. Both divided by tokens received.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    *("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16"),
    *("--served-model-name", "tiny", "--host", "127.0.0.1"),
)
START_S = 400.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(model: Path, kind: str, log: Path) -> Iterator[tuple[int, psutil.Process]]:
    """(port, front process) of a server that is ready."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *FLAGS]
    if kind == "grpc":
        command.append("--grpc")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while not (ready_http(port) if kind == "http" else ready_grpc(port)):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{kind}: the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield port, psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ready_http(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def ready_grpc(port: int) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def read_http(port: int, tokens: int, number: int) -> int:
    """Tokens of one stream, counted by its events; bytes are not parsed."""
    body = {"model": "tiny", "prompt": f"hello {number}", "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    )
    writer.write(head.encode() + b"connection: close\r\n\r\n" + raw)
    found = 0
    while data := await reader.read(65536):
        found += data.count(b"data: {")
    writer.close()
    return found


async def read_grpc(port: int, tokens: int, number: int) -> int:
    """Tokens of one stream, counted by its chunks."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

    sampling = pb.SamplingParams(temperature=0, top_p=1, max_tokens=tokens, ignore_eos=True, n=1, repetition_penalty=1)
    request = pb.GenerateRequest(
        request_id=f"r-{number}-{time.monotonic_ns()}", sampling_params=sampling, stream=True, text=f"hello {number}"
    )
    found = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for answer in pb_grpc.VllmEngineStub(channel).Generate(request):
            found += len(answer.chunk.token_ids) if answer.HasField("chunk") else 0
    return found


def measure(kind: str, port: int, front: psutil.Process, streams: int, tokens: int) -> tuple[float, float]:
    """(server's front, client), CPU microseconds per token."""

    async def run() -> int:
        read = read_http if kind == "http" else read_grpc
        return sum(await asyncio.gather(*(read(port, tokens, number) for number in range(streams))))

    before, own = sum(front.cpu_times()[:2]), time.process_time()
    found = asyncio.run(run())
    front_s, own_s = sum(front.cpu_times()[:2]) - before, time.process_time() - own
    if found < 0.9 * streams * tokens:
        raise SystemExit(f"{kind}: {found} of {streams * tokens} tokens came")
    return 1e6 * front_s / found, 1e6 * own_s / found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    medians: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="springtide-front-") as folder:
        model = Path(folder) / "tiny"
        maker = ROOT / "tests" / "engines_real" / "tiny_model.py"
        subprocess.run([sys.executable, str(maker), str(model)], check=True, capture_output=True)
        for kind in ("http", "grpc"):
            with server(model, kind, Path(folder) / f"{kind}.log") as (port, front):
                measure(kind, port, front, given.streams, given.tokens)  # warm
                rounds = [measure(kind, port, front, given.streams, given.tokens) for _ in range(given.rounds)]
            medians[kind] = (statistics.median(a for a, _ in rounds), statistics.median(b for _, b in rounds))
            shown = ", ".join(f"{a:.0f}/{b:.0f}" for a, b in rounds)
            print(f"{kind}: front/client CPU us a token, by round: {shown}", flush=True)
    print("| front | server's front process, us a token | a client that only reads, us a token |\n| --- | --- | --- |")
    for kind, (front_us, client_us) in medians.items():
        print(f"| {kind} | {front_us:.0f} | {client_us:.0f} |")
    print(
        f"ratio gRPC : HTTP {medians['grpc'][0] / medians['http'][0]:.2f} (front), "
        f"{medians['grpc'][1] / medians['http'][1]:.2f} (client)"
    )


if __name__ == "__main__":
    main()
