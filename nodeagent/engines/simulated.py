"""The simulated engine as the agent sees it: vLLM's surface, started like any other engine."""

import sys
from collections.abc import Mapping
from typing import ClassVar

from nodeagent.engines.adapter import EngineCommand, EngineLaunch
from nodeagent.engines.kv_transfer import KvTransferEngine
from nodeagent.engines.openai_engine import LOOPBACK, PACKAGE_ROOT, visible_devices
from nodeagent.engines.rules import flag_count, flag_name
from springtide.errors import InvalidArgument

_RUNNING_LIMIT = 256
_SHUTDOWN_TIMEOUT_S = 3
_LISTENER = "Engines listen on this host only; routers reach them through the shim."


class SimAdapter(KvTransferEngine):
    """`nodeagent.engines.sim`; any model name will do."""

    name = "sim"
    owned: ClassVar[Mapping[str, str]] = {
        "--host": _LISTENER,
        "--port": _LISTENER,
        "--port-file": _LISTENER,
        "--uds": _LISTENER,
        "--model": "Set the pool's model.",
        "--served-model-name": "Set the pool's served_model_name.",
        "--tensor-parallel-size": "Set the pool's tensor_parallel_size.",
        "-tp": "Set the pool's tensor_parallel_size.",
    }

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """`python -m nodeagent.engines.sim ...`."""
        argv = [launch.interpreter or sys.executable, "-m", "nodeagent.engines.sim"]
        argv += ["--model", launch.model or "sim", "--served-model-name", launch.served_model_name]
        argv += ["--tensor-parallel-size", str(launch.tensor_parallel_size)]
        argv += ["--uds", launch.uds_path] if launch.uds_path else ["--host", LOOPBACK, "--port", str(launch.port)]
        if "--shutdown-timeout" not in {flag_name(arg) for arg in launch.engine_args}:
            argv += ["--shutdown-timeout", str(_SHUTDOWN_TIMEOUT_S)]
        argv += launch.engine_args
        env = {"PYTHONPATH": PACKAGE_ROOT, "VLLM_SERVER_DEV_MODE": "1", **visible_devices(launch)}
        env |= self.side_channel_env(launch)
        return EngineCommand(tuple(argv), {**env, **launch.env}, self.endpoint(launch))

    def model_problems(self, launch: EngineLaunch) -> list[InvalidArgument]:
        """None: there is no model."""
        return []

    def default_max_in_flight(self, launch: EngineLaunch) -> int:
        """--max-num-seqs."""
        return flag_count(launch.engine_args, "--max-num-seqs", _RUNNING_LIMIT)
