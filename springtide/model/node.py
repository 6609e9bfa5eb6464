"""A node: a host with an agent, its GPUs, labels and countable resources."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import NodeState


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one simulated slot. `id` is what the engine's visible-devices variable takes."""

    id: str
    name: str = ""
    memory_bytes: int | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Written by operators."""

    cordoned: bool = False
    cordon_reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeObserved:
    """What the agent said in its last hello."""

    boot_id: str = ""
    address: str = ""
    gpus: tuple[Gpu, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    agent_version: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    state: NodeState = NodeState.UP
    reason: str = "REGISTERED"
    state_since: float = 0.0
    spec: NodeSpec = field(default_factory=NodeSpec)
    observed: NodeObserved = field(default_factory=NodeObserved)
    revision: int = 0
