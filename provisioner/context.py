"""What a provider is given beside its own settings, and how the agents that it starts find the control plane."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from springtide.clock import Clock, SystemClock
from springtide.model.provisioning import GroupOrder


@dataclass(frozen=True, slots=True)
class ProviderContext:
    """One per process.

    `data_dir`: a folder of the provider's own, already there, mode 0700. `agent_controlplane`: host:port that agents
    on the nodes reach the control plane under; it may differ from the one that this process uses. `tls_ca`: PEM file
    that agents verify the control plane with, a path that is valid on the nodes, too; empty without TLS.
    """

    provisioner_id: str
    data_dir: Path
    agent_controlplane: str
    tls_ca: str = ""
    clock: Clock = field(default_factory=SystemClock)

    def agent_environment(self, order: GroupOrder) -> dict[str, str]:
        """Variables of an agent: where the control plane is, and the secret that lets it join. Never put the values
        into argv or logs."""
        found = {"SPRINGTIDE_ADDRESS": self.agent_controlplane}
        if order.join_token:
            found["SPRINGTIDE_TOKEN"] = order.join_token
        if self.tls_ca:
            found["SPRINGTIDE_TLS_CA"] = self.tls_ca
        return found

    def agent_labels(self, set_labels: Mapping[str, str]) -> dict[str, str]:
        """Labels of an agent: those of its capability set, and who gave it."""
        return {**set_labels, "provisioner": self.provisioner_id}


def agent_flags(
    node_id: str, data_dir: str, labels: Mapping[str, str], resources: Mapping[str, int] | None = None
) -> list[str]:
    """Arguments of `python -m nodeagent` for one node; no secret is among them. GPUs are left to the caller:
    `--gpus N` for simulated ones, nothing for those that the host has."""
    flags = ["--node-id", node_id, "--data-dir", data_dir]
    for key, value in sorted(labels.items()):
        flags += ["--labels", f"{key}={value}"]
    for key, amount in sorted((resources or {}).items()):
        flags += ["--resources", f"{key}={amount}"]
    return flags
