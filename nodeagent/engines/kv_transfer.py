"""Engines that hand over KV caches the way vLLM does: what is computed by one is decoded by another, over NIXL.

Such an engine listens on a TCP port, its side channel, where others learn how to read its memory. vLLM's default is one
fixed port for all engines; here each worker gets one of its own from the agent.
"""

from collections.abc import Sequence

from nodeagent.engines.adapter import EngineLaunch
from nodeagent.engines.dev_routes import DevRoutesEngine
from nodeagent.engines.rules import LaunchRules
from springtide.errors import InvalidArgument

KV_TRANSFER = "--kv-transfer-config"
HOST_ENV = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_ENV = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_MODULE_PATH = "kv_connector_module_path"


class KvTransferEngine(DevRoutesEngine):
    """vLLM, and the simulated engine, which speaks its protocol."""

    def needs_side_channel(self, args: Sequence[str]) -> bool:
        """With one of NIXL's connectors, alone or among others, however --kv-transfer-config is written."""
        return any("Nixl" in arg for arg in args)

    def side_channel_env(self, launch: EngineLaunch) -> dict[str, str]:
        """Tells the engine where its side channel is; nothing when it has none."""
        if launch.side_channel is None:
            return {}
        host, port = launch.side_channel
        return {HOST_ENV: host, PORT_ENV: str(port)}

    def validate(self, launch: EngineLaunch, rules: LaunchRules) -> list[InvalidArgument]:
        """Also refuses a side channel for a whole pool, and connectors of the caller's own."""
        problems = super().validate(launch, rules)
        for name in (HOST_ENV, PORT_ENV):
            if name in launch.env:
                remedy = "Remove it: each worker gets a side channel of its own."
                problem = "is set by Springtide"
                problems.append(InvalidArgument(field="engine_env", value=name, problem=problem, remedy=remedy))
        if KV_TRANSFER not in rules.allowed_flags and any(_MODULE_PATH in arg for arg in launch.engine_args):
            remedy = f"It runs code of the caller's; let this node allow it (allowed_flags: {KV_TRANSFER})."
            problem = "is not allowed in engine_args"
            problems.append(InvalidArgument(field="engine_args", value=_MODULE_PATH, problem=problem, remedy=remedy))
        return problems
