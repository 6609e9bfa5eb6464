"""Settings of the control plane, and its command line made of them."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from controlplane.core.snapshot import NodeRules, Timing
from springtide import config
from springtide.client.spec import pool_spec
from springtide.config import setting
from springtide.errors import InvalidArgument
from springtide.model.pool import PoolSpec
from springtide.rpc import DEFAULT_ADDRESS, Security, parse_address
from springtide.wire.pools import pool_spec_from_proto

_DEFAULT = Timing()
_ORDER = (
    ("heartbeat_interval_s", "suspect_after_s"),
    ("heartbeat_interval_s", "signal_max_age_s"),
    ("suspect_after_s", "lease_s"),
)


@dataclass(frozen=True)
class TimingSettings:
    """Table [timing]."""

    heartbeat_interval_s: float = setting(
        _DEFAULT.heartbeat_interval_s, doc="How often agents report.", unit="s", minimum=0.05, maximum=60
    )
    signal_max_age_s: float = setting(
        _DEFAULT.signal_max_age_s, doc="A report older than this is unknown, never zero.", unit="s", minimum=0.1
    )
    suspect_after_s: float = setting(
        _DEFAULT.suspect_after_s, doc="Silence of an agent after which its workers are SUSPECT.", unit="s", minimum=0.1
    )
    unhealthy_after_s: float = setting(
        _DEFAULT.unhealthy_after_s,
        doc="An ACTIVE worker whose probes fail for so long hangs: it is killed and replaced.",
        unit="s",
        minimum=0.1,
    )
    lease_s: float = setting(
        _DEFAULT.lease_s, doc="Silence of an agent after which its workers are LOST.", unit="s", minimum=0.5
    )
    grace_s: float = setting(
        _DEFAULT.grace_s,
        doc="After a start, or when a third of the agents fall silent at once, no lease expires for so long.",
        unit="s",
        minimum=0,
    )
    ack_timeout_s: float = setting(
        _DEFAULT.ack_timeout_s, doc="Longest wait for routers before a drain goes on.", unit="s", minimum=0
    )
    router_lease_s: float = setting(
        _DEFAULT.router_lease_s, doc="A router that is silent for longer is not waited for.", unit="s", minimum=0.1
    )
    sample_interval_s: float = setting(
        _DEFAULT.sample_interval_s, doc="How often a pool's load is sampled.", unit="s", minimum=0.05
    )
    start_backoff_s: float = setting(
        _DEFAULT.start_backoff_s, doc="Wait after the first failed start; doubles with each.", unit="s", minimum=0
    )
    start_backoff_max_s: float = setting(
        _DEFAULT.start_backoff_max_s, doc="Longest wait between failed starts.", unit="s", minimum=0
    )
    inactive_retention_s: float = setting(
        _DEFAULT.inactive_retention_s,
        doc="An INACTIVE worker that nothing needs is forgotten after it.",
        unit="s",
        minimum=0,
    )
    monitoring_interval_s: float = setting(
        _DEFAULT.monitoring_interval_s, doc="Longest sleep between two looks.", unit="s", minimum=0.1, maximum=60
    )

    def timing(self) -> Timing:
        """The same as the core takes it."""
        return Timing(**{f.name: getattr(self, f.name) for f in fields(self)})


_RULES = NodeRules()


@dataclass(frozen=True)
class NodeSettings:
    """Table [nodes]: when nodes are asked of provisioners, and given back."""

    register_timeout_s: float = setting(
        _RULES.register_timeout_s,
        doc="A node whose agent has not registered so long after it runs at its provider is given back.",
        unit="s",
        minimum=1,
    )
    pending_timeout_s: float = setting(
        _RULES.pending_timeout_s, doc="Longest wait in a provider's queue; 0: as long as it takes.", unit="s", minimum=0
    )
    idle_s: float = setting(
        _RULES.idle_s, doc="A node that nothing needs for so long is given back.", unit="s", minimum=0
    )
    lost_release_s: float = setting(
        _RULES.lost_release_s, doc="A node that is LOST for so long is given back.", unit="s", minimum=0
    )
    rollover_lead_s: float = setting(
        _RULES.rollover_lead_s,
        doc="So long before a node's known end (time limit, preemption) its workers begin to move.",
        unit="s",
        minimum=0,
    )
    backoff_s: float = setting(
        _RULES.backoff_s,
        doc="A capability set whose nodes did not come is left alone for so long; doubles with each.",
        unit="s",
        minimum=0,
    )
    backoff_max_s: float = setting(_RULES.backoff_max_s, doc="Longest such pause.", unit="s", minimum=0)
    gone_retention_s: float = setting(
        _RULES.gone_retention_s, doc="A GONE node of a provisioner is forgotten after it.", unit="s", minimum=1
    )
    base_on_demand: int = setting(
        _RULES.base_on_demand, doc="So many workers of each pool are kept off spot nodes.", minimum=0
    )
    dynamic_fallback: bool = setting(
        _RULES.dynamic_fallback, doc="On-demand nodes stand in for spot nodes that are not ready."
    )

    def rules(self) -> NodeRules:
        """The same as the core takes it."""
        return NodeRules(**{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True)
class ControlPlaneConfig:
    """The file of `python -m controlplane --config FILE.toml`."""

    listen: str = setting(
        DEFAULT_ADDRESS, doc="Address of the gRPC services. Port 0: any free one.", env="SPRINGTIDE_LISTEN"
    )
    data_dir: str = setting(
        ".springtide/controlplane", doc="Folder of the store; one control plane each.", env="SPRINGTIDE_DATA_DIR"
    )
    store: str = setting(
        "sqlite", doc="sqlite keeps everything; memory forgets at the end.", choices=("sqlite", "memory")
    )
    metrics_port: int = setting(
        -1, doc="Port of the Prometheus endpoint. 0: any free one, -1: none.", minimum=-1, maximum=65535
    )
    metrics_host: str = setting("127.0.0.1", doc="Address of the Prometheus endpoint.")
    log_level: str = setting("info", doc="debug, info, warning or error; also per logger: info,controlplane=debug.")
    tls_cert: str = setting("", doc="PEM file of this server's certificate. With tls_key: TLS.")
    tls_key: str = setting("", doc="PEM file of its private key.")
    tls_client_ca: str = setting("", doc="PEM file of the authority whose certificates clients must show (mTLS).")
    token_file: str = setting("", doc="File with one token a line; each call must carry one of them.")
    insecure_listen: bool = setting(
        False, doc="Listen on a network address although there is no TLS or no token: a trusted network."
    )
    stop_timeout_s: float = setting(2.0, doc="Longest wait for calls under way at the end.", unit="s", minimum=0)
    timing: TimingSettings = field(default_factory=TimingSettings)
    nodes: NodeSettings = field(default_factory=NodeSettings)
    pools: tuple[Mapping[str, Any], ...] = setting(
        (), doc="Pools to create at the start where there is none of that name: [[pools]], keys as in `apply`."
    )

    def security(self) -> Security:
        return Security(self.tls_cert, self.tls_key, self.tls_client_ca, self.token_file, self.insecure_listen)

    @property
    def asks_for_tokens(self) -> bool:
        """It listens for other machines, or asks for tokens anyway: then provisioners and nodes get their own."""
        return bool(self.token_file) or not parse_address(self.listen, "listen").is_loopback

    def initial_pools(self) -> tuple[PoolSpec, ...]:
        """Raises InvalidArgument with the place in the file."""
        return tuple(
            pool_spec_from_proto(pool_spec(plain, f"pools[{number}].")) for number, plain in enumerate(self.pools)
        )


def from_command_line(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> ControlPlaneConfig:
    """File, environment, flags; a flag counts only when it is given. Raises InvalidArgument."""
    given = _parser().parse_args(arguments)
    overrides = {key: value for key, value in vars(given).items() if key != "config"}
    loaded = config.load(ControlPlaneConfig, given.config, overrides, environ)
    _check_order(loaded.timing)
    return loaded


def _check_order(timing: TimingSettings) -> None:
    """Raises InvalidArgument for times with which healthy agents would count as silent."""
    for shorter, longer in _ORDER:
        low, high = getattr(timing, shorter), getattr(timing, longer)
        if low >= high:
            raise InvalidArgument(
                field=f"timing.{longer}",
                value=high,
                problem=f"must be more than timing.{shorter} = {low:g}",
                remedy=f"Raise timing.{longer} (three times as much, say), or lower timing.{shorter}.",
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m controlplane",
        description="Decides how many workers each pool has, and records it. Flags override the file when given.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file; docs/configuration.md lists its keys")
    for f in fields(ControlPlaneConfig):
        if f.name in ("timing", "nodes", "pools"):
            continue
        flag = "--" + f.name.replace("_", "-")
        text = f"{f.metadata['doc']} [{f.default}]"
        if f.type is bool:
            parser.add_argument(flag, action="store_true", default=None, help=text)
        else:
            kind = f.type if callable(f.type) else str
            parser.add_argument(flag, type=kind, default=None, metavar=f.name.upper(), help=text)
    return parser
