"""SGLang: its server of the pool's own interpreter, on loopback TCP (it has no unix socket)."""

import sys
from collections.abc import Mapping
from typing import ClassVar

from nodeagent.engines.adapter import EngineCommand, EngineLaunch, Readiness, ReadyReason
from nodeagent.engines.http import EngineHttp
from nodeagent.engines.openai_engine import (
    LOOPBACK,
    LoadMetrics,
    OpenAiEngine,
    health,
    is_local_model,
    tcp_endpoint,
    visible_devices,
)
from nodeagent.engines.rules import flag_count, flag_name
from springtide.errors import InvalidArgument

_RUNNING_LIMIT = 256
_LISTENER = "Engines listen on this host only; routers reach them through the shim."
_SLICE = "A worker is tensor_parallel_size GPUs of one node."
_CODE = "It runs code of the caller's; let this node allow it (allowed_flags)."
# `wait` has no counterpart: the shim drains instead.
_PAUSE_MODES = {"abort": "abort", "keep": "in_place"}


class SglangAdapter(OpenAiEngine):
    """SGLang 0.5.10 and newer."""

    name = "sglang"
    load_metrics: ClassVar[LoadMetrics | None] = LoadMetrics(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        generated="sglang:generation_tokens_total",
        prompted="sglang:prompt_tokens_total",
        kv_use="sglang:token_usage",
    )
    owned: ClassVar[Mapping[str, str]] = {
        "--host": _LISTENER,
        "--port": _LISTENER,
        "--grpc-port": _LISTENER,
        "--grpc-mode": _LISTENER,
        "--smg-grpc-mode": _LISTENER,
        "--dist-init-addr": _SLICE,
        "--nnodes": _SLICE,
        "--node-rank": _SLICE,
        "--api-key": "Clients are authenticated in front of the engine.",
        "--admin-api-key": "Control routes are reachable from this host only.",
        "--ssl-keyfile": _LISTENER,
        "--ssl-certfile": _LISTENER,
        "--fastapi-root-path": _LISTENER,
        "--model-path": "Set the pool's model.",
        "--model": "Set the pool's model.",
        "--served-model-name": "Set the pool's served_model_name.",
        "--tensor-parallel-size": "Set the pool's tensor_parallel_size.",
        "--tp-size": "Set the pool's tensor_parallel_size.",
        "--tp": "Set the pool's tensor_parallel_size.",
        "--pipeline-parallel-size": _SLICE,
        "--pp-size": _SLICE,
        "--data-parallel-size": _SLICE,
        "--dp-size": _SLICE,
        "--base-gpu-id": _SLICE,
        "--config": "Write the flags into engine_args.",
    }
    denied: ClassVar[Mapping[str, str]] = {
        "--trust-remote-code": _CODE,
        "--custom-weight-loader": _CODE,
        "--custom-sigquit-handler": _CODE,
    }

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """`python -m sglang.launch_server ...`, metrics on."""
        argv = [launch.interpreter or sys.executable, "-m", "sglang.launch_server", "--model-path", launch.model]
        argv += ["--served-model-name", launch.served_model_name, "--tp-size", str(launch.tensor_parallel_size)]
        argv += ["--host", LOOPBACK, "--port", str(launch.port)]
        if "--enable-metrics" not in {flag_name(arg) for arg in launch.engine_args}:
            argv.append("--enable-metrics")
        argv += launch.engine_args
        # Without this each health probe generates a token, on a sleeping engine too.
        env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", **visible_devices(launch)}
        if is_local_model(launch.model):
            env["HF_HUB_OFFLINE"] = "1"
        return EngineCommand(tuple(argv), {**env, **launch.env}, self.endpoint(launch))

    def endpoint(self, launch: EngineLaunch) -> str:
        """Always loopback TCP."""
        return tcp_endpoint(launch, "SGLang has no unix socket: give a free port.")

    def default_max_in_flight(self, launch: EngineLaunch) -> int:
        """--max-running-requests; without it SGLang decides by memory, and this is a cautious guess."""
        return flag_count(launch.engine_args, "--max-running-requests", _RUNNING_LIMIT)

    async def probe(self, http: EngineHttp) -> Readiness:
        """/ready is 503 while paused or unhealthy; older versions have /health only. Neither generates."""
        response = await http.get("/ready")
        if response.status in (404, 405):
            return await health(http, "/health")
        if response.status == 200:
            return Readiness(ReadyReason.READY)
        state = await health(http, "/health")
        if state.ready:
            return Readiness(ReadyReason.PAUSED, "the engine is healthy but takes no requests")
        return state

    async def abort_all(self, http: EngineHttp) -> None:
        """Running and waiting ones."""
        self.done("abort_all", await http.post("/abort_request", {"abort_all": True}))

    async def pause(self, http: EngineHttp, mode: str) -> None:
        """`keep` leaves requests in the running batch: not idle, so no release and no flush then."""
        if mode not in _PAUSE_MODES:
            raise InvalidArgument(
                field="mode", value=mode, problem="is no pause mode of sglang", remedy="Use abort or keep."
            )
        self.done("pause", await http.post("/pause_generation", {"mode": _PAUSE_MODES[mode]}))

    async def resume(self, http: EngineHttp) -> None:
        """After a pause."""
        self.done("resume", await http.post("/continue_generation", {}))

    async def flush_cache(self, http: EngineHttp) -> None:
        """400 while requests run or wait."""
        response = await http.post("/flush_cache")
        if response.status == 400:
            raise self.busy(http)
        self.done("flush_cache", response)

    async def release(self, http: EngineHttp, level: int) -> None:
        """KV cache and weights. A busy engine would die of it, so it is asked first; weights must be loaded again.

        There is no way to ask what is released: the caller keeps that record, and calls `restore` only after this.
        """
        if await self.idle(http) is not True:
            raise self.busy(http)
        response = await http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        self.done("release", response, "--enable-memory-saver")

    async def restore(self, http: EngineHttp) -> None:
        """Only after `release`: to restore what was not released ends the server."""
        response = await http.post("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
        self.done("restore", response, "--enable-memory-saver")
