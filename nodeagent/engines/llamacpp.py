"""llama.cpp: the embedded default, run by our own small process around the package `xllamacpp`."""

import sys
from collections.abc import Mapping
from typing import ClassVar

from nodeagent.engines.adapter import EngineCommand, EngineLaunch
from nodeagent.engines.llamacpp_server import DEFAULT_MODEL, DEFAULT_PARALLEL
from nodeagent.engines.openai_engine import LOOPBACK, PACKAGE_ROOT, LoadMetrics, OpenAiEngine, visible_devices
from nodeagent.engines.rules import flag_count, flag_name
from springtide.errors import InvalidArgument

_LISTENER = "Engines listen on this host only; routers reach them through the shim."


class LlamaCppAdapter(OpenAiEngine):
    """llama.cpp's server; it does not drain by itself and ends a request only when its client leaves."""

    name = "llamacpp"
    socket_suffix_bytes = len(".sock")
    load_metrics: ClassVar[LoadMetrics | None] = LoadMetrics(  # it does not say how full its KV cache is
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        generated="llamacpp:tokens_predicted_total",
        prompted="llamacpp:prompt_tokens_total",
    )
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
        return flag_count(launch.engine_args, "--parallel", DEFAULT_PARALLEL)
