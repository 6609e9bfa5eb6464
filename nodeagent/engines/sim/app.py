"""The routes of the simulated engine: vLLM's HTTP surface over `SimEngine`, and /fault for tests."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from nodeagent.engines.sim import metrics
from nodeagent.engines.sim.control import control_routes, suffer
from nodeagent.engines.sim.engine import SimEngine
from nodeagent.engines.sim.faults import FaultError, make_fault
from nodeagent.engines.sim.openai import (
    ApiError,
    Generation,
    Limits,
    bad_request,
    check_model,
    parse_generation,
    parse_json,
    parse_prompt,
)
from nodeagent.engines.sim.protocol import Exchange
from nodeagent.engines.sim.tokens import Answer, UnknownTokenId, decode, encode, token_bytes

VERSION = "0.33.0+sim"
_MODES = ("abort", "wait", "keep")


class App:
    """Answers exchanges. Callable: give it to `Connection` as handler."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        options = engine.options
        self._limits = Limits(options.served_model_names, options.max_model_len, options.natural_length)
        self._started_at = int(time.time())
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: dict[tuple[str, str], Callable[[Exchange], None]] = {
            ("POST", "/v1/chat/completions"): lambda exchange: self._generate(exchange, chat=True),
            ("POST", "/v1/completions"): lambda exchange: self._generate(exchange, chat=False),
            ("POST", "/v1/embeddings"): self._embed,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/load"): lambda exchange: exchange.reply(200, {"server_load": len(engine.requests)}),
            ("GET", "/version"): lambda exchange: exchange.reply(200, {"version": VERSION}),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/fault"): self._fault,
            ("POST", "/fault"): self._fault,
            ("DELETE", "/fault"): self._fault,
        }
        self._routes[("GET", "/openapi.json")] = self._openapi
        if options.dev_mode:
            self._routes |= control_routes(engine, self._later) | {
                ("POST", "/sleep"): lambda exchange: self._later(exchange, self._sleep(exchange)),
                ("POST", "/wake_up"): lambda exchange: self._later(exchange, self._wake_up(exchange)),
                ("GET", "/is_sleeping"): self._is_sleeping,
                ("POST", "/pause"): lambda exchange: self._later(exchange, self._pause(exchange)),
                ("POST", "/resume"): self._resume,
                ("GET", "/is_paused"): self._is_paused,
                ("POST", "/abort_requests"): self._abort,
            }

    def __call__(self, exchange: Exchange) -> None:
        """Answer one exchange; what goes wrong is answered in vLLM's error shape."""
        route = self._routes.get((exchange.method, exchange.path))
        try:
            if route is None:
                known = any(path == exchange.path for _, path in self._routes)
                exchange.reply(405 if known else 404, {"detail": "Method Not Allowed" if known else "Not Found"})
            else:
                route(exchange)
        except ApiError as error:
            exchange.reply(error.status, error.body())

    def _admit(self, exchange: Exchange) -> None:
        engine = self._engine
        fault = engine.faults.claim("http_error")
        if fault is not None:
            raise ApiError(fault.whole("status"), "InternalServerError", "injected error")
        if engine.draining:
            raise ApiError(500, "InternalServerError", "cannot schedule new futures after shutdown")
        if engine.pause_mode in ("abort", "wait") and engine.sleep_level is None:
            raise ApiError(503, "ServiceUnavailableError", "The engine is paused; retry later.")

    def _generate(self, exchange: Exchange, *, chat: bool) -> None:
        self._admit(exchange)
        name = exchange.headers.get("x-request-id") or uuid.uuid4().hex
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{name}"
        fields = parse_json(exchange.body)
        generation = parse_generation(fields, chat=chat, request_id=request_id, limits=self._limits)
        self._engine.submit(exchange, generation)

    def _embed(self, exchange: Exchange) -> None:
        self._admit(exchange)
        fields = parse_json(exchange.body)
        model = check_model(fields, self._limits)
        inputs = fields.get("input")
        prompt = parse_prompt({"prompt": inputs}, chat=False) if inputs is not None else None
        if prompt is None:
            raise bad_request("input must be one text or one list of token ids", "input")
        size = fields.get("dimensions") or 16
        if type(size) is not int or not 1 <= size <= 4096:
            raise bad_request(f"dimensions must be between 1 and 4096, got {size!r}", "dimensions")
        answer = Answer(prompt)
        if answer.prompt_tokens > self._limits.max_model_len:
            raise bad_request(f"This model's maximum context length is {self._limits.max_model_len} tokens.", "input")
        vector = [word / (1 << 19) - 1.0 for word in (token_id & 0xF_FFFF for token_id in answer.ids(0, size))]
        request_id = f"embd-{uuid.uuid4().hex}"
        body = {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": 0, "object": "embedding", "embedding": vector}],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "total_tokens": answer.prompt_tokens,
                "completion_tokens": 0,
            },
        }
        # computed like a prompt with one token of output
        generation = Generation(
            request_id, model, False, False, False, False, False, prompt, answer, 1, 0, "stop", None
        )
        self._engine.submit(exchange, generation, lambda: exchange.reply(200, body))

    def _models(self, exchange: Exchange) -> None:
        data = [
            {
                "id": name,
                "object": "model",
                "created": self._started_at,
                "owned_by": "vllm",
                "root": name,
                "parent": None,
                "max_model_len": self._limits.max_model_len,
            }
            for name in self._limits.model_names
        ]
        exchange.reply(200, {"object": "list", "data": data})

    def _health(self, exchange: Exchange) -> None:
        exchange.reply(503 if self._engine.faults.get("refuse_health") else 200)

    def _metrics(self, exchange: Exchange) -> None:
        kv = self._engine.kv
        body = metrics.render(self._engine.gauges(), self._engine.metrics, kv.counts if kv is not None else None)
        exchange.reply(200, body, "text/plain; version=0.0.4; charset=utf-8")

    def _tokenize(self, exchange: Exchange) -> None:
        fields = parse_json(exchange.body)
        check_model(fields, self._limits)
        prompt = parse_prompt(fields, chat="messages" in fields)
        ids = encode(prompt) if isinstance(prompt, str) else list(prompt)
        strings = [token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
        wanted = bool(fields.get("return_token_strs"))
        exchange.reply(
            200,
            {
                "count": len(ids),
                "max_model_len": self._limits.max_model_len,
                "tokens": ids,
                "token_strs": strings if wanted else None,
            },
        )

    def _detokenize(self, exchange: Exchange) -> None:
        fields = parse_json(exchange.body)
        check_model(fields, self._limits)
        ids = fields.get("tokens")
        if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
            raise bad_request("tokens must be a list of token ids", "tokens")
        try:
            exchange.reply(200, {"prompt": decode(ids)})
        except UnknownTokenId as error:
            raise bad_request(str(error), "tokens") from None

    def _openapi(self, exchange: Exchange) -> None:
        paths: dict[str, dict[str, object]] = {}
        for method, path in self._routes:
            paths.setdefault(path, {})[method.lower()] = {}
        exchange.reply(200, {"openapi": "3.1.0", "paths": paths})

    async def _sleep(self, exchange: Exchange) -> None:
        if not self._engine.options.sleep_mode:
            raise ApiError(500, "InternalServerError", "sleep mode is not enabled")
        level = exchange.query.get("level", ["1"])[0]
        if level not in ("0", "1", "2"):
            raise bad_request(f"level must be 0, 1 or 2, got {level!r}", "level")
        await self._engine.sleep(int(level), self._mode(exchange, "abort"))
        exchange.reply(200)

    async def _pause(self, exchange: Exchange) -> None:
        await self._engine.pause(self._mode(exchange, "abort"))
        exchange.reply(200, {"status": "paused"})

    def _mode(self, exchange: Exchange, default: str) -> str:
        mode = exchange.query.get("mode", [default])[0]
        if mode not in _MODES:
            raise bad_request(f"mode must be one of {', '.join(_MODES)}, got {mode!r}", "mode")
        return mode

    async def _wake_up(self, exchange: Exchange) -> None:
        await suffer(self._engine.faults, "wake_slow", "wake_fails", "injected failure to wake")
        tags = [tag for tag in exchange.query.get("tags", []) if tag]
        unknown = sorted(set(tags) - {"weights", "kv_cache", "scheduling"})
        if unknown:
            raise bad_request(f"tags must be of weights, kv_cache, scheduling, got {unknown}", "tags")
        self._engine.wake_up(tags)
        exchange.reply(200, {"status": "sleeping" if self._engine.sleep_level is not None else "awake"})

    def _is_sleeping(self, exchange: Exchange) -> None:
        engine = self._engine  # true when merely paused, as in vLLM
        exchange.reply(200, {"is_sleeping": engine.sleep_level is not None or engine.pause_mode is not None})

    def _resume(self, exchange: Exchange) -> None:
        self._engine.resume()
        exchange.reply(200, {"status": "resumed"})

    def _is_paused(self, exchange: Exchange) -> None:
        exchange.reply(200, {"is_paused": self._engine.pause_mode is not None})

    def _abort(self, exchange: Exchange) -> None:
        fields = parse_json(exchange.body or b"{}")
        ids = fields.get("request_ids") or []
        if not isinstance(ids, list):
            raise bad_request("request_ids must be a list", "request_ids")
        exchange.reply(200, {"aborted": self._engine.abort([str(request_id) for request_id in ids])})

    def _fault(self, exchange: Exchange) -> None:
        if not exchange.local:
            exchange.reply(403, {"detail": "faults are injected from this host only"})
            return
        if exchange.method == "DELETE":
            self._engine.lift_faults()
        elif exchange.method == "POST":
            try:
                self._engine.inject(make_fault(parse_json(exchange.body), at_start=False))
            except FaultError as error:
                raise bad_request(str(error), "kind") from None
        exchange.reply(200, {"faults": self._engine.faults.describe(), "orphans": self._engine.orphans})

    def _later(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except ApiError as error:
                exchange.reply(error.status, error.body())

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
