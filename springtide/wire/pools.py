"""PoolSpec on the wire. Zero or absent reads as the default that types.proto names."""

from typing import Any

from springtide.errors import InvalidArgument
from springtide.model.enums import DrainAction, Role, ScaleDown
from springtide.model.pool import PolicySpec, PoolSpec, RoutingSpec
from springtide.v1 import types_pb2 as pb
from springtide.wire.values import count, enum_from_proto, enum_to_proto, settings_from_struct, struct

_DEFAULTS = PoolSpec(name="", engine="")


def pool_spec_to_proto(spec: PoolSpec) -> pb.PoolSpec:
    """Defaults are written out."""
    return pb.PoolSpec(
        name=spec.name,
        engine=spec.engine,
        model=spec.model,
        served_model_name=spec.served_model_name,
        tensor_parallel_size=spec.tensor_parallel_size,
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        initial_workers=spec.initial_workers,
        policy=pb.PolicySpec(name=spec.policy.name, settings=struct(spec.policy.settings)),
        placement=dict(spec.placement),
        role=role_to_proto(spec.role),
        engine_args=spec.engine_args,
        engine_env=dict(spec.engine_env),
        interpreter=spec.interpreter,
        max_in_flight=spec.max_in_flight,
        max_waiting=spec.max_waiting,
        waiting_timeout_s=spec.waiting_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        drain_timeout_s=spec.drain_timeout_s,
        drain_action=enum_to_proto(pb.DrainAction, "DRAIN_ACTION", spec.drain_action),
        stop_grace_s=spec.stop_grace_s,
        ramp_s=spec.ramp_s,
        max_start_attempts=spec.max_start_attempts,
        resources=dict(spec.resources),
        routing=routing_to_proto(spec.routing),
        labels=dict(spec.labels),
        scale_down=enum_to_proto(pb.ScaleDown, "SCALE_DOWN", spec.scale_down),
        sleep_stop_after_s=spec.sleep_stop_after_s,
        sleep_level=spec.sleep_level,
        lend_gpus=spec.lend_gpus,
        spares=spec.spares,
        max_weight_updates=spec.max_weight_updates,
    )


def pool_spec_from_proto(message: pb.PoolSpec) -> PoolSpec:
    """Fills defaults in. Raises InvalidArgument for what no spec can mean; it does not compare fields."""
    return PoolSpec(
        name=message.name,
        engine=message.engine,
        model=message.model,
        served_model_name=message.served_model_name,
        tensor_parallel_size=count(message.tensor_parallel_size, "spec.tensor_parallel_size") or 1,
        min_workers=count(message.min_workers, "spec.min_workers") if message.HasField("min_workers") else 1,
        max_workers=_max_workers(message),
        initial_workers=count(message.initial_workers, "spec.initial_workers")
        if message.HasField("initial_workers")
        else None,
        policy=_policy(message.policy),
        placement=dict(message.placement),
        role=_role(message),
        engine_args=tuple(message.engine_args),
        engine_env=dict(message.engine_env),
        interpreter=message.interpreter,
        max_in_flight=count(message.max_in_flight, "spec.max_in_flight"),
        max_waiting=count(message.max_waiting, "spec.max_waiting") or _DEFAULTS.max_waiting,
        waiting_timeout_s=_seconds(message.waiting_timeout_s, "waiting_timeout_s") or _DEFAULTS.waiting_timeout_s,
        start_timeout_s=_seconds(message.start_timeout_s, "start_timeout_s") or _DEFAULTS.start_timeout_s,
        drain_timeout_s=_seconds(message.drain_timeout_s, "drain_timeout_s"),
        drain_action=_drain_action(message),
        stop_grace_s=_seconds(message.stop_grace_s, "stop_grace_s") or _DEFAULTS.stop_grace_s,
        ramp_s=_seconds(message.ramp_s, "ramp_s"),
        max_start_attempts=count(message.max_start_attempts, "spec.max_start_attempts") or _DEFAULTS.max_start_attempts,
        resources={key: count(number, f"spec.resources.{key}") for key, number in message.resources.items()},
        routing=routing_from_proto(message.routing, "spec.routing"),
        labels=dict(message.labels),
        scale_down=_scale_down(message),
        sleep_stop_after_s=_seconds(message.sleep_stop_after_s, "sleep_stop_after_s") or _DEFAULTS.sleep_stop_after_s,
        sleep_level=count(message.sleep_level, "spec.sleep_level") or _DEFAULTS.sleep_level,
        lend_gpus=message.lend_gpus,
        spares=count(message.spares, "spec.spares"),
        max_weight_updates=count(message.max_weight_updates, "spec.max_weight_updates") or _DEFAULTS.max_weight_updates,
    )


def routing_to_proto(spec: RoutingSpec) -> pb.RoutingSpec:
    return pb.RoutingSpec(name=spec.name, settings=struct(spec.settings))


def routing_from_proto(message: pb.RoutingSpec, field: str) -> RoutingSpec:
    """An absent name is the default. Raises InvalidArgument for settings that are no scalars."""
    return RoutingSpec(
        name=message.name or _DEFAULTS.routing.name,
        settings=settings_from_struct(message.settings, f"{field}.settings"),
    )


def role_to_proto(role: Role | None) -> Any:
    return enum_to_proto(pb.Role, "ROLE", role)


def role_from_proto(number: int) -> Role | None:
    """None for UNSPECIFIED and for a number of a later version."""
    return enum_from_proto(Role, pb.Role, "ROLE", number)


def _max_workers(message: pb.PoolSpec) -> int:
    if message.HasField("max_workers"):
        return count(message.max_workers, "spec.max_workers")
    return _DEFAULTS.max_workers


def _policy(message: pb.PolicySpec) -> PolicySpec:
    return PolicySpec(
        name=message.name or _DEFAULTS.policy.name,
        settings=settings_from_struct(message.settings, "spec.policy.settings"),
    )


def _role(message: pb.PoolSpec) -> Role:
    role = role_from_proto(message.role)
    if role is None and message.role != pb.ROLE_UNSPECIFIED:
        raise _unknown_word("spec.role", message.role, ", ".join(Role))
    return role or Role.MIXED


def _drain_action(message: pb.PoolSpec) -> DrainAction:
    action = enum_from_proto(DrainAction, pb.DrainAction, "DRAIN_ACTION", message.drain_action)
    if action is None and message.drain_action != pb.DRAIN_ACTION_UNSPECIFIED:
        raise _unknown_word("spec.drain_action", message.drain_action, ", ".join(DrainAction))
    return action or DrainAction.ABORT


def _scale_down(message: pb.PoolSpec) -> ScaleDown:
    found = enum_from_proto(ScaleDown, pb.ScaleDown, "SCALE_DOWN", message.scale_down)
    if found is None and message.scale_down != pb.SCALE_DOWN_UNSPECIFIED:
        raise _unknown_word("spec.scale_down", message.scale_down, ", ".join(ScaleDown))
    return found or ScaleDown.STOP


def _unknown_word(field: str, number: int, known: str) -> InvalidArgument:
    return InvalidArgument(field=field, value=number, problem="is not known here", remedy=f"Use one of {known}.")


def _seconds(value: float, field: str) -> float:
    if not 0 <= value < float("inf"):
        name = f"spec.{field}"
        raise InvalidArgument(
            field=name, value=value, problem="is not a time in seconds >= 0", remedy=f"Correct {name}."
        )
    return value
