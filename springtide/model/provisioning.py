"""What provisioners offer, are told, and report: nodes that come and go."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ProvidedPhase(StrEnum):
    """How far a group's node is at its provider. A fact, not a state."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    ENDING = "ENDING"
    ENDED = "ENDED"


class GroupStatus(StrEnum):
    """What became of an order."""

    SUCCESS = "SUCCESS"
    WORKER_GROUP_TOO_MUCH = "WORKER_GROUP_TOO_MUCH"
    WORKER_GROUP_ID_NOT_FOUND = "WORKER_GROUP_ID_NOT_FOUND"
    WORKER_GROUP_ID_NOT_SPECIFIED = "WORKER_GROUP_ID_NOT_SPECIFIED"
    WORKER_GROUP_SHUTDOWN = "WORKER_GROUP_SHUTDOWN"
    UNKNOWN_ACTION = "UNKNOWN_ACTION"


@dataclass(frozen=True, slots=True)
class CapabilitySet:
    """What nodes of one kind are like, and how many of them there can be. Fields as in provisioner.proto."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus_per_node: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)
    max_nodes: int = 0
    nodes_per_unit: int = 1
    spot: bool = False
    cost_per_hour: float = 0.0
    available_nodes: int | None = None
    keep_nodes: int = 0


@dataclass(frozen=True, slots=True)
class ProvidedNode:
    """One node as its provider sees it now."""

    node_id: str
    group_id: str
    capability_set: str
    phase: ProvidedPhase
    reference: str = ""  # the provider's own name, e.g. a job id
    reason: str = ""  # UPPER_SNAKE, of ENDING and ENDED
    message: str = ""
    ends_in_s: float | None = None  # seconds until it is taken away; None: no end is known


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Have this group of nodes. `join_token` is a secret: it goes into environments, never into argv or logs."""

    group_id: str
    capability_set: str
    node_ids: tuple[str, ...]
    join_token: str = field(default="", repr=False)
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A GroupOrder with the id that its answer names."""

    request_id: str
    group: GroupOrder


@dataclass(frozen=True, slots=True)
class ShutdownOrder:
    """Give this group back."""

    request_id: str
    group_id: str
    node_ids: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    request_id: str
    group_id: str
    status: GroupStatus | None  # None: unknown outcome, the order is repeated
    message: str = ""


@dataclass(frozen=True, slots=True)
class DesiredNodes:
    """How many nodes of a set are wanted in all; for people. `pending` is max(0, desired - connected)."""

    capability_set: str
    desired: int
    connected: int
    request_id: str = ""

    @property
    def pending(self) -> int:
        return max(0, self.desired - self.connected)


@dataclass(frozen=True, slots=True)
class Orders:
    """The whole of what a provisioner is told."""

    desired: tuple[DesiredNodes, ...] = ()
    start: tuple[StartOrder, ...] = ()
    shutdown: tuple[ShutdownOrder, ...] = ()
    known_node_ids: tuple[str, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()  # (request id, group id) of orders that this version does not know


@dataclass(frozen=True, slots=True)
class ProvisionerReport:
    """Everything a provisioner knows now."""

    capability_sets: tuple[CapabilitySet, ...] = ()
    nodes: tuple[ProvidedNode, ...] = ()
    answers: tuple[GroupAnswer, ...] = ()
    sequence: int = 0
