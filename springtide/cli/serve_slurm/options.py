"""What `springtide serve-slurm` was asked for: defaults, a JSON file, flags over both, checked before the start."""

import dataclasses
import ipaddress
import json
import os
import re
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from springtide.cli.up.options import HOST, UpOptions, UpPlan
from springtide.errors import InvalidArgument

ENGINES = ("vllm", "sglang", "oss", "llamacpp", "sim")
REAL = ("vllm", "sglang")  # engines with GPU memory to share out
EFFORTS = ("low", "medium", "high")
GREEDY = "greedy"
PORTS_OF_A_NODE = 64


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Keys of the JSON file. A value that is not given keeps its default; flags are given or None."""

    model: str = ""
    engine: str = "vllm"
    qos: str = ""
    partition: str = ""
    account: str = ""
    constraint: str = ""
    time_limit: str = "72:00:00"
    exclusive: bool = True
    slurm_extra: str = ""
    max_nodes: int = 16
    gpus_per_node: int = 8
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.90
    max_model_len: int | None = None
    served_model_name: str | None = None
    engine_extra_args: str = ""
    enable_prefix_caching: bool | None = None
    reasoning_effort: str | None = None
    trust_remote_code: bool = False
    conda_env: str = ""
    venv_path: str = ""
    project_root: str = ""
    log_dir: str = "logs"
    port: int = 8780
    worker_base_port: int | None = None
    heartbeat_timeout: float | None = None
    health_check_interval: float | None = None
    node_acquire_interval: float | None = None
    host: str = HOST
    # ours
    policy: str = GREEDY
    min_workers: int = 0
    advertise_host: str = ""
    advertise_file: str = ""
    controlplane_port: int = 7400
    router_port: int = 7500
    pool: str = ""
    notice_s: int = 60
    preempt_grace_s: int = 30
    preamble: str = ""
    requeue: bool = False
    simulated_gpus: bool = False
    provisioner_id: str = "slurm"
    trusted_network: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    token_file: str = ""
    log_level: str = "info"

    @property
    def workers_per_node(self) -> int:
        return self.gpus_per_node // self.tensor_parallel_size

    def most_workers(self, nodes: int | None = None) -> int:
        return (self.max_nodes if nodes is None else nodes) * self.workers_per_node

    @property
    def real_engine(self) -> str:
        """What runs: `oss` is vLLM."""
        return "vllm" if self.engine == "oss" else self.engine

    @property
    def wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def tls(self) -> bool:
        return bool(self.tls_cert)

    @property
    def own_host(self) -> str:
        """Under which we reach our own processes: a certificate is made out to the name that others use."""
        if self.loopback or (self.wildcard and not self.tls):
            return HOST if self.wildcard else self.host
        return self.reached_host

    @property
    def reached_host(self) -> str:
        """Under which jobs and clients reach this host."""
        return self.advertise_host or (socket.getfqdn() if self.wildcard else self.host)


def read_options(path: Path | None, flags: Mapping[str, Any]) -> ServeOptions:
    """The file, then the flags that were given. Raises InvalidArgument."""
    values = _read(path) if path is not None else {}
    values |= {key: value for key, value in flags.items() if value is not None}
    return check(ServeOptions(**values))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise _wrong("--config", str(path), error.strerror or str(error), "Name a readable JSON file.") from None
    except ValueError as error:
        raise _wrong("--config", str(path), f"is no JSON: {error}", "Correct it.") from None
    if not isinstance(found, dict):
        raise _wrong("--config", str(path), "is no JSON object", 'Write {"model": ..., ...}.')
    known = typing.get_type_hints(ServeOptions)
    for key, value in found.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(known)}."
            raise _wrong(f"{path.name}: {key}", value, "is not a key", hint)
        found[key] = _typed(f"{path.name}: {key}", value, known[key])
    return found


def _typed(field: str, value: Any, hint: Any) -> Any:
    """JSON's own types; a whole number may stand for a number."""
    kinds = typing.get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = whole if kind is int else whole or isinstance(value, float) if kind is float else isinstance(value, kind)
    if not good:
        raise _wrong(field, value, f"is no {kind.__name__}", f"Write a JSON value of type {kind.__name__}.")
    return value


def check(o: ServeOptions) -> ServeOptions:
    """The options again. Raises InvalidArgument with flag, value and remedy."""
    if not o.model:
        raise _wrong("--model", "", "is needed", "Name a model directory, or a model that the engine can fetch.")
    if o.engine not in ENGINES:
        raise _wrong("--engine", o.engine, "is not an engine", f"Choose one of {', '.join(ENGINES)}.")
    for flag, value in (("--tensor-parallel-size", o.tensor_parallel_size), ("--gpus-per-node", o.gpus_per_node)):
        if value < 1:
            raise _wrong(flag, value, "is below 1", "Give at least 1.")
    if o.gpus_per_node % o.tensor_parallel_size:
        fits = ", ".join(str(n) for n in range(1, o.gpus_per_node + 1) if o.gpus_per_node % n == 0)
        problem = f"does not divide --gpus-per-node {o.gpus_per_node}"
        raise _wrong("--tensor-parallel-size", o.tensor_parallel_size, problem, f"Choose {fits}.")
    if o.max_nodes < 1:
        raise _wrong("--max-nodes", o.max_nodes, "is below 1", "Give at least 1.")
    if not 0 < o.gpu_memory_utilization <= 1:
        raise _wrong(
            "--gpu-memory-utilization", o.gpu_memory_utilization, "is no share", "Give more than 0, at most 1."
        )
    if o.reasoning_effort is not None and o.reasoning_effort not in EFFORTS:
        raise _wrong("--reasoning-effort", o.reasoning_effort, "is not known", f"Choose one of {', '.join(EFFORTS)}.")
    if o.reasoning_effort is not None and o.real_engine != "vllm":
        raise _wrong("--reasoning-effort", o.reasoning_effort, f"means nothing to {o.engine}", "Leave it out.")
    if o.conda_env and o.venv_path:
        raise _wrong("--venv-path", o.venv_path, "is given beside --conda-env", "Give one of them.")
    if o.pool and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", o.pool):
        raise _wrong("--pool", o.pool, "is not a pool name", "Use lower-case letters, digits and inner dashes.")
    if not 0 <= o.min_workers <= o.most_workers():
        raise _wrong("--min-workers", o.min_workers, f"is not within 0 and {o.most_workers()}", "Change one of them.")
    _check_listening(o)
    return o


def _check_listening(o: ServeOptions) -> None:
    files = {"--tls-cert": o.tls_cert, "--tls-key": o.tls_key, "--tls-ca": o.tls_ca, "--token-file": o.token_file}
    missing = [flag for flag, value in files.items() if not value]
    if missing and len(missing) < len(files):
        raise _wrong(missing[0], "", "is missing beside the other TLS files", "Give all four, or none.")
    if not o.loopback and not o.trusted_network:
        raise _wrong(
            "--host",
            o.host,
            "opens ports to other machines, and those of workers speak plain HTTP",
            "Give --trusted-network if the cluster's network is one; --tls-cert, --tls-key, --tls-ca and --token-file "
            "close the control plane and the OpenAI address even so.",
            reason="INSECURE_LISTENER",
        )


def pool_name(o: ServeOptions) -> str:
    """Given, or made of the model's name: meta-llama/Llama-3-70B -> llama-3-70b."""
    if o.pool:
        return o.pool
    last = (o.served_model_name or o.model).rstrip("/").rpartition("/")[2].lower().removeprefix("package:")
    return re.sub(r"[^a-z0-9]+", "-", last)[:48].strip("-") or "model"


@dataclass(frozen=True, slots=True)
class ServePlan(UpPlan):
    """Everything decided; the pool as `apply` takes it."""

    serve: ServeOptions = dataclasses.field(default_factory=ServeOptions)

    def pool_spec(self) -> dict[str, Any]:
        return spec(self.serve)


def spec(o: ServeOptions, nodes: int | None = None) -> dict[str, Any]:
    """The pool. `nodes`: the greedy target of now."""
    greedy = o.policy == GREEDY
    return {
        "name": pool_name(o),
        "engine": o.real_engine,
        "model": o.model,
        "served_model_name": o.served_model_name or o.model,
        "tensor_parallel_size": o.tensor_parallel_size,
        "min_workers": o.min_workers,
        "max_workers": o.most_workers(),
        "policy": {"name": "static", "settings": {"workers": o.most_workers(nodes)}} if greedy else o.policy,
        "engine_args": engine_args(o),
    }


def engine_args(o: ServeOptions) -> list[str]:
    """Seed-like settings as the engine's own flags."""
    args: list[str] = []
    vllm = o.real_engine == "vllm"
    if o.real_engine in REAL:
        args += ["--gpu-memory-utilization" if vllm else "--mem-fraction-static", f"{o.gpu_memory_utilization:g}"]
        if o.max_model_len is not None:
            args += ["--max-model-len" if vllm else "--context-length", str(o.max_model_len)]
        if o.enable_prefix_caching is not None and vllm:
            args.append("--enable-prefix-caching" if o.enable_prefix_caching else "--no-enable-prefix-caching")
        if o.enable_prefix_caching is False and not vllm:
            args.append("--disable-radix-cache")
        if o.trust_remote_code:
            args.append("--trust-remote-code")
        if o.reasoning_effort is not None:
            args += ["--default-chat-template-kwargs", json.dumps({"reasoning_effort": o.reasoning_effort})]
    return [*args, *o.engine_extra_args.split()]


def plan(o: ServeOptions, data_dir: Path) -> ServePlan:
    """The same as the supervisor takes it."""
    options = UpOptions(
        engine=o.real_engine,
        model=o.model,
        tp=o.tensor_parallel_size,
        min_workers=o.min_workers,
        max_workers=o.most_workers(),
        pool=pool_name(o),
        controlplane_port=o.controlplane_port,
        router_port=o.router_port,
        http_port=o.port,
        data_dir=data_dir,
        log_level=o.log_level,
    )
    return ServePlan(options, o.model, None, o.most_workers(), "", o)


def default_data_dir() -> Path:
    """$XDG_DATA_HOME/springtide-slurm, else ~/.local/share/springtide-slurm."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return Path(base) / "springtide-slurm"


def _wrong(flag: str, value: object, problem: str, remedy: str, reason: str | None = None) -> InvalidArgument:
    return InvalidArgument(field=flag, value=value, problem=problem, remedy=remedy, reason=reason)
