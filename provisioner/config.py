"""Settings of a provisioner process, and its command line made of them."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from springtide import config
from springtide.config import setting
from springtide.rpc import DEFAULT_ADDRESS, parse_address
from springtide.wire.values import identifier


@dataclass(frozen=True)
class ProvisionerConfig:
    """The file of `python -m provisioner --config FILE.toml`."""

    kind: str = setting(
        "local", doc="Who gives the nodes: local, static, slurm, ray, ecs, kubernetes, or the name of a plug-in."
    )
    id: str = setting("", doc="Stable name of this provisioner; it owns the nodes that it gave. Default: the kind.")
    controlplane: tuple[str, ...] = setting(
        (), doc=f"Addresses of control planes, host:port. Default: SPRINGTIDE_ADDRESS, else {DEFAULT_ADDRESS}."
    )
    agent_controlplane: str = setting(
        "", doc="host:port under which the agents on its nodes reach the control plane. Default: the first above."
    )
    agent_tls_ca: str = setting(
        "",
        doc="PEM file, as the nodes see it, that agents verify the control plane with. Default: SPRINGTIDE_TLS_CA.",
    )
    data_dir: str = setting(".springtide/provisioner", doc="Folder of ledger and discovery file; one provisioner each.")
    poll_interval_s: float = setting(
        3.0, doc="How often the provider is asked what it gives.", unit="s", minimum=0.05, maximum=300
    )
    call_timeout_s: float = setting(
        60.0, doc="A call to the provider that takes longer has an unknown outcome.", unit="s", minimum=0.1
    )
    report_interval_s: float = setting(
        1.0, doc="Until the control plane says another one.", unit="s", minimum=0.05, maximum=300
    )
    reconnect_max_s: float = setting(
        10.0, doc="Longest wait between two attempts to reach a control plane.", unit="s", minimum=0.1, maximum=60
    )
    insecure: bool = setting(False, doc="Let the Prometheus endpoint listen on a network address: a trusted network.")
    metrics_port: int = setting(-1, doc="Prometheus endpoint; 0: any free port, -1: off.", minimum=-1, maximum=65535)
    metrics_host: str = setting("127.0.0.1", doc="Address of the Prometheus endpoint.")
    log_level: str = setting("info", doc="debug, info, warning or error; single loggers as NAME=LEVEL.")
    provider: Mapping[str, Any] = setting(
        default_factory=dict, doc="Table [provider]: settings of the kind, see docs/provisioners.md."
    )

    @property
    def provisioner_id(self) -> str:
        return self.id or self.kind


def read_config(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> ProvisionerConfig:
    """File, environment, flags. Raises InvalidArgument."""
    env = os.environ if environ is None else environ
    given = vars(_parser().parse_args(argv))
    path = given.pop("config")
    loaded = config.load(ProvisionerConfig, path, given, env)
    addresses = loaded.controlplane or (env.get("SPRINGTIDE_ADDRESS") or DEFAULT_ADDRESS,)
    loaded = dataclasses.replace(
        loaded,
        controlplane=addresses,
        agent_controlplane=loaded.agent_controlplane or addresses[0],
        agent_tls_ca=loaded.agent_tls_ca or env.get("SPRINGTIDE_TLS_CA", ""),
    )
    identifier(loaded.provisioner_id, "id")
    for address in loaded.controlplane:
        parse_address(address, "controlplane")
    parse_address(loaded.agent_controlplane, "agent_controlplane")
    return loaded


def _parser() -> argparse.ArgumentParser:
    """One flag for each setting but [provider]; what is not given does not override."""
    parser = argparse.ArgumentParser(
        prog="provisioner", description="Gives nodes to the control plane and takes them back.", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE.toml", help="configuration file; flags override it")
    for f in dataclasses.fields(ProvisionerConfig):
        flag, doc = "--" + f.name.replace("_", "-"), f.metadata.get("doc", "").replace("%", "%%")
        options: dict[str, Any] = {"help": doc, "dest": f.name, "default": None}
        if f.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif f.type in (int, float):
            options["type"] = f.type
        elif f.type == tuple[str, ...]:
            options["action"] = "append"
        elif f.type is not str:
            continue
        parser.add_argument(flag, **options)
    return parser
