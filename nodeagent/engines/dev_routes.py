"""The control routes of vLLM's dev mode, which the simulated engine has too: sleep, pause, abort, caches."""

from nodeagent.engines.adapter import EngineLoad, Readiness, ReadyReason
from nodeagent.engines.http import EngineHttp, Response
from nodeagent.engines.metrics_text import highest, read_metrics, total
from nodeagent.engines.openai_engine import OpenAiEngine, health, said
from springtide.errors import FailedPrecondition, InvalidArgument, Unavailable

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = "vllm:kv_cache_usage_perc"
_GENERATED = "vllm:generation_tokens_total"
_PROMPTED = "vllm:prompt_tokens_total"
_LOAD_NAMES = frozenset({_RUNNING, _WAITING, _KV_USE, _GENERATED, _PROMPTED})
PAUSE_MODES = ("abort", "wait", "keep")


class DevRoutesEngine(OpenAiEngine):
    """Probes and verbs over vLLM's HTTP surface."""

    async def probe(self, http: EngineHttp) -> Readiness:
        """/health stays 200 while the engine sleeps or is paused, so both are asked for as well."""
        state = await health(http, "/health")
        if not state.ready:
            return state
        paused = await self._flag(http, "/is_paused", "is_paused")
        sleeping = await self._flag(http, "/is_sleeping", "is_sleeping")
        if sleeping and (not paused or await self._memory_released(http)):
            return Readiness(ReadyReason.SLEEPING, "the engine sleeps")
        if paused or sleeping:  # is_sleeping is also true of a merely paused engine
            return Readiness(ReadyReason.PAUSED, "the engine is paused")
        return state

    async def load(self, http: EngineHttp) -> EngineLoad:
        """From /metrics; all None when the engine shows none."""
        response = await http.get("/metrics")
        if response.status != 200:
            return EngineLoad()
        samples = read_metrics(response.text(), _LOAD_NAMES)
        return EngineLoad(
            running=total(samples, _RUNNING),
            waiting=total(samples, _WAITING),
            kv_use=highest(samples, _KV_USE),
            generation_tokens_total=total(samples, _GENERATED),
            prompt_tokens_total=total(samples, _PROMPTED),
        )

    async def abort_all(self, http: EngineHttp) -> None:
        """An empty list of ids aborts everything."""
        self._done("abort_all", await http.post("/abort_requests", {"request_ids": []}))

    async def pause(self, http: EngineHttp, mode: str) -> None:
        """`wait` takes as long as the longest running answer: give `http` the time."""
        if mode not in PAUSE_MODES:
            raise InvalidArgument(
                field="mode", value=mode, problem="is no pause mode", remedy=f"Use one of {', '.join(PAUSE_MODES)}."
            )
        self._done("pause", await http.post(f"/pause?mode={mode}"))

    async def resume(self, http: EngineHttp) -> None:
        """Harmless when not paused."""
        self._done("resume", await http.post("/resume"))

    async def flush_cache(self, http: EngineHttp) -> None:
        """Of prefixes."""
        self._done("flush_cache", await http.post("/reset_prefix_cache"))

    async def release(self, http: EngineHttp, level: int) -> None:
        """Sleep. A second call is a no-op; refused unless the engine itself is idle."""
        if level not in (1, 2):
            raise InvalidArgument(field="level", value=level, problem="is no sleep level", remedy="Use 1 or 2.")
        if (await self.probe(http)).reason is ReadyReason.SLEEPING:
            return
        if await self.idle(http) is not True:
            raise FailedPrecondition(
                f"engine at {http.endpoint} is not idle, or does not say so.",
                reason="ENGINE_BUSY",
                field="engine",
                value=http.endpoint,
                remedy="Drain the worker first.",
            )
        self._done("release", await http.post(f"/sleep?level={level}"), "--enable-sleep-mode and " + DEV_MODE)

    async def restore(self, http: EngineHttp) -> None:
        """Wake up. Only what was released is restored: a waking engine is left alone."""
        if (await self.probe(http)).reason is ReadyReason.SLEEPING:
            self._done("restore", await http.post("/wake_up"), "--enable-sleep-mode and " + DEV_MODE)

    async def _flag(self, http: EngineHttp, path: str, key: str) -> bool:
        response = await http.get(path)
        answer = response.json()
        # 404: without dev mode nobody can put the engine to sleep or pause it
        return response.status == 200 and isinstance(answer, dict) and answer.get(key) is True

    async def _memory_released(self, http: EngineHttp) -> bool:
        text = (await http.get("/metrics")).text()
        lines = [line for line in text.splitlines() if line.startswith("vllm:engine_sleep_state{")]
        return any('sleep_state="awake"' not in line and line.endswith((" 1.0", " 1")) for line in lines)

    def _done(self, verb: str, response: Response, missing: str = DEV_MODE) -> None:
        if response.status in (404, 405):
            raise self.cannot(verb, missing)
        if response.status >= 400:
            raise Unavailable(f"engine refused to {verb} ({response.status}): {said(response)}")
