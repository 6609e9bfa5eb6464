"""A pool: one model served by interchangeable workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import DrainAction, Role, ScaleDown

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A scaling policy by name. `settings` holds that policy's keys only."""

    name: str = "load_ratio"
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """A routing policy by name (springtide.model.routing_policy). `settings` holds that policy's keys only."""

    name: str = "least_in_flight"
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What an operator wants. Written by operators only; see PoolSpec in types.proto for units and defaults."""

    name: str
    engine: str
    model: str = ""
    served_model_name: str = ""
    tensor_parallel_size: int = 1
    min_workers: int = 1
    max_workers: int = 8
    initial_workers: int | None = None
    policy: PolicySpec = field(default_factory=PolicySpec)
    placement: Mapping[str, str] = field(default_factory=dict)
    role: Role = Role.MIXED
    engine_args: tuple[str, ...] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""
    max_in_flight: int = 0
    max_waiting: int = 1024
    waiting_timeout_s: float = 300.0
    start_timeout_s: float = 900.0
    drain_timeout_s: float = 0.0
    drain_action: DrainAction = DrainAction.ABORT
    stop_grace_s: float = 30.0
    ramp_s: float = 0.0
    max_start_attempts: int = 5
    resources: Mapping[str, int] = field(default_factory=dict)
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    labels: Mapping[str, str] = field(default_factory=dict)
    scale_down: ScaleDown = ScaleDown.STOP
    sleep_stop_after_s: float = 600.0
    sleep_level: int = 1
    lend_gpus: bool = False
    spares: int = 0
    max_weight_updates: int = 1

    @property
    def model_name(self) -> str:
        """The `model` of OpenAI requests."""
        return self.served_model_name or self.name


@dataclass(frozen=True, slots=True)
class PoolIntent:
    """What the control plane has decided about a pool, and what operators told it to do for a while."""

    desired_workers: int = 0
    manual_workers: int | None = None
    hold_until: float | None = None
    hold_reason: str = ""
    deleting: bool = False
    last_scale_up_at: float | None = None
    last_scale_down_at: float | None = None
    weight_version: str = ""
    weight_source: str = ""
    weight_barrier: bool = False  # workers that are behind serve nothing, instead of until their turn
    conditions: tuple[str, ...] = ()
    next_worker_number: int = 1


@dataclass(frozen=True, slots=True)
class Pool:
    spec: PoolSpec
    intent: PoolIntent = field(default_factory=PoolIntent)
    revision: int = 0

    @property
    def name(self) -> str:
        return self.spec.name
