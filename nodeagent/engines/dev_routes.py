"""The control routes of vLLM's dev mode, which the simulated engine has too: sleep, pause, abort, caches."""

from typing import ClassVar

from nodeagent.engines.adapter import Readiness, ReadyReason
from nodeagent.engines.http import EngineHttp, Response
from nodeagent.engines.openai_engine import LoadMetrics, OpenAiEngine, health
from springtide.errors import InvalidArgument

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
PAUSE_MODES = ("abort", "wait", "keep")


class DevRoutesEngine(OpenAiEngine):
    """Probes and verbs over vLLM's HTTP surface."""

    load_metrics: ClassVar[LoadMetrics | None] = LoadMetrics(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        generated="vllm:generation_tokens_total",
        prompted="vllm:prompt_tokens_total",
        kv_use="vllm:kv_cache_usage_perc",
    )

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

    async def abort_all(self, http: EngineHttp) -> None:
        """An empty list of ids aborts everything."""
        self.done("abort_all", await http.post("/abort_requests", {"request_ids": []}))

    async def pause(self, http: EngineHttp, mode: str) -> None:
        """`wait` takes as long as the longest running answer: give `http` the time."""
        if mode not in PAUSE_MODES:
            raise InvalidArgument(
                field="mode", value=mode, problem="is no pause mode", remedy=f"Use one of {', '.join(PAUSE_MODES)}."
            )
        self.done("pause", await http.post(f"/pause?mode={mode}"))

    async def resume(self, http: EngineHttp) -> None:
        """Harmless when not paused."""
        self.done("resume", await http.post("/resume"))

    async def flush_cache(self, http: EngineHttp) -> None:
        """Of prefixes."""
        self.done("flush_cache", await http.post("/reset_prefix_cache"))

    async def release(self, http: EngineHttp, level: int) -> None:
        """Sleep. A second call is a no-op; refused unless the engine itself is idle."""
        if level not in (1, 2):
            raise InvalidArgument(field="level", value=level, problem="is no sleep level", remedy="Use 1 or 2.")
        if (await self.probe(http)).reason is ReadyReason.SLEEPING:
            return
        if await self.idle(http) is not True:
            raise self.busy(http)
        self.done("release", await http.post(f"/sleep?level={level}"), "--enable-sleep-mode and " + DEV_MODE)

    async def restore(self, http: EngineHttp) -> None:
        """Wake up. Only what was released is restored: a waking engine is left alone."""
        if (await self.probe(http)).reason is ReadyReason.SLEEPING:
            self.done("restore", await http.post("/wake_up"), "--enable-sleep-mode and " + DEV_MODE)

    async def _flag(self, http: EngineHttp, path: str, key: str) -> bool:
        response = await http.get(path)
        answer = response.json()
        # 404: without dev mode nobody can put the engine to sleep or pause it
        return response.status == 200 and isinstance(answer, dict) and answer.get(key) is True

    async def _memory_released(self, http: EngineHttp) -> bool:
        text = (await http.get("/metrics")).text()
        lines = [line for line in text.splitlines() if line.startswith("vllm:engine_sleep_state{")]
        return any('sleep_state="awake"' not in line and line.endswith((" 1.0", " 1")) for line in lines)

    def done(self, verb: str, response: Response, missing: str = DEV_MODE) -> None:
        """These routes exist in dev mode only."""
        super().done(verb, response, missing)
