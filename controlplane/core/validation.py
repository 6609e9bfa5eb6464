"""What a pool's spec may say. Each error names the field, its value and the remedy."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from controlplane.core.placement import slots
from controlplane.core.policies import make_policy
from springtide.errors import InvalidArgument
from springtide.model.enums import NodeState
from springtide.model.node import Node
from springtide.model.pool import Pool, PoolSpec
from springtide.model.routing_policy import routing_settings

MOST_WORKERS = 4096
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")
_ENGINE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9._/-]{0,63}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|CREDENTIALS)$", re.IGNORECASE)
_DEFAULTS = PoolSpec(name="", engine="")


def checked(spec: PoolSpec, pools: Mapping[str, Pool], nodes: Mapping[str, Node]) -> PoolSpec:
    """The spec with the bounds of its policy's settings taken over. Raises InvalidArgument."""
    _check_names(spec, pools)
    spec = _with_policy_bounds(spec)
    _check_bounds(spec)
    _check_numbers(spec)
    _check_environment(spec)
    _check_routing(spec)
    make_policy(spec.policy, spec.min_workers, spec.max_workers)
    _check_gpus(spec, nodes)
    return spec


def _bad(field: str, value: object, problem: str, remedy: str, reason: str | None = None) -> InvalidArgument:
    return InvalidArgument(field=f"spec.{field}", value=value, problem=problem, remedy=remedy, reason=reason)


def _check_names(spec: PoolSpec, pools: Mapping[str, Pool]) -> None:
    if not _NAME.fullmatch(spec.name):
        raise _bad(
            "name",
            spec.name,
            "it is no pool name",
            "Use 1 to 48 small letters, digits and dashes; neither the first nor the last is a dash.",
        )
    if not _ENGINE.fullmatch(spec.engine):
        raise _bad("engine", spec.engine, "it is no engine's name", "Give vllm, sglang, llamacpp, sim or a plug-in.")
    for other in pools.values():
        if other.name != spec.name and other.spec.model_name == spec.model_name and other.spec.role is spec.role:
            raise _bad(
                "served_model_name",
                spec.model_name,
                f"the pool {other.name} serves that model already, and requests name the model only",
                "Give another served_model_name.",
                "MODEL_NAME_TAKEN",
            )


def _with_policy_bounds(spec: PoolSpec) -> PoolSpec:
    """min_workers and max_workers among the policy's settings are the pool's bounds, where the spec keeps the
    default."""
    changes: dict[str, Any] = {}
    for key in ("min_workers", "max_workers"):
        value = spec.policy.settings.get(key)
        whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        if whole and getattr(spec, key) == getattr(_DEFAULTS, key):
            changes[key] = int(value or 0)
    return dataclasses.replace(spec, **changes) if changes else spec


def _check_bounds(spec: PoolSpec) -> None:
    if spec.tensor_parallel_size < 1:
        raise _bad("tensor_parallel_size", spec.tensor_parallel_size, "it is below 1", "Give the GPUs of one worker.")
    if spec.min_workers < 0:
        raise _bad("min_workers", spec.min_workers, "it is negative", "Give 0 or more.")
    if spec.max_workers > MOST_WORKERS:
        raise _bad("max_workers", spec.max_workers, f"{MOST_WORKERS} is the most", f"Give {MOST_WORKERS} or less.")
    if spec.min_workers > spec.max_workers:
        raise _bad(
            "min_workers",
            spec.min_workers,
            f"it is greater than max_workers ({spec.max_workers})",
            f"Lower min_workers to {spec.max_workers} or raise max_workers to {spec.min_workers}.",
            "MIN_ABOVE_MAX",
        )
    if spec.initial_workers is not None and spec.initial_workers < 0:
        raise _bad("initial_workers", spec.initial_workers, "it is negative", "Give 0 or more, or leave it out.")


def _check_numbers(spec: PoolSpec) -> None:
    above_zero = (
        *("waiting_timeout_s", "start_timeout_s", "stop_grace_s", "max_start_attempts", "max_waiting"),
        *("sleep_stop_after_s", "max_weight_updates"),
    )
    for name in above_zero:
        value, default = getattr(spec, name), getattr(_DEFAULTS, name)
        if not value > 0:
            raise _bad(name, value, "it is not above 0", f"Leave it out for {default:g}.")
    if spec.sleep_level not in (1, 2):
        remedy = "Use 1 (weights stay in the host's memory) or 2 (weights are loaded again on waking)."
        raise _bad("sleep_level", spec.sleep_level, "it is no level", remedy)
    if spec.spares > MOST_WORKERS:
        raise _bad("spares", spec.spares, f"{MOST_WORKERS} is the most", f"Give {MOST_WORKERS} or less.")
    for name in ("max_in_flight", "drain_timeout_s", "ramp_s", "spares"):
        if not getattr(spec, name) >= 0:
            raise _bad(name, getattr(spec, name), "it is negative", "Give 0 (the default) or more.")
    for key, amount in spec.resources.items():
        if amount < 0:
            raise _bad(f"resources.{key}", amount, "it is negative", "Give what one worker takes of its node.")


def _check_environment(spec: PoolSpec) -> None:
    for name in spec.engine_env:
        if not _ENV_NAME.fullmatch(name):
            raise _bad(f"engine_env.{name}", "...", "it is no variable's name", "Use letters, digits and underscores.")
        if _SECRET.search(name):
            raise _bad(
                f"engine_env.{name}",
                "...",
                "it looks like a secret, and a pool's record is no place for one",
                "Set it in the environment of the node's agent.",
                "SECRET_IN_SPEC",
            )
    for index, argument in enumerate(spec.engine_args):
        if "\0" in argument or "\n" in argument:
            raise _bad(f"engine_args[{index}]", argument, "it holds a line break or a null", "One argument per entry.")


def _check_routing(spec: PoolSpec) -> None:
    routing_settings(spec.routing, "spec.routing")
    for key, value in spec.labels.items():
        if not _LABEL.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise _bad(
                f"labels.{key}",
                value,
                "it is no label",
                "Use up to 63 letters, digits, dots, dashes, slashes and underscores for key and value.",
            )


def _gpus_of(node: Node) -> int:
    """Of one that is still coming: what its provisioner says that it will have."""
    coming = node.state is NodeState.REQUESTED and node.provided is not None
    return node.provided.gpus if coming and node.provided is not None else len(node.observed.gpus)


def _check_gpus(spec: PoolSpec, nodes: Mapping[str, Node]) -> None:
    """A worker must fit at least one of the nodes that are known and carry the labels; while there is none, it may
    wait."""
    matching = [
        node
        for node in nodes.values()
        if node.state is not NodeState.GONE
        and all(node.observed.labels.get(key) == value for key, value in spec.placement.items())
    ]
    tp = spec.tensor_parallel_size
    counts = {node.node_id: _gpus_of(node) for node in matching}
    if not counts or any(count >= tp and slots(count, tp)[1] == 0 for count in counts.values()):
        return
    listed = ", ".join(f"{node_id} has {count}" for node_id, count in sorted(counts.items())[:8])
    sizes = sorted({size for count in counts.values() for size in range(1, count + 1) if count % size == 0})
    remedy = f"Use one of {', '.join(map(str, sizes))}." if sizes else "Add a node with GPUs."
    raise _bad(
        "tensor_parallel_size",
        tp,
        f"it does not divide the GPUs of any known node ({listed})",
        remedy,
        "TENSOR_PARALLEL_SIZE_DOES_NOT_DIVIDE" if sizes else "GPU_NOT_AVAILABLE",
    )
