"""Clients of other languages, as they are: gRPC for Node, and `buf curl` (Go)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.sim.tokens import answer_text
from tests.dataplane.fakes import until
from tests.router.fakes import router, sim_engine, table, worker

ROOT = Path(__file__).parent.parent.parent
BUF = ROOT / "node_modules" / ".bin" / "buf"
METHOD = "springtide.v1.GenerationService/Generate"

pytestmark = pytest.mark.heavy


async def run(*argv: str | Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 50)
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
