"""The provider `slurm` against fake commands: what hangs, fails, lies or forgets never costs a job or doubles one."""

import asyncio
import contextlib
import json
import os
import pwd
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.context import ProviderContext
from provisioner.core.provider import GroupOrder, OutcomeUnknown, Phase, ProvidedNode, Refused
from provisioner.slurm.provider import ENDED_RETENTION_S, SlurmProvider
from provisioner.slurm.settings import SlurmSettings
from springtide.clock import ManualClock

SECRET = "join-token-of-this-test"


class FakeSlurm:
    """The folder of fake_slurm.py: its jobs, its faults, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults()

    def faults(self, **by_command: dict[str, Any]) -> None:
        (self.folder / "faults.json").write_text(json.dumps(by_command))

    def calls(self, name: str) -> list[list[str]]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call[1:] for call in map(json.loads, lines) if call[0] == name]

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("*.job"))}

    def change(self, job_id: str, **fields: Any) -> None:
        path = self.folder / f"{job_id}.job"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def forget(self, job_id: str) -> None:
        (self.folder / f"{job_id}.job").unlink()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    tools, folder = tmp_path / "bin", tmp_path / "slurm"
    tools.mkdir()
    folder.mkdir()
    source = Path(__file__).with_name("fake_slurm.py").read_text()
    for name in ("sbatch", "squeue", "scancel"):
        (tools / name).write_text(f"#!{sys.executable} -IS\n{source}")
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("SPRINGTIDE_TOKEN", "operators-token")
    return FakeSlurm(folder)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(2_000_000_000.0)


@pytest.fixture
def make(tmp_path: Path, slurm: FakeSlurm, clock: ManualClock) -> Callable[..., SlurmProvider]:
    """A provisioner process's provider; called again it is the next process of the same id."""

    def provider(provisioner_id: str = "hpc", **settings: Any) -> SlurmProvider:
        folder = tmp_path / provisioner_id
        folder.mkdir(exist_ok=True)
        wanted = {"poll_interval_s": 0.1, "settle_s": 15.0, "max_nodes": 4, **settings}
        context = ProviderContext(provisioner_id, folder, "10.0.0.1:7400")
        return SlurmProvider(SlurmSettings(**wanted), context, clock=clock.now)

    return provider


def order(group: str = "g-1", *nodes: str) -> GroupOrder:
    return GroupOrder(group, "slurm", nodes or (f"{group}-n",), join_token=SECRET)


async def listed(provider: SlurmProvider, clock: ManualClock) -> dict[str, ProvidedNode]:
    clock.advance(1.0)
    return {node.node_id: node for node in await provider.list()}


async def test_an_order_is_one_job_with_all_settings(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """PV4, PV7: qos, partition, account, time, constraint, exclusive, extra flags and the warning reach sbatch."""
    provider = make(
        partition="h200",
        qos="h200_lowest",
        account="dream",
        time_limit="24:00:00",
        constraint="a|b",
        gpus_per_node=4,
        gpu_type="h200",
        slurm_extra="--mem=0; --nice=100",
        notice_s=120,
    )
    await provider.start(order())
    await provider.start(order())
    (options,) = slurm.calls("sbatch")
    wanted = "--partition=h200 --qos=h200_lowest --account=dream --time=24:00:00 --constraint=a|b --gres=gpu:h200:4"
    assert {*wanted.split(), "--exclusive", "--no-requeue", "--mem=0", "--nice=100"} <= set(options)
    assert "--signal=B:TERM@120" in options
    assert "--comment=springtide:hpc:g-1:g-1-n" in options
    node = (await listed(provider, clock))["g-1-n"]
    assert (node.phase, node.group_id, node.reference) == (Phase.PENDING, "g-1", "101")


async def test_secrets_are_in_the_jobs_environment_alone(make: Any, slurm: FakeSlurm) -> None:
    """PV4: the join token is in no argument and no script; the provisioner's own token does not travel."""
    await make().start(order())
    env = json.loads((slurm.folder / "101.env").read_text())
    assert env["SPRINGTIDE_TOKEN"] == SECRET
    assert env["SPRINGTIDE_ADDRESS"] == "10.0.0.1:7400"
    assert SECRET not in str(slurm.calls("sbatch")) + (slurm.folder / "101.script").read_text()
    assert "operators-token" not in str(env)


@pytest.mark.parametrize(
    "fault",
    [
        {"hang_after": True},
        {"says": "sbatch: warning"},
        {"exit": [1, "Socket timed out"]},
        {
            "exit": [
                1,
                "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            ]
        },
        {"exit": [1, "sbatch: error: Zero Bytes were transmitted or received"]},
    ],
)
async def test_an_unknown_outcome_is_looked_up(
    make: Any, slurm: FakeSlurm, clock: ManualClock, fault: dict[str, Any]
) -> None:
    """PV1, PV7: an sbatch that may have worked is not repeated: its job is found, or waited for and then repeated."""
    came = "hang_after" in fault
    provider = make(sbatch_timeout_s=3.0 if came else 30.0)  # only what hangs is to meet its bound
    slurm.faults(sbatch=fault)
    with pytest.raises(OutcomeUnknown):
        await provider.start(order())
    slurm.faults()
    if not came:
        with pytest.raises(OutcomeUnknown, match="shows in a moment"):
            await provider.start(order())
        assert len(slurm.calls("sbatch")) == 1
        clock.advance(120.0)
    await provider.start(order())
    assert len(slurm.calls("sbatch")) == (1 if came else 2)
    assert len(slurm.jobs()) == 1


async def test_a_hanging_command_leaves_no_process(make: Any, slurm: FakeSlurm) -> None:
    """PV7: slurmctld away: each call is bounded, and what hangs is killed."""
    slurm.faults(sbatch={"hang_before": True}, squeue={"hang_before": True})
    provider = make(squeue_timeout_s=0.3)
    with pytest.raises(OutcomeUnknown, match="squeue did not answer within"):
        await provider.list()
    with pytest.raises(OutcomeUnknown):
        await provider.start(order())
    assert slurm.calls("sbatch") == []
    assert _processes(slurm) == []


def _processes(slurm: FakeSlurm) -> list[str]:
    mark = f"FAKE_SLURM={slurm.folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes() and process.name != str(os.getpid()):
                found.append((process / "cmdline").read_text())
    return found


async def test_a_refusal_is_one(make: Any, slurm: FakeSlurm) -> None:
    """PV7, CP15: what sbatch refuses for sure is refused at once, with its words, and may be ordered again."""
    provider = make()
    slurm.faults(sbatch={"exit": [1, "sbatch: error: invalid partition specified: h300"]})
    with pytest.raises(Refused, match="invalid partition specified: h300") as refused:
        await provider.start(order())
    assert refused.value.status == "WORKER_GROUP_TOO_MUCH"
    slurm.faults()
    await provider.start(order())
    assert len(slurm.jobs()) == 1


async def test_the_cap_and_the_target(make: Any, slurm: FakeSlurm, tmp_path: Path) -> None:
    """PV4: never more than max_nodes; the greedy target may be changed while it runs, a bad one is not followed."""
    provider = make(max_nodes=2, surge_nodes=0)
    await provider.start(order("g-1", "a", "b"))
    with pytest.raises(Refused, match="2 is the most"):
        await provider.start(order("g-2", "c"))
    target = tmp_path / "hpc" / "target"
    for text, expected in (("1\n", 1), ("0", 0), ("9", 2), ("-3", 0), ("many", 2)):
        target.write_text(text)
        (offer,) = await provider.capability_sets()
        assert (offer.keep_nodes, offer.max_nodes) == (expected, expected), text
    slurm.change("101", job_state="NODE_FAIL")
    await provider.start(order("g-2", "c"))
    assert len(slurm.jobs()) == 3


async def test_json_that_is_none_is_not_read(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """PV7: without --json, or with garbage there, the plain form counts; garbage in both is no answer."""
    await make().start(order())
    for fault in ({"no_json": True}, {"says": "{]"}, {"says": '{"jobs": 3}'}):
        provider = make()
        slurm.faults(squeue=fault)
        if "no_json" in fault:
            assert (await listed(provider, clock))["g-1-n"].reference == "101"
            slurm.change("101", job_state="RUNNING")
            node = (await listed(provider, clock))["g-1-n"]
            assert node.phase is Phase.RUNNING
            assert node.ends_in_s == 59 * 60 + 30 - 60
        else:
            with pytest.raises(OutcomeUnknown, match="not understood"):
                await provider.list()
    slurm.faults(squeue={"exit": [1, "slurm_load_jobs error: Unable to contact slurm controller"]})
    with pytest.raises(OutcomeUnknown, match="Unable to contact"):
        await make().list()


async def test_a_new_process_adopts_and_orders_nothing_twice(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """CP10, PV4: jobs are found by their mark, those of another provisioner are not; names do where comments go."""
    await make().start(order("g-1", "a", "b"))
    await make("other").start(order("g-9", "z"))
    slurm.change("102", comment="")
    again = make()
    await again.start(order("g-1", "a", "b"))
    assert sorted(await listed(again, clock)) == ["a", "b"]
    assert len(slurm.calls("sbatch")) == 3


async def test_killed_between_sbatch_and_its_answer(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """CP10: the next process does not repeat an order that may still be on its way, and repeats one that is not."""
    slurm.faults(sbatch={"says": ""})
    with pytest.raises(OutcomeUnknown):
        await make().start(order())
    slurm.faults()
    again = make()
    with pytest.raises(OutcomeUnknown, match="shows in a moment"):
        await again.start(order())
    with pytest.raises(OutcomeUnknown):
        await again.stop("g-1", ["g-1-n"])
    clock.advance(60.0)
    await again.start(order())
    assert list(slurm.jobs()) == ["101"]


async def test_two_jobs_of_one_node_become_one(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """CP10: the younger is cancelled; one that runs goes before one that waits."""
    provider = make()
    await provider.start(order())
    slurm.folder.joinpath("205.job").write_text(json.dumps({**slurm.jobs()["101"], "job_id": 205}))
    assert (await listed(provider, clock))["g-1-n"].reference == "101"
    assert slurm.calls("scancel") == [["205"]]
    slurm.change("101", job_state="PENDING")
    slurm.folder.joinpath("206.job").write_text(
        json.dumps({**slurm.jobs()["101"], "job_id": 206, "job_state": "RUNNING", "start_time": clock.now()})
    )
    assert (await listed(provider, clock))["g-1-n"].reference == "206"
    assert slurm.calls("scancel")[-1] == ["101"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_unit_whose_second_job_is_refused_is_completed_by_the_next_start(
    make: Any, slurm: FakeSlurm, clock: ManualClock, restarted: bool
) -> None:
    """CP15, PV7: the first node's job is found and kept, whoever starts again; the second one is submitted."""
    slurm.faults(sbatch={"only": ":g-1:b", "exit": [1, "sbatch: error: Job violates accounting/QOS policy"]})
    provider = make()
    with pytest.raises(Refused, match="QOS policy"):
        await provider.start(order("g-1", "a", "b"))
    assert list(await listed(provider, clock)) == ["a"]
    slurm.faults()
    again = make() if restarted else provider
    for _ in range(2):
        await again.start(order("g-1", "a", "b"))
    assert sorted(await listed(again, clock)) == ["a", "b"]
    assert len(slurm.jobs()) == 2


async def test_a_unit_whose_first_job_ended_meanwhile_is_submitted_again(
    make: Any, slurm: FakeSlurm, clock: ManualClock
) -> None:
    """CP15, PV7: its first job ended while the second one was refused: a start that is repeated starts both nodes, and
    the one that ended is not taken for the new one, which is the same node."""
    slurm.faults(sbatch={"only": ":g-1:b", "exit": [1, "sbatch: error: Job violates accounting/QOS policy"]})
    provider = make()
    with pytest.raises(Refused):
        await provider.start(order("g-1", "a", "b"))
    slurm.change("101", job_state="FAILED")
    assert (await listed(provider, clock))["a"].phase is Phase.ENDED
    slurm.faults()
    for _ in range(3):
        await provider.start(order("g-1", "a", "b"))
        await make().start(order("g-1", "a", "b"))
    for found in (await listed(provider, clock), await listed(make(), clock)):
        assert {key: (node.phase, node.reference) for key, node in found.items()} == {
            "a": (Phase.PENDING, "102"),
            "b": (Phase.PENDING, "103"),
        }
    assert len(slurm.jobs()) == 3


async def test_a_second_submission_that_is_not_sure_is_looked_up(
    make: Any, slurm: FakeSlurm, clock: ManualClock
) -> None:
    """PV7: the job that ended is not taken for the answer to whether the new one was submitted; a refused one leaves
    the end as it was."""
    provider = make()
    await provider.start(order())
    slurm.change("101", job_state="FAILED")
    await listed(provider, clock)
    slurm.faults(sbatch={"exit": [1, "sbatch: error: Job violates accounting/QOS policy"]})
    with pytest.raises(Refused):
        await provider.start(order())
    assert (await listed(provider, clock))["g-1-n"].reference == "101"
    slurm.faults(sbatch={"says": ""})
    with pytest.raises(OutcomeUnknown):
        await provider.start(order())
    slurm.faults()
    clock.advance(1.0)
    with pytest.raises(OutcomeUnknown, match="shows in a moment"):
        await provider.start(order())
    assert len(slurm.jobs()) == 1
    clock.advance(60.0)
    await provider.start(order())
    assert (await listed(provider, clock))["g-1-n"].reference == "102"


async def test_stop_cancels_once_and_for_good(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """CP15, PV4: NOT_FOUND, SHUTDOWN and NOT_SPECIFIED; an scancel that fails is not known; a repeat is no error."""
    provider = make()
    await provider.start(order("g-1", "a", "b"))
    for group, status in (("g-7", "WORKER_GROUP_ID_NOT_FOUND"), ("", "WORKER_GROUP_ID_NOT_SPECIFIED")):
        with pytest.raises(Refused) as refused:
            await provider.stop(group, [])
        assert refused.value.status == status
    slurm.faults(scancel={"exit": [1, "scancel: error: Kill job error"]})
    with pytest.raises(OutcomeUnknown, match="Kill job error"):
        await provider.stop("g-1", ["a", "b"])
    slurm.faults()
    await provider.stop("g-1", ["a", "b"])
    await provider.stop("g-1", ["a", "b"])
    assert [job["job_state"] for job in slurm.jobs().values()] == ["CANCELLED", "CANCELLED"]
    nodes = await listed(provider, clock)
    assert {node.reason for node in nodes.values()} == {"RELEASED"}
    with pytest.raises(Refused) as refused:
        await provider.start(order("g-1", "a", "b"))
    assert refused.value.status == "WORKER_GROUP_SHUTDOWN"


async def test_silence_is_not_absence(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """PV7, CP12: a squeue that fails changes nothing; a job that a good listing no longer shows has ended."""
    provider = make()
    await provider.start(order())
    slurm.change("101", job_state="RUNNING", start_time=clock.now())
    assert (await listed(provider, clock))["g-1-n"].phase is Phase.RUNNING
    slurm.faults(squeue={"exit": [1, "slurm_load_jobs error"]})
    clock.advance(1.0)
    with pytest.raises(OutcomeUnknown):
        await provider.list()
    slurm.faults()
    assert (await listed(provider, clock))["g-1-n"].phase is Phase.RUNNING
    slurm.forget("101")
    node = (await listed(provider, clock))["g-1-n"]
    assert (node.phase, node.reason) == (Phase.ENDED, "GONE")
    clock.advance(ENDED_RETENTION_S)
    assert await listed(provider, clock) == {}


async def test_squeue_is_asked_no_more_than_it_is_told(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """Ten looks within the poll interval are one question to slurmctld."""
    provider = make(poll_interval_s=10.0)
    for _ in range(10):
        await provider.list()
    assert len(slurm.calls("squeue")) == 1
    clock.advance(10.0)
    await provider.list()
    assert len(slurm.calls("squeue")) == 2


async def test_a_listing_that_began_before_a_job_does_not_end_it(
    make: Any, slurm: FakeSlurm, clock: ManualClock
) -> None:
    """PV7: squeue and sbatch at the same time: what squeue could not know yet is not gone."""
    provider = make()
    await provider.list()
    clock.advance(1.0)
    slurm.faults(squeue={"wait_for": "go"})
    looking = asyncio.create_task(provider.list())
    while len(slurm.calls("squeue")) < 2:
        await asyncio.sleep(0.01)
    await provider.start(order())
    (slurm.folder / "101.job").rename(slurm.folder / "101.hidden")
    (slurm.folder / "go").touch()
    (node,) = await looking
    assert (node.node_id, node.phase) == ("g-1-n", Phase.PENDING)
    (slurm.folder / "101.hidden").rename(slurm.folder / "101.job")
    slurm.faults()
    assert (await listed(provider, clock))["g-1-n"].phase is Phase.PENDING


async def test_whose_jobs_are_asked_for_is_resolved_once(
    make: Any, slurm: FakeSlurm, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PV4: a directory service that is asked for each listing would hold the event loop each time."""
    asked: list[int] = []
    root = pwd.getpwuid(0)

    def getpwuid(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        return root

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    provider = make()
    for _ in range(5):
        await listed(provider, clock)
    calls = slurm.calls("squeue")
    assert len(calls) == 5
    assert all("--user=root" in call for call in calls)
    assert len(asked) == 1


@pytest.mark.parametrize("faults", [{}, {"squeue": {"no_json": True}}], ids=["json", "plain"])
async def test_a_uid_without_a_name_has_its_jobs(
    make: Any, slurm: FakeSlurm, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any]
) -> None:
    """PV4: in a container our uid may have no name, and squeue refuses such a uid: all jobs are asked for, and one of
    another user with the same mark is not ours."""

    def getpwuid(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    slurm.faults(**faults)
    provider = make()
    await provider.start(order("g-1"))
    await provider.start(order("g-2"))
    slurm.change("102", user_id=os.getuid() + 1)
    again = make()
    assert list(await listed(again, clock)) == ["g-1-n"]
    assert not [call for call in slurm.calls("squeue") if any(option.startswith("--user") for option in call)]


async def test_a_new_order_needs_no_look_of_its_own(make: Any, slurm: FakeSlurm, clock: ManualClock) -> None:
    """Sixteen orders are sixteen calls of sbatch, and no sixteen of squeue."""
    provider = make(max_nodes=16)
    await provider.list()
    for number in range(8):
        await provider.start(order(f"g-{number}"))
    assert len(slurm.calls("squeue")) == 1
    assert len(slurm.calls("sbatch")) == 8
    await provider.stop("g-3", ["g-3-n"])
    assert len(slurm.calls("squeue")) == 1
