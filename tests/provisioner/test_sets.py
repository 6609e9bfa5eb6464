"""The capability set of the providers that have one."""

from pathlib import Path
from typing import Any

import pytest

from provisioner.context import ProviderContext
from provisioner.core.provider import CapabilitySet, Provider
from provisioner.ecs.provider import EcsProvider
from provisioner.ecs.settings import EcsSettings
from provisioner.kubernetes.provider import KubernetesProvider
from provisioner.kubernetes.settings import KubernetesSettings
from provisioner.slurm.provider import SlurmProvider
from provisioner.slurm.settings import SlurmSettings

PLAIN: dict[str, Any] = {
    "name": "big",
    "labels": {"zone": "a"},
    "gpus_per_node": 4,
    "resources": {"disks": 2},
    "max_nodes": 9,
    "spot": True,
    "cost_per_hour": 1.5,
}


def ecs(context: ProviderContext, **more: Any) -> Provider:
    return EcsProvider(EcsSettings(**PLAIN, **more), context, None)


def kubernetes(context: ProviderContext, **more: Any) -> Provider:
    return KubernetesProvider(KubernetesSettings(**{**PLAIN, **more}), context, None)


def slurm(context: ProviderContext, **more: Any) -> Provider:
    return SlurmProvider(SlurmSettings(**PLAIN, **more), context)


@pytest.mark.parametrize(
    ("create", "more", "changed"),
    [
        (ecs, {"keep_nodes": 3}, {"keep_nodes": 3}),
        (kubernetes, {"keep_nodes": 3}, {"keep_nodes": 3}),
        (kubernetes, {"gpus_per_node": 0, "simulated_gpus": 2}, {"gpus_per_node": 2}),
        (slurm, {"greedy": True}, {"keep_nodes": 9}),
        (slurm, {"greedy": False}, {}),
    ],
)
async def test_it_is_what_the_settings_say(create: Any, more: Any, changed: Any, tmp_path: Path) -> None:
    """PV1: every setting of the set reaches the control plane; a greedy SLURM keeps its target."""
    provider = create(ProviderContext("p1", tmp_path, "127.0.0.1:1"), **more)
    assert await provider.capability_sets() == [CapabilitySet(**{**PLAIN, **changed})]


async def test_slurm_offers_its_target_of_now(tmp_path: Path) -> None:
    """PV4: a target makes the set smaller, with room for one node more while another is replaced."""
    (tmp_path / "target").write_text("5")
    provider = slurm(ProviderContext("p1", tmp_path, "127.0.0.1:1"), surge_nodes=1)
    assert await provider.capability_sets() == [CapabilitySet(**{**PLAIN, "max_nodes": 6, "keep_nodes": 5})]
