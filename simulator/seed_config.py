"""The fourth seed's YAML: cluster, applications and start state.

A server has eight processors unless it says `processors`. An instance with pipeline parallelism takes
pipeline_parallelism x tensor_parallelism processors here; live pools accept only pipeline_parallelism = 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulator.load import DEFAULT_KIND
from simulator.replay import Fleet, Scenario
from simulator.world import Route, Transfer
from springtide.errors import FailedPrecondition, InvalidArgument
from springtide.model.enums import Role
from springtide.model.pool import PolicySpec, PoolSpec

PROCESSORS = 8
POWER_W = {"A100": 6500.0, "H100": 10_200.0}  # of a whole server, at most
DEFAULT_POWER_W = 6500.0
_BANDWIDTH_BYTES_PER_S = {"p2p": 25e9, "infiniband": 25e9, "ethernet": 3e9}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    sku: str
    count: int = 1
    processors: int = PROCESSORS
    power_w: float = DEFAULT_POWER_W


@dataclass(frozen=True, slots=True)
class ModelParallelism:
    pipeline_parallelism: int = 1
    tensor_parallelism: int = 1

    @property
    def num_processors(self) -> int:
        return self.pipeline_parallelism * self.tensor_parallelism


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """So many instances of one kind at the start."""

    tag: str
    num_instances: int
    parallelism: ModelParallelism


@dataclass(frozen=True, slots=True)
class ApplicationConfig:
    application_id: int = 0
    model_architecture: str = "LLaMA"
    model_size: str = "70B"
    scheduler: str = ""
    allocator: str = ""
    scale_up_delay: float = 10.0
    drain_check_interval: float = 1.0
    spin_up_s: float = 0.0  # the allocator's own: an instance is ACTIVE when this and the delay have passed
    debug: bool = False


@dataclass(frozen=True, slots=True)
class SeedConfig:
    servers: tuple[ServerConfig, ...]
    topology: str
    power_budget: float
    applications: tuple[ApplicationConfig, ...]
    start: tuple[InstanceGroup, ...]
    start_application_id: int = 0


def read_config(path: Path) -> SeedConfig:
    """Raises InvalidArgument that names the key, and FailedPrecondition without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise FailedPrecondition(
            "YAML configurations need PyYAML, which is not installed.",
            reason="NO_YAML",
            remedy="pip install 'springtide[simulate]'.",
        ) from None
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
        raise InvalidArgument(
            field="config", value=str(path), problem=problem, remedy="Name a readable file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"is no YAML ({' '.join(str(error).split())[:200]})"
        raise InvalidArgument(field="config", value=str(path), problem=problem, remedy="Correct the YAML.") from None
    return parse_config(plain)


def parse_config(plain: Any) -> SeedConfig:
    """From what YAML gives."""
    top = _mapping(plain, "config")
    cluster = _mapping(top.get("cluster"), "cluster")
    servers = tuple(
        _server(_mapping(entry, f"cluster.servers[{at}]"), f"cluster.servers[{at}]")
        for at, entry in enumerate(_list(cluster.get("servers"), "cluster.servers"))
    )
    applications = tuple(
        _application(_mapping(entry, f"applications[{at}]"), f"applications[{at}]")
        for at, entry in enumerate(_list(top.get("applications"), "applications"))
    )
    links = [_mapping(entry, "cluster.interconnects") for entry in cluster.get("interconnects") or []]
    topology = str(links[0].get("topology", "p2p")) if links else "p2p"
    if topology not in _BANDWIDTH_BYTES_PER_S:
        raise _bad("cluster.interconnects[0].topology", topology, f"one of {', '.join(_BANDWIDTH_BYTES_PER_S)}")
    start = _mapping(top.get("start_state") or {"state_type": "unallocated"}, "start_state")
    return SeedConfig(
        servers=servers,
        topology=topology,
        power_budget=_number(cluster, "power_budget", "cluster", 100_000.0),
        applications=applications,
        start=_start(start),
        start_application_id=int(_number(start, "application_id", "start_state", 0)),
    )


def _server(entry: Mapping[str, Any], where: str) -> ServerConfig:
    sku = entry.get("sku")
    if not isinstance(sku, str) or not sku:
        raise _bad(f"{where}.sku", sku, "a name")
    return ServerConfig(
        sku=sku,
        count=_whole(entry, "count", where, 1, at_least=0),
        processors=_whole(entry, "processors", where, PROCESSORS, at_least=1),
        power_w=_number(entry, "power", where, POWER_W.get(sku.upper(), DEFAULT_POWER_W)),
    )


def _application(entry: Mapping[str, Any], where: str) -> ApplicationConfig:
    scaling = _mapping(entry.get("scaling_manager") or {}, f"{where}.scaling_manager")
    return ApplicationConfig(
        application_id=_whole(entry, "application_id", where, 0, at_least=0),
        model_architecture=str(entry.get("model_architecture", "LLaMA")),
        model_size=str(entry.get("model_size", "70B")),
        scheduler=str(entry.get("scheduler", "")),
        allocator=str(entry.get("allocator", "")),
        scale_up_delay=_number(scaling, "scale_up_delay", f"{where}.scaling_manager", 10.0),
        drain_check_interval=_number(scaling, "drain_check_interval", f"{where}.scaling_manager", 1.0, above=0.0),
        debug=bool(entry.get("debug", False)),
    )


def _start(start: Mapping[str, Any]) -> tuple[InstanceGroup, ...]:
    kind = start.get("state_type")
    if kind == "unallocated":
        return ()
    tags = {"splitwise": ("prompt", "token"), "baseline": ("instance",), "orca": ("instance",)}.get(str(kind))
    if tags is None:
        raise _bad("start_state.state_type", kind, "splitwise, baseline, orca or unallocated")
    split = start.get("split_type", "homogeneous")
    if split != "homogeneous":
        raise _bad("start_state.split_type", split, "homogeneous: the simulator starts like instances only")
    return tuple(_group(_mapping(start.get(tag), f"start_state.{tag}"), tag) for tag in tags)


def _group(entry: Mapping[str, Any], tag: str) -> InstanceGroup:
    where = f"start_state.{tag}"
    parallelism = ModelParallelism(
        _whole(entry, "pipeline_parallelism", where, 1, at_least=1),
        _whole(entry, "tensor_parallelism", where, 1, at_least=1),
    )
    name = "mixed" if tag == "instance" else tag
    return InstanceGroup(name, _whole(entry, "num_instances", where, 1, at_least=0), parallelism)


# ------------------------------------------------------------------ as a scenario of ours


def scenario_of(config: SeedConfig) -> Scenario:
    """Pools with the start state's counts, which stay as they are, on the cluster's servers."""
    if not config.start or not config.servers:
        raise _bad("start_state", None, "a start state with instances, on a cluster with servers")
    application = next((a for a in config.applications if a.application_id == config.start_application_id), None)
    if application is None:
        raise _bad("start_state.application_id", config.start_application_id, "the id of one of the applications")
    sizes = {server.processors for server in config.servers}
    if len(sizes) > 1:
        raise _bad("cluster.servers", sorted(sizes), "servers with the same number of processors")
    pools = tuple(
        replace(
            PoolSpec(group.tag, "sim", role=_ROLES[group.tag], policy=PolicySpec("static")),
            tensor_parallel_size=group.parallelism.num_processors,
            min_workers=min(1, group.num_instances),
            max_workers=max(1, group.num_instances),
            initial_workers=group.num_instances,
        )
        for group in config.start
    )
    names = [pool.name for pool in pools]
    route = Route("prompt", "token") if names == ["prompt", "token"] else Route(names[0])
    return Scenario(
        pools=pools,
        routes={DEFAULT_KIND: route},
        fleet=Fleet(
            nodes=sum(server.count for server in config.servers),
            gpus=sizes.pop(),
            start_up_s=max(application.scale_up_delay, application.spin_up_s),
        ),
        transfer=Transfer(bytes_per_s=_BANDWIDTH_BYTES_PER_S[config.topology]),
    )


_ROLES = {"prompt": Role.PREFILL, "token": Role.DECODE, "mixed": Role.MIXED}


# ------------------------------------------------------------------ reading


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _bad(where, value, "a table")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _bad(where, value, "a list with at least one entry")
    return value


def _number(entry: Mapping[str, Any], key: str, where: str, default: float, above: float | None = None) -> float:
    value = entry.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf") or (above is not None and value <= above):
        raise _bad(f"{where}.{key}", value, f"a number {'>' if above is not None else '>='} 0")
    return float(value)


def _whole(entry: Mapping[str, Any], key: str, where: str, default: int, *, at_least: int) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise _bad(f"{where}.{key}", value, f"a whole number >= {at_least}")
    return value


def _bad(where: str, value: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(field=where, value=value, problem=f"is not {wanted}", remedy=f"Set {where} to {wanted}.")
