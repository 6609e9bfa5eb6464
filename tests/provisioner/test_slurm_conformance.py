"""The suite of all providers, and what only SLURM does, with the provider alone on a real SLURM of virtual nodes."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.context import ProviderContext
from provisioner.core.provider import Phase, ProvidedNode
from provisioner.slurm.provider import SlurmProvider
from provisioner.slurm.settings import SlurmSettings
from tests.provisioner.conformance import CHECKS, Rig
from tests.provisioner.slurm_cluster import VirtualCluster, running_cluster
from tests.system.stack import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    with running_cluster() as found:
        yield found


class SlurmRig(Rig):
    set_name = "slurm"
    most = 2

    def __init__(self, folder: Path, cluster: VirtualCluster, **settings: Any) -> None:
        self.cluster = cluster
        self._id = f"suite-{secrets.token_hex(4)}"  # slurmctld remembers the jobs of the tests before
        self._context = ProviderContext(self._id, folder, "127.0.0.1:1")
        self._settings = {
            "partition": "lowcancel",
            "gpus_per_node": 2,
            "simulated_gpus": True,
            "max_nodes": self.most,
            "greedy": False,
            "poll_interval_s": 0,
            "squeue_timeout_s": 3.0,
            "time_limit": "60",
            "data_dir": f"{folder}/agents/$SLURM_JOB_ID",
            **settings,
        }

    async def open(self) -> SlurmProvider:
        return SlurmProvider(SlurmSettings(**self._settings), self._context)

    async def real(self) -> int:
        found = self.cluster.run("squeue", "-h", "-t", "PD,CF,R,CG,S", "-o", "%j")
        return sum(name.startswith(f"springtide:{self._id}:") for name in found.splitlines())

    async def cut(self) -> bool:
        self.cluster.pause()
        return True

    async def mend(self) -> None:
        self.cluster.go_on()

    async def node(self, provider: SlurmProvider, phase: Phase) -> ProvidedNode:
        """The one node, once it is in this phase."""

        async def there() -> bool:
            return [node.phase for node in await provider.list()][-1:] == [phase]

        await self.until(there, phase.value)
        return list(await provider.list())[-1]


@pytest.fixture
async def rig(
    tmp_path: Path, cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[SlurmRig]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    found = SlurmRig(tmp_path, cluster, **getattr(request, "param", {}))
    yield found
    cluster.go_on()
    for job, state in cluster.jobs("PD,CF,R,S").items():
        cluster.run("scancel", job, check=False) if state else None
    wait_for("the end of all jobs", lambda: not cluster.jobs("PD,CF,R,CG,S"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Any, rig: SlurmRig) -> None:
    """PV1, PV4: the suite of all providers, with a slurmctld that falls silent."""
    await check(rig)


async def test_cancelled_from_outside(cluster: VirtualCluster, rig: SlurmRig) -> None:
    """PV4: an operator's scancel is an end like others, and says so."""
    provider = await rig.open()
    await provider.start(rig.order())
    node = await rig.node(provider, Phase.RUNNING)
    assert node.ends_in_s is not None
    assert 3000 < node.ends_in_s < 3600
    cluster.run("scancel", node.reference)
    assert (await rig.node(provider, Phase.ENDED)).reason == "CANCELLED"


async def test_a_job_that_waits(cluster: VirtualCluster, rig: SlurmRig) -> None:
    """PV4, CP13: PENDING with SLURM's reason; stopped before it ran."""
    cluster.run("scontrol", "update", "PartitionName=lowcancel", "State=DOWN")
    try:
        provider = await rig.open()
        order = rig.order()
        await provider.start(order)

        async def said() -> bool:
            return "(PartitionDown)" in [node.message for node in await provider.list()][-1]

        await rig.until(said, "SLURM's reason")
        assert (await rig.node(provider, Phase.PENDING)).ends_in_s is None
        await provider.stop(order.group_id, order.node_ids)
        assert (await rig.node(provider, Phase.ENDED)).reason == "RELEASED"
    finally:
        cluster.run("scontrol", "update", "PartitionName=lowcancel", "State=UP")


@pytest.mark.parametrize("rig", [{"partition": "low", "requeue": True, "preempt_grace_s": 6}], indirect=True)
async def test_a_requeued_job_is_the_same_node(cluster: VirtualCluster, rig: SlurmRig) -> None:
    """PV4: where a site requeues preempted jobs, the same job comes again as the same node, and is not doubled."""
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    before = await rig.node(provider, Phase.RUNNING)
    cluster.run("scontrol", "requeue", before.reference)
    await rig.node(provider, Phase.PENDING)
    await provider.start(order)

    async def runs() -> bool:  # slurmctld may put the start off once more when it has cleaned up
        cluster.run("scontrol", "update", f"JobId={before.reference}", "StartTime=now", check=False)
        return [node.phase for node in await provider.list()] == [Phase.RUNNING]

    await rig.until(runs, "the job again")
    again = await rig.node(provider, Phase.RUNNING)
    assert (again.reference, again.node_id) == (before.reference, before.node_id)
    assert "started 2 times" in again.message
    assert await rig.real() == 1
