"""Settings of the node agent, and its command line made of them."""

import argparse
import dataclasses
import ipaddress
import os
import socket
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide import config
from springtide.config import setting
from springtide.errors import InvalidArgument
from springtide.rpc import DEFAULT_ADDRESS, parse_address
from springtide.wire.values import identifier


@dataclass(frozen=True)
class LaunchSettings:
    """Table [launch]: what pools may ask of this node. A pool cannot widen it."""

    allowed_interpreters: tuple[str, ...] = setting(
        (), doc="Pythons that pools may name: absolute paths or shell patterns. The agent's own always may."
    )
    interpreters: Mapping[str, str] = setting(
        default_factory=dict, doc="Python of an engine's environment, by engine, for pools that name none."
    )
    allowed_flags: tuple[str, ...] = setting((), doc="Engine flags that are denied by default and allowed here.")
    denied_flags: tuple[str, ...] = setting((), doc="Engine flags that pools may not pass, besides the denied ones.")
    allowed_env: tuple[str, ...] = setting((), doc="Environment variables that are denied by default and allowed here.")


@dataclass(frozen=True)
class AgentConfig:
    """The file of `python -m nodeagent --config FILE.toml`."""

    data_dir: str = setting(
        ".springtide/nodeagent", doc="Folder of ledger and logs; one agent each.", env="SPRINGTIDE_DATA_DIR"
    )
    runtime_dir: str = setting(
        "",
        doc="Short path for unix sockets; it must outlive the agent. Default: below /tmp/springtide-UID.",
        env="SPRINGTIDE_RUNTIME_DIR",
    )
    controlplane: tuple[str, ...] = setting(
        (), doc=f"Addresses of control planes, host:port. Default: SPRINGTIDE_ADDRESS, else {DEFAULT_ADDRESS}."
    )
    node_id: str = setting("", doc="Stable name of this node. Default: host name and a random part, kept in data_dir.")
    host: str = setting("127.0.0.1", doc="Address that shims listen on.")
    advertised_host: str = setting("", doc="Host under which routers reach the shims. Default: host.")
    insecure: bool = setting(
        False, doc="Let shims listen on a network address although they speak plain HTTP: a trusted network."
    )
    port_first: int = setting(
        0, doc="First port of shims and of side channels; 0: any free port.", minimum=0, maximum=65535
    )
    port_last: int = setting(0, doc="Last of these ports; a worker with NIXL takes two.", minimum=0, maximum=65535)
    gpus: int | None = setting(
        None, doc="Number of simulated GPU slots. Not set: the GPUs of this host.", minimum=0, maximum=1024
    )
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels for placement.")
    resources: Mapping[str, int] = setting(
        default_factory=dict, doc="Countable units that workers may take. `cpus` is added unless set."
    )
    parallel_starts: int = setting(1, doc="Engines that start at the same time on this node.", minimum=1, maximum=256)
    start_slot_s: float = setting(
        120.0,
        doc="Longest time that one start keeps others of parallel_starts waiting; it goes on beside them.",
        unit="s",
        minimum=0.1,
    )
    heartbeat_interval_s: float = setting(
        1.0, unit="s", doc="Until the control plane says another one.", minimum=0.05, maximum=300
    )
    reconnect_max_s: float = setting(
        5.0, unit="s", doc="Longest wait between two attempts to reach a control plane.", minimum=0.1, maximum=60
    )
    probe_interval_s: float = setting(
        1.0, unit="s", doc="Between health probes of an engine.", minimum=0.05, maximum=60
    )
    stall_timeout_s: float = setting(
        60.0,
        unit="s",
        doc="An engine with work that does none of it for so long counts as failing, whatever it answers. 0: never.",
        minimum=0,
        maximum=86400,
    )
    stop_action: str = setting(
        "drain",
        doc="What SIGTERM and SIGINT do: `drain` stops all workers first, `leave` leaves shims and engines running. "
        "notice_signal and notice_file always drain.",
        choices=("drain", "leave"),
    )
    stop_timeout_s: float = setting(60.0, unit="s", doc="Longest drain of a stop; then all is stopped.", minimum=0)
    notice_signal: str = setting(
        "SIGUSR1",
        doc="Signal that says that this node is taken away soon, e.g. of `sbatch --signal`: all workers are drained.",
        choices=("SIGUSR1", "SIGUSR2", "SIGHUP"),
    )
    notice_s: float = setting(
        0.0, unit="s", doc="From that signal to the end of this node. 0: stop_timeout_s.", minimum=0, maximum=86400
    )
    notice_file: str = setting(
        "",
        doc="When this file appears, this node is taken away. It holds seconds, or an ISO time; empty: notice_s.",
        env="SPRINGTIDE_NOTICE_FILE",
    )
    metrics_port: int = setting(-1, doc="Prometheus endpoint; 0: any free port, -1: off.", minimum=-1, maximum=65535)
    metrics_host: str = setting("127.0.0.1", doc="Address of the Prometheus endpoint.")
    log_level: str = setting("info", doc="debug, info, warning or error; single loggers as NAME=LEVEL.")
    launch: LaunchSettings = field(default_factory=LaunchSettings)

    @property
    def routed_host(self) -> str:
        """What is announced."""
        return self.advertised_host or self.host


def read_config(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> AgentConfig:
    """File, environment, flags. Raises InvalidArgument."""
    env = os.environ if environ is None else environ
    args = vars(_parser().parse_args(argv))
    path = args.pop("config")
    loaded = config.load(AgentConfig, path, args, env)
    if not loaded.controlplane:
        loaded = dataclasses.replace(loaded, controlplane=(env.get("SPRINGTIDE_ADDRESS") or DEFAULT_ADDRESS,))
    _check(loaded)
    return loaded


def _check(loaded: AgentConfig) -> None:
    if loaded.node_id:
        identifier(loaded.node_id, "node_id")
    for address in loaded.controlplane:
        parse_address(address, "controlplane")
    if loaded.port_first and loaded.port_last < loaded.port_first:
        raise InvalidArgument(
            field="port_last",
            value=loaded.port_last,
            problem=f"is below port_first = {loaded.port_first}",
            remedy="Set port_last to at least port_first.",
        )
    if loaded.routed_host in ("0.0.0.0", "::"):
        raise InvalidArgument(
            field="advertised_host",
            value=loaded.advertised_host,
            problem=f"is not set, and routers cannot reach host = {loaded.host}",
            remedy="Set advertised_host to the name or address under which routers reach this node.",
        )
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(loaded.host, None)]
        loopback = all(ipaddress.ip_address(address).is_loopback for address in found)
    except OSError as error:
        raise InvalidArgument(
            field="host", value=loaded.host, problem=str(error), remedy="Name an address of this host."
        ) from None
    if not loopback and not loaded.insecure:
        raise InvalidArgument(
            field="host",
            value=loaded.host,
            problem="is reachable from other machines, and shims speak plain HTTP without tokens",
            remedy="Use 127.0.0.1, or set insecure = true on a network that you trust.",
            reason="INSECURE_LISTENER",
        )


def node_id(loaded: AgentConfig, data_dir: Path) -> str:
    """The configured name, else the one that data_dir keeps. Raises OSError."""
    if loaded.node_id:
        return loaded.node_id
    kept = data_dir / "node_id"
    if not kept.exists():
        short = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname().partition(".")[0])[:80]
        kept.write_text(f"{short.strip('-') or 'node'}-{os.urandom(3).hex()}\n")
    return kept.read_text().strip()


def _parser() -> argparse.ArgumentParser:
    """One flag for each scalar and list setting; what is not given does not override."""
    parser = argparse.ArgumentParser(prog="nodeagent", description="The agent of one node.", allow_abbrev=False)
    parser.add_argument("--config", help="TOML file")
    hints = typing.get_type_hints(AgentConfig)
    for f in dataclasses.fields(AgentConfig):
        flag, doc = "--" + f.name.replace("_", "-"), f.metadata.get("doc", "").replace("%", "%%")
        hint = hints[f.name]
        options: dict[str, Any] = {"help": doc, "dest": f.name, "default": None}
        if hint is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif hint in (int, float, int | None):
            options["type"] = float if hint is float else int
        elif hint in (Mapping[str, str], Mapping[str, int]):
            kind = _pair(int if hint == Mapping[str, int] else str)
            options |= {"action": _Pairs, "metavar": "KEY=VALUE", "nargs": 1, "type": kind}
        elif hint == tuple[str, ...]:
            options["action"] = "append"
        elif hint is not str:
            continue
        parser.add_argument(flag, **options)
    return parser


def _pair(kind: type) -> Any:
    def parse(text: str) -> tuple[str, Any]:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
        return key, kind(value)

    return parse


class _Pairs(argparse.Action):
    """KEY=VALUE, repeatable."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        found = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**found, **dict(values)})
