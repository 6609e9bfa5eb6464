"""llama.cpp: the embedded default, run by our own small process around the package `xllamacpp`."""

import sys
from collections.abc import Mapping
from typing import ClassVar

from nodeagent.engines.adapter import EngineCommand, EngineLaunch, EngineLoad
from nodeagent.engines.http import EngineHttp
from nodeagent.engines.llamacpp_server import DEFAULT_MODEL, DEFAULT_PARALLEL
from nodeagent.engines.metrics_text import read_metrics, total
from nodeagent.engines.openai_engine import LOOPBACK, PACKAGE_ROOT, OpenAiEngine, visible_devices
from nodeagent.engines.rules import flag_name, flag_value
from springtide.errors import InvalidArgument

_LISTENER = "Engines listen on this host only; routers reach them through the shim."
_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"
_GENERATED = "llamacpp:tokens_predicted_total"
_PROMPTED = "llamacpp:prompt_tokens_total"
_LOAD_NAMES = frozenset({_RUNNING, _WAITING, _GENERATED, _PROMPTED})


class LlamaCppAdapter(OpenAiEngine):
    """llama.cpp's server; it does not drain by itself and ends a request only when its client leaves."""

    name = "llamacpp"
    socket_suffix_bytes = len(".sock")
    owned: ClassVar[Mapping[str, str]] = {
        "--host": _LISTENER,
        "--port": _LISTENER,
        "--port-file": _LISTENER,
        "--uds": _LISTENER,
        "--model": "Set the pool's model.",
        "--alias": "Set the pool's served_model_name.",
    }

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Our process, by the pool's interpreter, which must have `xllamacpp` installed."""
        argv = [launch.interpreter or sys.executable, "-m", "nodeagent.engines.llamacpp_server"]
        argv += ["--model", launch.model or DEFAULT_MODEL, "--alias", launch.served_model_name]
        argv += ["--uds", launch.uds_path] if launch.uds_path else ["--host", LOOPBACK, "--port", str(launch.port)]
        given = {flag_name(arg) for arg in launch.engine_args}
        if "--threads" not in given and launch.cpu_ids:
            # Several workers share a host, and its threads spin while they wait for one another.
            argv += ["--threads", str(max(1, min(8, len(launch.cpu_ids) // 4)))]
        if "--parallel" not in given and launch.max_in_flight is not None:
            argv += ["--parallel", str(launch.max_in_flight)]
        argv += launch.engine_args
        env = {"PYTHONPATH": PACKAGE_ROOT, **visible_devices(launch), **launch.env}
        return EngineCommand(tuple(argv), env, self.endpoint(launch))

    def model_problems(self, launch: EngineLaunch) -> list[InvalidArgument]:
        """No model is the packaged one; names to look up do not exist here."""
        if not launch.model or launch.model.startswith("package:"):
            return []
        return super().model_problems(launch)

    def default_max_in_flight(self, launch: EngineLaunch) -> int:
        """--parallel."""
        given = flag_value(launch.engine_args, "--parallel")
        return int(given) if given is not None and given.isdigit() and int(given) > 0 else DEFAULT_PARALLEL

    async def load(self, http: EngineHttp) -> EngineLoad:
        """From /metrics; llama.cpp does not say how full its KV cache is."""
        response = await http.get("/metrics")
        if response.status != 200:
            return EngineLoad()
        samples = read_metrics(response.text(), _LOAD_NAMES)
        return EngineLoad(
            running=total(samples, _RUNNING),
            waiting=total(samples, _WAITING),
            generation_tokens_total=total(samples, _GENERATED),
            prompt_tokens_total=total(samples, _PROMPTED),
        )
