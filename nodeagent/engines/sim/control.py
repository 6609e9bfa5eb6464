"""Routes of vLLM's dev mode beside sleep and pause: caches, the KV cache's memory, weights, profiler, description."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from nodeagent.engines.sim.engine import SimEngine
from nodeagent.engines.sim.faults import FaultBoard
from nodeagent.engines.sim.openai import ApiError, bad_request, parse_json
from nodeagent.engines.sim.protocol import Exchange

Later = Callable[[Exchange, Coroutine[Any, Any, None]], None]
Routes = dict[tuple[str, str], Callable[[Exchange], None]]


def control_routes(engine: SimEngine, later: Later) -> Routes:
    """The routes by method and path."""
    control = _Control(engine)
    return {
        ("POST", "/reset_prefix_cache"): control.reset_prefix_cache,
        ("POST", "/release_kv_cache_memory"): control.release_kv_cache,
        ("POST", "/collective_rpc"): lambda exchange: later(exchange, control.collective_rpc(exchange)),
        ("POST", "/update_weight_version"): control.update_weight_version,
        ("GET", "/weight_info"): lambda exchange: exchange.reply(
            200, {"weight_version": engine.weight_version or None}
        ),
        ("GET", "/server_info"): control.server_info,
        ("POST", "/start_profile"): lambda exchange: control.profile(exchange, True),
        ("POST", "/stop_profile"): lambda exchange: control.profile(exchange, False),
    }


async def suffer(faults: FaultBoard, slow_kind: str, broken_kind: str, text: str) -> None:
    """What a change of the engine suffers by faults of these kinds: it lasts longer, it fails with `text`. Raises
    ApiError."""
    slow, broken = faults.claim(slow_kind), faults.claim(broken_kind)
    if slow is not None:
        await asyncio.sleep(slow.number("seconds"))
    if broken is not None:
        raise ApiError(broken.whole("status"), "InternalServerError", text)


class _Control:
    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def reset_prefix_cache(self, exchange: Exchange) -> None:
        self._engine.flushes += 1
        exchange.reply(200, {"success": True})

    def release_kv_cache(self, exchange: Exchange) -> None:
        if not self._engine.release_kv_cache():
            raise ApiError(500, "InternalServerError", "needs a completed pause, no requests and everything resident")
        exchange.reply(200, {"status": "kv_cache_released"})

    async def collective_rpc(self, exchange: Exchange) -> None:
        """Only reload_weights is known. Needs its weights to be resident, as the real one does."""
        fields = parse_json(exchange.body)
        if fields.get("method") != "reload_weights":
            raise bad_request(f"method must be reload_weights, got {fields.get('method')!r}", "method")
        await suffer(self._engine.faults, "weights_slow", "weights_fail", "injected failure of a weight update")
        if "weights" not in self._engine.resident:
            raise ApiError(500, "InternalServerError", "the weights' memory is released")
        if self._engine.requests and self._engine.pause_mode is None:
            raise ApiError(500, "InternalServerError", "weights cannot change while requests run")
        kwargs = fields.get("kwargs")
        path = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
        if path is not None and (not isinstance(path, str) or not path):
            raise bad_request("weights_path must be a folder", "kwargs")
        self._engine.weights_path = path or ""
        exchange.reply(200, {"results": [None]})

    def update_weight_version(self, exchange: Exchange) -> None:
        version = parse_json(exchange.body).get("new_version")
        if not isinstance(version, str):
            raise bad_request("new_version must be a string", "new_version")
        self._engine.weight_version = version
        exchange.reply(200, {"success": True, "new_version": version})

    def server_info(self, exchange: Exchange) -> None:
        options = self._engine.options
        config = {"model_config": {"enable_sleep_mode": options.sleep_mode}, "device_config": {"device_type": "sim"}}
        held = {
            "held_bytes": self._engine.memory.held_bytes,
            "weights_path": self._engine.weights_path,
            "flushes": self._engine.flushes,
            "profiling": self._engine.profiling,
        }
        exchange.reply(200, {"vllm_config": config, "sim": held})

    def profile(self, exchange: Exchange, on: bool) -> None:
        self._engine.profiling = on
        exchange.reply(200)
