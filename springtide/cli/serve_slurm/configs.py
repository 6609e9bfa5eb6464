"""The three processes' configuration files of `springtide serve-slurm`."""

import os
import shlex
from pathlib import Path
from typing import Any

from springtide.cli.serve_slurm.options import GREEDY, PORTS_OF_A_NODE, ServeOptions, ServePlan
from springtide.cli.up.configs import DRAIN_TIMEOUT_S, Ports, toml

GREEDY_IDLE_S = 5.0
ENV_FOR_ENGINES = ("vllm", "sglang", "llamacpp")


def all_of(plan: ServePlan, ports: Ports) -> dict[str, str]:
    """TOML by module."""
    o, data_dir = plan.serve, plan.options.data_dir
    return {
        "controlplane": toml(_controlplane(o, ports, data_dir)),
        "router": toml(_router(o, ports, data_dir)),
        "provisioner": toml(_provisioner(o, ports, data_dir)),
    }


def target_file(data_dir: Path) -> Path:
    """Where the greedy target of now is: `springtide slurm target` writes it."""
    return data_dir / "target"


def _controlplane(o: ServeOptions, ports: Ports, data_dir: Path) -> dict[str, Any]:
    timing: dict[str, Any] = {}
    if o.heartbeat_timeout is not None:
        timing["lease_s"] = o.heartbeat_timeout
    return {
        "listen": f"{o.host}:{ports.controlplane}",
        "data_dir": str(data_dir / "controlplane"),
        "log_level": o.log_level,
        "insecure_listen": o.trusted_network and not o.tls,
        "tls_cert": _absolute(o.tls_cert),
        "tls_key": _absolute(o.tls_key),
        "token_file": _absolute(o.token_file),
        "timing": timing,
        # greedy: what the target no longer keeps goes at once
        "nodes": {"idle_s": GREEDY_IDLE_S} if o.policy == GREEDY else {},
    }


def _router(o: ServeOptions, ports: Ports, data_dir: Path) -> dict[str, Any]:
    return {
        "controlplane": ports.controlplane_address,
        "listen": f"{o.host}:{ports.router}",
        "http_listen": f"{o.host}:{ports.http}",
        "data_dir": str(data_dir / "router"),
        "drain_timeout_s": DRAIN_TIMEOUT_S,
        "log_level": o.log_level,
        "security": {
            "tls_cert": _absolute(o.tls_cert),
            "tls_key": _absolute(o.tls_key),
            "token_file": _absolute(o.token_file),
            "insecure": o.trusted_network and not o.tls,
        },
    }


def _provisioner(o: ServeOptions, ports: Ports, data_dir: Path) -> dict[str, Any]:
    return {
        "kind": "slurm",
        "id": o.provisioner_id,
        "controlplane": [ports.controlplane_address],
        "agent_controlplane": f"{o.reached_host}:{ports.controlplane}",
        "agent_tls_ca": _absolute(o.tls_ca),
        "data_dir": str(data_dir / "provisioner"),
        "poll_interval_s": o.node_acquire_interval,
        "log_level": o.log_level,
        "provider": provider(o, data_dir),
    }


def provider(o: ServeOptions, data_dir: Path) -> dict[str, Any]:
    """Table [provider] of the kind slurm."""
    options = dict[str, str]()
    if o.worker_base_port is not None:
        options["port_first"] = str(o.worker_base_port)
        options["port_last"] = str(o.worker_base_port + PORTS_OF_A_NODE - 1)
    if o.health_check_interval is not None:
        options["probe_interval_s"] = f"{min(60.0, o.health_check_interval):g}"
    python = _interpreter(o)
    return {
        "partition": o.partition,
        "qos": o.qos,
        "account": o.account,
        "constraint": o.constraint,
        "time_limit": o.time_limit,
        "exclusive": o.exclusive,
        "slurm_extra": o.slurm_extra,
        "gpus_per_node": o.gpus_per_node,
        "max_nodes": o.max_nodes,
        "greedy": o.policy == GREEDY,
        "target_file": str(target_file(data_dir)),
        "notice_s": o.notice_s,
        "preempt_grace_s": o.preempt_grace_s,
        "requeue": o.requeue,
        "agent_insecure": not o.loopback,
        "simulated_gpus": o.simulated_gpus,
        "preamble": _preamble(o),
        "working_dir": str(Path(o.project_root).expanduser().absolute()) if o.project_root else "",
        "log_dir": str(Path(o.log_dir).expanduser().absolute()),
        "interpreters": dict.fromkeys(ENV_FOR_ENGINES, python) if python else {},
        "allowed_flags": ["--trust-remote-code"] if o.trust_remote_code else [],
        "agent_options": options,
    }


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _interpreter(o: ServeOptions) -> str:
    """Of the engine's environment, as the nodes see it."""
    if o.venv_path:
        return os.path.join(os.path.abspath(os.path.expanduser(o.venv_path)), "bin/python")  # noqa: PTH100, PTH111, PTH118 - resolving would leave the venv
    return "$engine_python" if o.conda_env else ""


def _preamble(o: ServeOptions) -> str:
    if not o.conda_env:
        return o.preamble
    if "/" in o.conda_env:
        found = f"engine_python={shlex.quote(o.conda_env)}/bin/python"
    else:
        name = shlex.quote(o.conda_env)
        found = f"engine_python=$(conda run -n {name} python -c 'import sys; print(sys.executable)') || exit 74"
    return "\n".join(filter(None, (o.preamble, found)))
