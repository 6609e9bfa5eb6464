"""SGLang: its server of the pool's own interpreter, on loopback TCP (it has no unix socket)."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from nodeagent.engines.adapter import (
    Capabilities,
    EngineCommand,
    EngineLaunch,
    EngineLoad,
    Readiness,
    ReadyReason,
    Tags,
)
from nodeagent.engines.dev_routes import checked_tags
from nodeagent.engines.http import EngineHttp
from nodeagent.engines.openai_engine import (
    LOOPBACK,
    LoadMetrics,
    OpenAiEngine,
    health,
    is_local_model,
    said,
    tcp_endpoint,
    visible_devices,
)
from nodeagent.engines.rules import flag_count, flag_name
from springtide.errors import InvalidArgument, Unavailable

_RUNNING_LIMIT = 256
_LISTENER = "Engines listen on this host only; routers reach them through the shim."
_SLICE = "A worker is tensor_parallel_size GPUs of one node."
_CODE = "It runs code of the caller's; let this node allow it (allowed_flags)."
MEMORY_SAVER = "--enable-memory-saver"
ALL_TAGS: Tags = ("kv_cache", "weights")
_MEMORY_S = 120.0
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

    async def load(self, http: EngineHttp) -> EngineLoad:
        """/v1/loads, older versions have /get_load: what the scheduler counts now. The metrics lag behind it."""
        known = await super().load(http)
        for path in ("/v1/loads?include=core", "/get_load"):
            response = await http.get(path)
            if response.status == 200:
                running, waiting, kv_use = _loads(response.json())
                return dataclasses.replace(known, running=running, waiting=waiting, kv_use=kv_use or known.kv_use)
        return known

    async def capabilities(self, http: EngineHttp) -> Capabilities:
        """Its own list of arguments says whether memory can be released."""
        for path in ("/server_info", "/get_server_info"):
            response = await http.get(path)
            answer = response.json()
            if response.status == 200 and isinstance(answer, dict):
                saver = answer.get("enable_memory_saver")
                return Capabilities(dict.fromkeys(("release", "restore"), MEMORY_SAVER) if saver is False else {})
        return Capabilities(asked=False)

    async def abort_all(self, http: EngineHttp) -> None:
        """Running and waiting ones."""
        self.done("abort_all", await http.post("/abort_request", {"abort_all": True}))

    async def abort(self, http: EngineHttp, request_id: str) -> None:
        """By the id that the request named as `rid`."""
        if not request_id:
            raise InvalidArgument(
                field="id", value=request_id, problem="is empty", remedy="Name the request, or abort all of them."
            )
        self.done("abort", await http.post("/abort_request", {"rid": request_id, "abort_all": False}))

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

    async def release(self, http: EngineHttp, level: int = 1, tags: Tags = ()) -> Tags:
        """KV cache and weights. A busy engine would die of it, so it is asked first; weights must be loaded again.

        There is no way to ask what is released: the caller keeps that record, and calls `restore` only after this.
        """
        wanted = checked_tags(tags, ALL_TAGS)
        if await self.idle(http) is not True:
            raise self.busy(http)
        response = await http.post("/release_memory_occupation", {"tags": list(wanted)}, _MEMORY_S)
        self.done("release", response, MEMORY_SAVER)
        return wanted

    async def restore(self, http: EngineHttp, tags: Tags = ()) -> None:
        """Only after `release`, and only its tags: to restore what was not released ends the server."""
        wanted = checked_tags(tags, ALL_TAGS)
        response = await http.post("/resume_memory_occupation", {"tags": list(wanted)}, _MEMORY_S)
        self.done("restore", response, MEMORY_SAVER)

    async def released(self, http: EngineHttp) -> bool | None:
        """Nobody can ask it."""
        return None

    def keeps_weights(self, level: int, args: Sequence[str]) -> bool:
        """Only with a copy on the host; without it they are garbage after the restore."""
        return level < 2 and "--enable-weights-cpu-backup" in {flag_name(arg) for arg in args}

    async def weight_version(self, http: EngineHttp) -> str | None:
        """As last labelled."""
        for path in ("/model_info", "/get_model_info"):
            response = await http.get(path)
            answer = response.json()
            if response.status == 200 and isinstance(answer, dict):
                version = answer.get("weight_version")
                return str(version) if version else None
        return None

    async def update_weights(self, http: EngineHttp, version: str, source: str, timeout_s: float = 600.0) -> None:
        """From a folder; the answer says whether it worked."""
        if not source:
            raise InvalidArgument(
                field="source", value=source, problem="is empty", remedy="Name a folder that the engine can read."
            )
        body: dict[str, object] = {"model_path": source, "flush_cache": True}
        if version:
            body["weight_version"] = version
        response = await http.post("/update_weights_from_disk", body, timeout_s)
        self.done("update_weights", response)
        answer = response.json()
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Unavailable(f"engine at {http.endpoint} did not take the weights: {said(response)}")

    async def profile(self, http: EngineHttp, start: bool) -> None:
        """Into SGLANG_TORCH_PROFILER_DIR."""
        self.done("profile", await http.post("/start_profile" if start else "/stop_profile", {}, _MEMORY_S))


def _loads(answer: object) -> tuple[int | None, int | None, float | None]:
    """(running, waiting, fullest KV use) over the ranks; a rank that does not say makes the sum unknown."""
    ranks = answer.get("loads") if isinstance(answer, dict) else answer
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return None, None, None
    running = waiting = 0
    for rank in ranks:
        queued = rank.get("num_waiting_reqs")
        present = rank.get("num_running_reqs")
        if present is None and rank.get("num_reqs") is not None and queued is not None:
            present = rank["num_reqs"] - queued  # /get_load counts both together
        if present is None or queued is None:
            return None, None, None
        running, waiting = running + int(present), waiting + int(queued)
    used = [float(rank["token_usage"]) for rank in ranks if isinstance(rank.get("token_usage"), int | float)]
    return running, waiting, max(used, default=None)
