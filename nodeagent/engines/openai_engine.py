"""What all engines have in common: an OpenAI surface on loopback or a unix socket, and the checks of a launch."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from nodeagent.engines.adapter import Capabilities, EngineLaunch, EngineLoad, Readiness, ReadyReason, Tags
from nodeagent.engines.http import EngineHttp, NoAnswer, NotListening, Response
from nodeagent.engines.metrics_text import highest, read_metrics, total
from nodeagent.engines.rules import LaunchRules, env_problems, flag_problems, interpreter_problems
from springtide.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented

LOOPBACK = "127.0.0.1"
MAX_SOCKET_PATH_BYTES = 107
CONTROL_VERBS = (
    *("abort", "abort_all", "pause", "resume", "flush_cache", "release", "restore"),
    *("weight_version", "update_weights", "profile"),
)
# Checkout or site-packages that holds this package: engines of ours run outside of it.
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Names of an engine's load in its Prometheus text; "" for what it does not say."""

    running: str
    waiting: str
    generated: str
    prompted: str
    kv_use: str = ""


class WarmUpFailed(Unavailable):
    """The engine is healthy but did not generate a token; the message quotes it."""

    default_reason = "WARM_UP_FAILED"


class OpenAiEngine:
    """Base of the adapters: everything that works the same everywhere. `owned` and `denied` map flags to remedies."""

    name = ""
    owned: ClassVar[Mapping[str, str]] = {}
    denied: ClassVar[Mapping[str, str]] = {}
    socket_suffix_bytes = 0
    load_metrics: ClassVar[LoadMetrics | None] = None
    counts_tokens_live = False  # in its metrics, while requests run; else only when they end

    def validate(self, launch: EngineLaunch, rules: LaunchRules) -> list[InvalidArgument]:
        """Everything that forbids this launch on this node."""
        problems = interpreter_problems(launch.interpreter, rules)
        problems += flag_problems(launch.engine_args, rules, owned=self.owned, denied=self.denied)
        problems += env_problems(launch.env, rules)
        size = launch.tensor_parallel_size
        if size < 1:
            problems.append(_problem("tensor_parallel_size", size, "is not positive", "Give at least 1."))
        elif launch.gpu_ids and len(launch.gpu_ids) != size:
            remedy = f"Give this worker a slice of {size} GPUs."
            problems.append(_problem("gpu_ids", ",".join(launch.gpu_ids), f"is not {size} GPUs", remedy))
        if len(set(launch.gpu_ids)) != len(launch.gpu_ids):
            problems.append(_problem("gpu_ids", ",".join(launch.gpu_ids), "names a GPU twice", "Name each GPU once."))
        if not launch.served_model_name:
            problems.append(_problem("served_model_name", "", "is empty", "Give the name that requests use."))
        if launch.max_in_flight is not None and launch.max_in_flight < 1:
            remedy = "Give at least 1, or leave it out for the engine's running limit."
            problems.append(_problem("max_in_flight", launch.max_in_flight, "is not positive", remedy))
        try:
            self.endpoint(launch)
        except InvalidArgument as error:
            problems.append(error)
        return problems + self.model_problems(launch)

    def model_problems(self, launch: EngineLaunch) -> list[InvalidArgument]:
        """What is wrong with the model's name or place."""
        if not launch.model:
            return [_problem("model", "", "is empty", "Give a folder on this node or the name of a model.")]
        if is_local_model(launch.model) and not Path(launch.model).exists():
            return [
                _problem("model", launch.model, "does not exist on this node", "Put it there, or correct the path.")
            ]
        return []

    def endpoint(self, launch: EngineLaunch) -> str:
        """Where the engine will listen: the unix socket if one is given, else the loopback port."""
        if not launch.uds_path:
            return tcp_endpoint(launch, "Give a free port, or a unix socket.")
        size = len(launch.uds_path.encode()) + self.socket_suffix_bytes
        if size > MAX_SOCKET_PATH_BYTES:
            problem = f"is longer than {MAX_SOCKET_PATH_BYTES - self.socket_suffix_bytes} bytes"
            raise _problem("uds_path", launch.uds_path, problem, "Use a shorter runtime folder.")
        return f"unix:{launch.uds_path}"

    def needs_side_channel(self, args: Sequence[str]) -> bool:
        """No: engines talk to their shim only."""
        return False

    async def ready(self, http: EngineHttp) -> Readiness:
        """Healthy, awake, not paused."""
        try:
            return await self.probe(http)
        except NotListening as error:
            return Readiness(ReadyReason.NOT_LISTENING, error.message)
        except NoAnswer as error:
            return Readiness(ReadyReason.NO_ANSWER, error.message)

    async def probe(self, http: EngineHttp) -> Readiness:
        """The engine's own readiness check; here: /health answers 200."""
        return await health(http, "/health")

    async def warm_up(self, http: EngineHttp, model: str, timeout_s: float = 300.0) -> None:
        """Generate one token."""
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "stream": False}
        response = await http.post("/v1/completions", body, timeout_s)
        answer = response.json()
        if response.status != 200 or not isinstance(answer, dict) or not answer.get("choices"):
            raise WarmUpFailed(f"warm-up at {http.endpoint} failed with {response.status}: {said(response)}")

    async def load(self, http: EngineHttp) -> EngineLoad:
        """From /metrics; what it does not show is unknown."""
        names = self.load_metrics
        response = await http.get("/metrics") if names is not None else None
        if names is None or response is None or response.status != 200:
            return EngineLoad()
        samples = read_metrics(response.text(), {getattr(names, f.name) for f in fields(names)} - {""})
        return EngineLoad(
            running=total(samples, names.running),
            waiting=total(samples, names.waiting),
            kv_use=highest(samples, names.kv_use),
            generation_tokens_total=total(samples, names.generated),
            prompt_tokens_total=total(samples, names.prompted),
        )

    async def idle(self, http: EngineHttp) -> bool | None:
        """By the engine's own load."""
        return (await self.load(http)).idle

    async def abort_all(self, http: EngineHttp) -> None:
        """Not here."""
        raise self.cannot("abort_all")

    async def pause(self, http: EngineHttp, mode: str) -> None:
        """Not here."""
        raise self.cannot("pause")

    async def resume(self, http: EngineHttp) -> None:
        """Not here."""
        raise self.cannot("resume")

    async def flush_cache(self, http: EngineHttp) -> None:
        """Not here."""
        raise self.cannot("flush_cache")

    async def wait_idle(self, http: EngineHttp, timeout_s: float) -> None:
        """Asks again and again: `idle` is the engine's word, not the shim's."""
        pause_s = 0.02
        try:
            async with asyncio.timeout(timeout_s):
                while await self.idle(http) is not True:
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 0.5)
        except TimeoutError:
            raise self.busy(http) from None

    async def capabilities(self, http: EngineHttp) -> Capabilities:
        """No control at all."""
        return Capabilities(dict.fromkeys(CONTROL_VERBS, "a control interface, which this engine has none of"))

    async def abort(self, http: EngineHttp, request_id: str) -> None:
        """Not here."""
        raise self.cannot("abort")

    async def release(self, http: EngineHttp, level: int = 1, tags: Tags = ()) -> Tags:
        """Not here."""
        raise self.cannot("release")

    async def restore(self, http: EngineHttp, tags: Tags = ()) -> None:
        """Not here."""
        raise self.cannot("restore")

    async def released(self, http: EngineHttp) -> bool | None:
        """Never: it has no such control."""
        return False

    def keeps_weights(self, level: int, args: Sequence[str]) -> bool:
        """Level 1 does."""
        return level < 2

    async def weight_version(self, http: EngineHttp) -> str | None:
        """It has none."""
        return None

    async def update_weights(self, http: EngineHttp, version: str, source: str, timeout_s: float = 600.0) -> None:
        """Not here."""
        raise self.cannot("update_weights")

    async def profile(self, http: EngineHttp, start: bool) -> None:
        """Not here."""
        raise self.cannot("profile")

    def done(self, verb: str, response: Response, missing: str = "") -> None:
        """Nothing for a verb that was taken. Raises Unimplemented where the engine has no such route, Unavailable."""
        if response.status in (404, 405):
            raise self.cannot(verb, missing)
        if response.status >= 400:
            raise Unavailable(f"engine refused to {verb} ({response.status}): {said(response)}")

    def busy(self, http: EngineHttp) -> FailedPrecondition:
        """The error of a release that would cut requests."""
        return FailedPrecondition(
            f"engine at {http.endpoint} is not idle, or does not say so.",
            reason="ENGINE_BUSY",
            field="engine",
            value=http.endpoint,
            remedy="Drain the worker first.",
        )

    def cannot(self, verb: str, missing: str = "") -> Unimplemented:
        """The error of a verb that this engine cannot do; `missing` is the flag that would make it able to."""
        why = f"it was started without {missing}" if missing else "it has no such control"
        remedy = f"Start the pool's engines with {missing}." if missing else None
        return Unimplemented(
            f"engine {self.name} cannot {verb}: {why}.",
            field="engine",
            value=self.name,
            remedy=remedy,
            metadata={"missing": missing} if missing else None,
        )


async def health(http: EngineHttp, path: str) -> Readiness:
    """READY for 200, else UNHEALTHY with what the engine said."""
    response = await http.get(path)
    if response.status == 200:
        return Readiness(ReadyReason.READY)
    return Readiness(ReadyReason.UNHEALTHY, f"{path} answered {response.status}: {said(response)}")


def tcp_endpoint(launch: EngineLaunch, remedy: str) -> str:
    """The loopback endpoint of a launch; InvalidArgument when it has no port."""
    if not 0 < launch.port < 65536:
        raise _problem("port", launch.port, "is no TCP port", remedy)
    return f"{LOOPBACK}:{launch.port}"


def is_local_model(model: str) -> bool:
    """The model is a path on this node, not a name to look up."""
    return model.startswith(("/", "./", "../", "~"))


def said(response: Response) -> str:
    """The start of an answer, for messages."""
    return response.text().strip()[:300] or "(empty)"


def visible_devices(launch: EngineLaunch) -> dict[str, str]:
    """The variables that give the engine its slice and nothing else; simulated slots mean no GPU at all."""
    if launch.simulated_gpus:
        return {"CUDA_VISIBLE_DEVICES": ""}
    # Indexes are NVML's; by itself CUDA would count the fastest GPU first.
    return {"CUDA_VISIBLE_DEVICES": ",".join(launch.gpu_ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _problem(field: str, value: object, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(field=field, value=value, problem=problem, remedy=remedy)
