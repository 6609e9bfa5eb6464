"""Clients of other languages, as they are: gRPC for Node, gRPC for C++ as Debian has it, and `buf curl` (Go)."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import error_details_pb2

from nodeagent.engines.sim.tokens import answer_text
from springtide.model.routing import RoutedPool
from tests.dataplane.fakes import until
from tests.router.fakes import router, sim_engine, table, worker

ROOT = Path(__file__).parent.parent.parent
BUF = ROOT / "node_modules" / ".bin" / "buf"
METHOD = "springtide.v1.GenerationService/Generate"

pytestmark = pytest.mark.heavy


async def run(*argv: str | Path, within_s: float = 50.0) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), within_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()


async def test_grpc_for_node(tmp_path: Path) -> None:
    """RT1, RT8"""
    async with sim_engine(tmp_path) as (port, _), router(table(worker("a", port))) as r:
        script = Path(__file__).with_name("grpc_js_client.cjs")
        code, out, err = await run("node", script, r.grpc_address, ROOT / "protos", "20")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        assert [x["text"] for x in found["many"]] == [answer_text(f"tide {i}", 30) for i in range(20)]
        assert all(
            x["code"] == 0 and x["kinds"][0] == "started" and x["kinds"][-1] == "finished" for x in found["many"]
        )
        assert found["deadline"]["code"] == 4
        assert found["cancelled"]["code"] == 1
        assert found["refused"]["code"] == 3
        assert "grpc-status-details-bin" in found["refused"]["trailers"]
        assert [model["name"] for model in found["models"]] == ["m"]
        assert found["after"]["text"] == answer_text("tide 1", 30)
        await until(lambda: r.in_flight == 0)


async def built_cpp_client(folder: Path) -> Path:
    """Stubs from the published protos, and a client of them: made by Debian's protoc and g++."""
    google = Path(error_details_pb2.__file__).parents[2]
    made = [Path("springtide/v1/generation"), Path("google/rpc/status"), Path("google/rpc/error_details")]
    stub = f"{made[0]}.proto"
    flags = ["-I", str(ROOT / "protos"), "-I", str(google), f"--cpp_out={folder}"]
    await built("protoc", *flags, *(f"{name}.proto" for name in made))
    await built("protoc", *flags, f"--grpc_out={folder}", f"--plugin=protoc-gen-grpc={which('grpc_cpp_plugin')}", stub)
    sources = [Path(__file__).with_name("grpc_cpp_client.cc"), folder / f"{made[0]}.grpc.pb.cc"]
    sources += [folder / f"{name}.pb.cc" for name in made]
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    compiler = ("g++", "-std=c++17", "-O0", f"-I{folder}")
    gate = asyncio.Semaphore(2)

    async def compile_one(source: Path, into: Path) -> None:
        async with gate:
            await built(*compiler, "-c", source, "-o", into)

    await asyncio.gather(*map(compile_one, sources, objects))
    libraries = (await built("pkg-config", "--libs", "grpc++", "protobuf")).split()
    await built(*compiler, *objects, "-o", folder / "client", *libraries)
    return folder / "client"


async def built(*argv: str | Path) -> str:
    code, out, err = await run(*argv, within_s=200)
    assert code == 0, err
    return out


@pytest.mark.timeout(300)
async def test_grpc_for_cpp(tmp_path: Path) -> None:
    """RT1, RT3, RT8: streams, a deadline, a cancellation, and google.rpc details of errors, with the C core of 2022."""
    client = await built_cpp_client(tmp_path)
    roomy = ("--max-model-len", "300000", "--num-gpu-blocks-override", "100000", "--prefill-tokens-per-s", "1e9")
    async with sim_engine(tmp_path, *roomy) as (port, _):
        known = table(worker("a", port))
        empty = RoutedPool("p2", "m2", max_waiting=8, waiting_timeout_s=0.2, max_workers=1)
        known = replace(known, pools={**known.pools, "p2": empty})
        async with router(known) as r:
            code, out, err = await run(client, r.grpc_address, "20")
            assert code == 0, err
            found = {name: Cpp(int(code), *rest) for name, code, *rest in (x.split("|") for x in out.splitlines())}
            for number in range(20):
                told = found[f"many{number}"]
                assert (told.code, told.text) == (0, answer_text(f"tide {number}", 30))
                assert re.fullmatch("st+f", told.kinds)
            assert found["deadline"].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert found["deadline"].kinds.startswith("st")
            assert found["cancelled"].code == grpc.StatusCode.CANCELLED.value[0]
            assert found["refused"].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert found["refused"].details
            assert found["unknown"].code == grpc.StatusCode.NOT_FOUND.value[0]
            assert found["unknown"].details
            assert found["empty"].code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert found["empty"].details.endswith("+retry")
            assert found["models"].text.split() == ["m", "m2"]
            assert found["long"].text == answer_text("x" * 600_000, 5)
            assert found["after"].text == answer_text("tide 1", 30)
            await until(lambda: r.in_flight == 0)


class Cpp(NamedTuple):
    """One call as the C++ client saw it. `kinds`: s, t and f for the events' kinds."""

    code: int
    kinds: str
    text: str
    details: str


async def curl(address: str, request: dict[str, object], *flags: str) -> tuple[int, list[dict[str, Any]], str]:
    argv: list[str | Path] = [
        BUF,
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        *flags,
        "-d",
        json.dumps(request),
    ]
    code, out, err = await run(*argv, f"http://{address}/{METHOD}")
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(out.rstrip()):
        value, at = decoder.raw_decode(out, at)
        found.append(value)
        while at < len(out) and out[at].isspace():
            at += 1
    return code, found, err


@pytest.mark.parametrize("flags", [["--schema", "protos"], []], ids=["schema", "reflection"])
async def test_buf_curl(tmp_path: Path, flags: list[str]) -> None:
    """RT1, CP21"""
    async with sim_engine(tmp_path) as (port, _), router(table(worker("a", port))) as r:
        request: dict[str, object] = {"pool": "p", "prompt": "tide", "sampling": {"maxTokens": 10}}
        code, found, err = await curl(r.grpc_address, request, *flags)
        assert code == 0, err
        assert "".join(x.get("tokens", {}).get("text", "") for x in found) == answer_text("tide", 10)
        assert "started" in found[0]
        assert "finished" in found[-1]
        code, found, err = await curl(r.grpc_address, {"pool": "nope", "prompt": "x"}, *flags)
        assert code != 0
        assert not found
        assert "not_found" in err
        assert "POOL_NOT_FOUND" in err or "MODEL_NOT_FOUND" in err or "Known: m" in err
