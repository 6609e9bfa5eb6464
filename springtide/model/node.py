"""A node: a host with an agent, its GPUs, labels and countable resources."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import NodeState
from springtide.model.provisioning import ProvidedPhase


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one simulated slot. `id` is what the engine's visible-devices variable takes."""

    id: str
    name: str = ""
    memory_bytes: int | None = None
    simulated: bool = False
    link_group: str = ""  # of GPUs that reach each other by NVLink; empty: none, or nobody knows


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Written by operators."""

    cordoned: bool = False
    cordon_reason: str = ""
    ends_at: float | None = None  # an operator's notice: it is taken away then


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
class Provision:
    """Where a node comes from and how its saga stands. Written by the control plane's leader."""

    provisioner_id: str  # gave it and takes it back
    group_id: str = ""  # unit of nodes that come and go together
    capability_set: str = ""
    gpus: int = 0  # that it is to have, before its agent says so
    spot: bool = False
    cost_per_hour: float = 0.0
    fixed: bool = False  # its provisioner neither starts nor stops it
    pool: str = ""  # that it was requested for; empty: kept, or found
    requested_at: float | None = None  # None: found at its provisioner
    register_deadline: float | None = None  # given back unless its agent is here by then; None: no bound now
    joined: bool = False  # its agent has registered
    phase: ProvidedPhase | None = None  # as last listed; None: not listed yet
    reference: str = ""  # the provider's own name
    ends_at: float | None = None  # it is taken away then; None: no end is known
    idle_since: float | None = None  # nothing needs it since then
    release: bool = False  # it may go: its shutdown is ordered until its provisioner lists it no more
    preempted: bool = False  # its preemption was told
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    state: NodeState = NodeState.UP
    reason: str = "REGISTERED"
    state_since: float = 0.0
    spec: NodeSpec = field(default_factory=NodeSpec)
    observed: NodeObserved = field(default_factory=NodeObserved)
    revision: int = 0
    provided: Provision | None = None  # None: it came by itself
