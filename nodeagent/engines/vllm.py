"""vLLM: `vllm serve` of the pool's own interpreter, on a unix socket or loopback, where its dev routes stay."""

import sys
from collections.abc import Mapping
from typing import ClassVar

from nodeagent.engines.adapter import EngineCommand, EngineLaunch
from nodeagent.engines.kv_transfer import KvTransferEngine
from nodeagent.engines.openai_engine import LOOPBACK, is_local_model, visible_devices
from nodeagent.engines.rules import flag_count, flag_name

# The shim has drained before it stops an engine. A vLLM that is idle uses up this time all the same.
SHUTDOWN_TIMEOUT_S = 3
_GPU_RUNNING_LIMIT = 256
_CPU_RUNNING_LIMIT_PER_RANK = 128
_LISTENER = "Engines listen on this host only; routers reach them through the shim."
_CODE = "It runs code of the caller's; let this node allow it (allowed_flags)."
_SLICE = "A worker is tensor_parallel_size GPUs of one node."


class VllmAdapter(KvTransferEngine):
    """vLLM 0.20 and newer."""

    name = "vllm"
    owned: ClassVar[Mapping[str, str]] = {
        "--host": _LISTENER,
        "--port": _LISTENER,
        "--uds": _LISTENER,
        "--grpc": _LISTENER,
        "--grpc-port": _LISTENER,
        "--headless": _LISTENER,
        "--api-key": "Clients are authenticated in front of the engine.",
        "--ssl-keyfile": _LISTENER,
        "--ssl-certfile": _LISTENER,
        "--root-path": _LISTENER,
        "--model": "Set the pool's model.",
        "--served-model-name": "Set the pool's served_model_name.",
        "--tensor-parallel-size": "Set the pool's tensor_parallel_size.",
        "-tp": "Set the pool's tensor_parallel_size.",
        "--pipeline-parallel-size": _SLICE,
        "-pp": _SLICE,
        "--data-parallel-size": _SLICE,
        "-dp": _SLICE,
        "--nnodes": _SLICE,
        "--config": "Write the flags into engine_args.",
    }
    denied: ClassVar[Mapping[str, str]] = {
        "--middleware": _CODE,
        "--tool-parser-plugin": _CODE,
        "--reasoning-parser-plugin": _CODE,
        "--trust-remote-code": _CODE,
        "--worker-cls": _CODE,
        "--worker-extension-cls": _CODE,
        "--scheduler-cls": _CODE,
        "--logits-processors": _CODE,
        "--io-processor-plugin": _CODE,
        "--allowed-local-media-path": "It shows files of this node to clients; let this node allow it (allowed_flags).",
    }

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """`python -m vllm.entrypoints.cli.main serve MODEL ...`: needs no script beside the interpreter."""
        endpoint = self.endpoint(launch)
        argv = [launch.interpreter or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", launch.model]
        argv += ["--served-model-name", launch.served_model_name]
        argv += ["--tensor-parallel-size", str(launch.tensor_parallel_size)]
        if launch.uds_path:
            argv += ["--uds", launch.uds_path]
        else:
            argv += ["--host", LOOPBACK, "--port", str(launch.port)]
        given = {flag_name(arg) for arg in launch.engine_args}
        if "--shutdown-timeout" not in given:
            argv += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
        if "--disable-uvicorn-access-log" not in given:
            argv.append("--disable-uvicorn-access-log")
        argv += launch.engine_args
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **visible_devices(launch)}
        if is_local_model(launch.model):
            env["HF_HUB_OFFLINE"] = "1"
        env |= self.side_channel_env(launch)
        if launch.simulated_gpus and launch.cpu_ids:
            env["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding(launch)
        if launch.simulated_gpus and launch.tensor_parallel_size > 1:
            # Else the first request compiles a kernel with g++, and kills the engine where there is none.
            env["TORCHDYNAMO_DISABLE"] = "1"
        return EngineCommand(tuple(argv), {**env, **launch.env}, endpoint)

    def default_max_in_flight(self, launch: EngineLaunch) -> int:
        """--max-num-seqs, or the smallest default that vLLM picks for a device of this kind."""
        on_cpu = _CPU_RUNNING_LIMIT_PER_RANK * launch.tensor_parallel_size
        return flag_count(launch.engine_args, "--max-num-seqs", on_cpu if launch.simulated_gpus else _GPU_RUNNING_LIMIT)


def cpu_binding(launch: EngineLaunch) -> str:
    """One core for each rank, as `0|1`; workers on further slots take further cores, round and round.

    vLLM's own choice fails on a machine with one NUMA node as soon as there are two ranks.
    """
    cores = launch.cpu_ids
    digits = "".join(letter for letter in launch.gpu_ids[0] if letter.isdigit()) if launch.gpu_ids else ""
    first = int(digits or 0)
    return "|".join(str(cores[(first + rank) % len(cores)]) for rank in range(launch.tensor_parallel_size))
