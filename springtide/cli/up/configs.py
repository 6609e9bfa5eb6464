"""The three processes' configuration files of a stack on one machine."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from springtide.cli.up.options import HOST, UpOptions, UpPlan

DRAIN_TIMEOUT_S = 15.0  # of running requests when the stack is stopped


@dataclass(frozen=True, slots=True)
class Ports:
    """Asked for first, then those really bound."""

    controlplane: int
    router: int
    http: int
    metrics: Mapping[str, str] = field(default_factory=dict)  # process: host:port
    host: str = HOST  # under which we reach them

    @staticmethod
    def asked(options: UpOptions) -> "Ports":
        return Ports(options.controlplane_port, options.router_port, options.http_port)

    def bound(self, process: str, discovery: Mapping[str, Any]) -> "Ports":
        """With what a process wrote into its discovery file."""
        changed: dict[str, Any] = {}
        if discovery.get("metrics"):
            changed["metrics"] = {**self.metrics, process: str(discovery["metrics"])}
        if process == "control plane":
            changed["controlplane"] = _port(discovery["grpc"])
        elif process == "router":
            changed |= {"router": _port(discovery["grpc"]), "http": _port(discovery["http"])}
        return dataclasses.replace(self, **changed)

    @property
    def controlplane_address(self) -> str:
        return f"{self.host}:{self.controlplane}"

    @property
    def router_address(self) -> str:
        return f"{self.host}:{self.router}"

    @property
    def http_address(self) -> str:
        return f"{self.host}:{self.http}"


def all_of(plan: UpPlan, ports: Ports) -> dict[str, str]:
    """TOML by module."""
    return {
        "controlplane": toml(_controlplane(plan, ports)),
        "nodeagent": toml(_nodeagent(plan, ports)),
        "router": toml(_router(plan, ports)),
    }


def _controlplane(plan: UpPlan, ports: Ports) -> dict[str, Any]:
    return {
        "listen": ports.controlplane_address,
        "data_dir": str(plan.options.data_dir / "controlplane"),
        **_common(plan),
    }


def _nodeagent(plan: UpPlan, ports: Ports) -> dict[str, Any]:
    interpreters = [plan.interpreter] if plan.interpreter else []
    return {
        "controlplane": [ports.controlplane_address],
        "data_dir": str(plan.options.data_dir / "nodeagent"),
        "gpus": plan.simulated_gpus,
        "stop_action": "drain",
        "stop_timeout_s": DRAIN_TIMEOUT_S,
        **_common(plan),
        "launch": {"allowed_interpreters": interpreters},
    }


def _router(plan: UpPlan, ports: Ports) -> dict[str, Any]:
    return {
        "controlplane": ports.controlplane_address,
        "listen": ports.router_address,
        "http_listen": ports.http_address,
        "data_dir": str(plan.options.data_dir / "router"),
        "drain_timeout_s": DRAIN_TIMEOUT_S,
        **_common(plan),
    }


def _common(plan: UpPlan) -> dict[str, Any]:
    return {"metrics_port": 0 if plan.options.metrics else -1, "log_level": plan.options.log_level}


def toml(values: Mapping[str, Any]) -> str:
    """Scalars, lists and tables of them as TOML; None is left out."""
    plain = {key: value for key, value in values.items() if value is not None}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items() if not isinstance(value, Mapping)]
    for key, table in plain.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value)  # a JSON scalar is a TOML one


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
