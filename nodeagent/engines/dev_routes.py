"""The control routes of vLLM's dev mode, which the simulated engine has too: sleep, pause, abort, caches, weights."""

from collections.abc import Sequence
from typing import ClassVar

from nodeagent.engines.adapter import Capabilities, Readiness, ReadyReason, Tags
from nodeagent.engines.http import EngineHttp, NoAnswer, Response
from nodeagent.engines.openai_engine import LoadMetrics, OpenAiEngine, health, said
from springtide.errors import InvalidArgument, Unavailable

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
SLEEP_MODE = "--enable-sleep-mode"
PROFILER = "--profiler-config"
PAUSE_MODES = ("abort", "wait", "keep")
ALL_TAGS: Tags = ("weights", "kv_cache")
_SLEEP_S = 120.0
_INFO_S = 60.0  # the first /server_info runs other programs to describe the host
_DEV_VERBS = {
    "abort": "/abort_requests",
    "abort_all": "/abort_requests",
    "pause": "/pause",
    "resume": "/resume",
    "flush_cache": "/reset_prefix_cache",
    "release": "/sleep",
    "restore": "/wake_up",
    "weight_version": "/weight_info",
    "update_weights": "/collective_rpc",
}


class DevRoutesEngine(OpenAiEngine):
    """Probes and verbs over vLLM's HTTP surface."""

    counts_tokens_live = True
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

    async def capabilities(self, http: EngineHttp) -> Capabilities:
        """By the routes that it offers; where it does not list them, by those that can be asked without effect."""
        paths = await self._paths(http)
        if paths is None:
            dev = (await http.get("/is_sleeping")).status == 200 or (await http.get("/is_paused")).status == 200
            missing = {} if dev else dict.fromkeys(_DEV_VERBS, DEV_MODE)
        else:
            lacking = {verb: path for verb, path in _DEV_VERBS.items() if path not in paths}
            dev = len(lacking) < len(_DEV_VERBS)
            missing = {verb: f"a version that has {path}" if dev else DEV_MODE for verb, path in lacking.items()}
            if "/start_profile" not in paths:
                missing["profile"] = PROFILER
        if "release" in missing:
            return Capabilities(missing)
        try:
            return Capabilities({**missing, **await self._no_sleep(http)})
        except NoAnswer:  # it still gathers the description of its host: nothing is known of sleep yet
            return Capabilities(missing, asked=False)

    async def _paths(self, http: EngineHttp) -> frozenset[str] | None:
        listed = (await http.get("/openapi.json")).json()
        paths = listed.get("paths") if isinstance(listed, dict) else None
        return frozenset(str(path) for path in paths) if isinstance(paths, dict) else None

    async def _no_sleep(self, http: EngineHttp) -> dict[str, str]:
        """Why memory cannot be released although the route is there: it answers 200 on a CPU and frees nothing."""
        answer = (await http.get("/server_info?config_format=json", _INFO_S)).json()
        config = answer.get("vllm_config") if isinstance(answer, dict) else None
        if not isinstance(config, dict):
            return {}
        model, device = config.get("model_config"), config.get("device_config")
        if isinstance(device, dict) and "cpu" in str(device.get("device_type") or device.get("device")):
            return dict.fromkeys(("release", "restore"), "a GPU (on a CPU it cannot release memory)")
        if isinstance(model, dict) and model.get("enable_sleep_mode") is False:
            return dict.fromkeys(("release", "restore"), SLEEP_MODE)
        return {}

    async def abort_all(self, http: EngineHttp) -> None:
        """An empty list of ids aborts everything."""
        self.done("abort_all", await http.post("/abort_requests", {"request_ids": []}))

    async def abort(self, http: EngineHttp, request_id: str) -> None:
        """By the client's id, bare or as the routes extend it."""
        if not request_id:
            raise InvalidArgument(
                field="id", value=request_id, problem="is empty", remedy="Name the request, or abort all of them."
            )
        ids = [request_id, f"cmpl-{request_id}", f"cmpl-{request_id}-0", f"chatcmpl-{request_id}"]
        self.done("abort", await http.post("/abort_requests", {"request_ids": ids}))

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

    async def release(self, http: EngineHttp, level: int = 1, tags: Tags = ()) -> Tags:
        """Sleep; the tag kv_cache alone is released by itself. A second call is a no-op; refused unless idle."""
        if level not in (1, 2):
            raise InvalidArgument(field="level", value=level, problem="is no sleep level", remedy="Use 1 or 2.")
        wanted = checked_tags(tags, ALL_TAGS)
        if (await self.probe(http)).reason is ReadyReason.SLEEPING:
            return wanted
        if await self.idle(http) is not True:
            raise self.busy(http)
        try:
            lacking = (await self._no_sleep(http)).get("release")
        except NoAnswer:
            lacking = None  # what is freed will tell
        if lacking:
            raise self.cannot("release", lacking)
        missing = f"{SLEEP_MODE} and {DEV_MODE}"
        if wanted == ("kv_cache",):
            await self.pause(http, "abort")
            response = await http.post("/release_kv_cache_memory", timeout_s=_SLEEP_S)
            if response.status >= 400:
                await self.resume(http)
            self.done("release", response, missing)
        else:
            self.done("release", await http.post(f"/sleep?level={level}", timeout_s=_SLEEP_S), missing)
            wanted = ALL_TAGS
        return wanted

    async def restore(self, http: EngineHttp, tags: Tags = ()) -> None:
        """Wake up. Only what was released is restored: an engine that is awake is left alone.

        With every tag resident it must be awake: a partial wake would leave it unscheduled for ever.
        """
        wanted = checked_tags(tags, ALL_TAGS)
        if (await self.probe(http)).reason not in (ReadyReason.SLEEPING, ReadyReason.PAUSED):
            return
        query = "?" + "&".join(f"tags={tag}" for tag in wanted) if tags else ""
        response = await http.post(f"/wake_up{query}", timeout_s=_SLEEP_S)
        self.done("restore", response, f"{SLEEP_MODE} and {DEV_MODE}")
        if not tags and (await self.probe(http)).reason is ReadyReason.SLEEPING:
            raise Unavailable(f"engine at {http.endpoint} still sleeps after it was woken: {said(response)}")

    async def released(self, http: EngineHttp) -> bool | None:
        """It says so itself."""
        return (await self.probe(http)).reason is ReadyReason.SLEEPING

    def keeps_weights(self, level: int, args: Sequence[str]) -> bool:
        """Level 1 keeps them in the host's memory, level 2 drops them."""
        return level < 2

    async def weight_version(self, http: EngineHttp) -> str | None:
        """As last labelled."""
        response = await http.get("/weight_info")
        self.done("weight_version", response)
        answer = response.json()
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return str(version) if version else None

    async def update_weights(self, http: EngineHttp, version: str, source: str, timeout_s: float = 600.0) -> None:
        """Every rank reloads in place from the folder; without one, from the model that it was started with."""
        kwargs = {"weights_path": source} if source else {}
        body = {"method": "reload_weights", "kwargs": kwargs, "timeout": timeout_s}
        self.done("update_weights", await http.post("/collective_rpc", body, timeout_s))
        if version:
            labelled = await http.post("/update_weight_version", {"new_version": version})
            if labelled.status not in (404, 405):  # older ones keep no label: the ledger has it
                self.done("update_weights", labelled)

    async def profile(self, http: EngineHttp, start: bool) -> None:
        """Where the profiler is configured."""
        response = await http.post("/start_profile" if start else "/stop_profile", timeout_s=_SLEEP_S)
        self.done("profile", response, PROFILER)

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


def checked_tags(tags: Tags, known: Tags) -> Tags:
    """The tags in the engine's order, all of them for none. Raises InvalidArgument."""
    unknown = sorted(set(tags) - set(known))
    if unknown:
        raise InvalidArgument(
            field="tags", value=",".join(unknown), problem="is no memory tag", remedy=f"Use {', '.join(known)}."
        )
    return tuple(tag for tag in known if tag in tags) or known
