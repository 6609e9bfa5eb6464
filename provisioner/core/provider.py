"""The one interface that every kind of provider implements, and the conformance suite tests.

A provider never chooses: the control plane names groups and nodes, the provider starts and stops exactly those. Every
call is idempotent by group id. An outcome that is not known (a timeout, a lost answer) is raised as `OutcomeUnknown`;
the caller then looks with `list` before it repeats anything.

Its module has `create(config: Mapping[str, Any], context: ProviderContext) -> Provider` (provisioner.context).
"""

from collections.abc import Sequence
from typing import Protocol

from springtide.model.provisioning import CapabilitySet, GroupOrder, ProvidedNode
from springtide.model.provisioning import ProvidedPhase as Phase

__all__ = ["CapabilitySet", "GroupOrder", "OutcomeUnknown", "Phase", "ProvidedNode", "Provider", "Refused"]


class Refused(Exception):
    """The provider said no, for good or for now; nothing was started. Of a unit whose first nodes were started before,
    these are listed: a repeated start finds them, and what is given up is stopped. `status` is one of GroupStatus's
    names."""

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
        """Begins to give the group, or finds that it was begun before: of its nodes, those that are there are kept, and
        those that are not are begun. Raises Refused or OutcomeUnknown."""

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        """Begins to take the group back. Raises Refused(WORKER_GROUP_ID_NOT_FOUND) for one it does not have."""

    async def list(self) -> Sequence[ProvidedNode]:
        """All nodes that this provisioner gave, also those of an earlier process of the same id, and their ends for a
        while. Raises OutcomeUnknown when the provider does not answer: absence of an answer is not absence of nodes."""

    async def close(self) -> None:
        """Lets go of what this process holds. Nodes stay."""
