"""The one interface that every kind of provider implements, and the conformance suite tests.

A provider never chooses: the control plane names groups and nodes, the provider starts and stops exactly those. Every
call is idempotent by group id. An outcome that is not known (a timeout, a lost answer) is raised as `OutcomeUnknown`;
the caller then looks with `list` before it repeats anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Phase(Enum):
    """How far a group's node is at its provider."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    ENDING = "ENDING"
    ENDED = "ENDED"


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
class GroupOrder:
    """Have this group of nodes. `join_token` is a secret: it goes into environments, never into argv or logs."""

    group_id: str
    capability_set: str
    node_ids: tuple[str, ...]
    join_token: str = field(default="", repr=False)
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ProvidedNode:
    """One node as its provider sees it now."""

    node_id: str
    group_id: str
    capability_set: str
    phase: Phase
    reference: str = ""  # the provider's own name, e.g. a job id
    reason: str = ""  # UPPER_SNAKE, of ENDING and ENDED
    message: str = ""
    ends_in_s: float | None = None  # seconds until it is taken away; None: no end is known


class Refused(Exception):
    """The provider said no, for good or for now; nothing was started. `status` is one of GroupStatus's names."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class OutcomeUnknown(Exception):
    """The call may or may not have had its effect: look with `list` before repeating it."""


class Provider(Protocol):
    """Something that gives nodes and takes them back."""

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        """What can be had now. Called once per report; cheap or cached."""

    async def start(self, order: GroupOrder) -> None:
        """Begins to give the group, or finds that it was begun before. Raises Refused or OutcomeUnknown."""

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        """Begins to take the group back. Raises Refused(WORKER_GROUP_ID_NOT_FOUND) for one it does not have."""

    async def list(self) -> Sequence[ProvidedNode]:
        """All nodes that this provisioner gave, also those of an earlier process of the same id, and their ends for a
        while. Raises OutcomeUnknown when the provider does not answer: absence of an answer is not absence of nodes."""

    async def close(self) -> None:
        """Lets go of what this process holds. Nodes stay."""
