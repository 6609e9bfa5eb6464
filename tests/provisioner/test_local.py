"""Provider `local` with real agents on this host."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from provisioner import local
from provisioner.context import ProviderContext
from provisioner.core.provider import GroupOrder, Phase, Refused
from provisioner.local import MARK, Local
from springtide import processes
from tests.provisioner.conformance import CHECKS, TOKEN, Rig


class LocalRig(Rig):
    set_name = "std"
    most = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = ProviderContext("p1", folder, "127.0.0.1:1")

    async def open(self) -> Local:
        kinds = [{"name": "std", "max_nodes": self.most, "gpus_per_node": 2, "labels": {"zone": "a"}}]
        return local.create({"sets": kinds, "stop_timeout_s": 5}, self.context)

    async def real(self) -> int:
        return len(self.agents())

    def agents(self) -> list[processes.ProcessIdentity]:
        """Processes of agents that carry the mark of this folder, whoever started them."""
        found: list[processes.ProcessIdentity] = []
        for entry in (self.folder / "ledger").glob("*.json"):
            mark = f"{(self.folder / 'ledger').resolve()}/{entry.stem}"
            found += (agent for agent, _ in processes.with_variable(MARK, mark, "nodeagent"))
        return found


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[LocalRig]:
    folder = tmp_path / "provider"
    folder.mkdir()
    found = LocalRig(folder)
    yield found
    for agent in found.agents():
        processes.kill(agent)
        processes.reap(agent.pid)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check, rig: LocalRig) -> None:
    """PV1, PV3: the suite of all providers."""
    await check(rig)


async def test_the_cap_holds(rig: LocalRig) -> None:
    """PV1: a third node of two is refused, whoever asks."""
    provider = await rig.open()
    for _ in range(2):
        await provider.start(rig.order())
    with pytest.raises(Refused) as refused:
        await provider.start(rig.order())
    assert refused.value.status == "WORKER_GROUP_TOO_MUCH"
    assert await rig.real() == 2


async def test_an_agent_that_dies_is_started_again_and_one_that_was_begun_is_found(rig: LocalRig) -> None:
    """PV3, CP10: kill -9 of an agent brings it back; a process that died between spawn and ledger is found by its mark,
    not started twice."""
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    (agent,) = rig.agents()
    os.kill(agent.pid, signal.SIGKILL)

    async def replaced() -> bool:
        await provider.list()
        now = rig.agents()
        return len(now) == 1 and now[0].pid != agent.pid

    await rig.until(replaced, "the agent started again")
    path = rig.folder / "ledger" / f"{order.group_id}.json"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "agent": None}))  # as if the spawn had not been written down
    before = rig.agents()
    again = await rig.open()
    (node,) = await again.list()
    assert node.phase is Phase.RUNNING
    assert rig.agents() == before, "found, not started"


def _proc(agent: processes.ProcessIdentity, name: str) -> bytes:
    return Path(f"/proc/{agent.pid}/{name}").read_bytes()


async def test_the_token_is_in_no_argv_and_in_no_log(rig: LocalRig) -> None:
    """Rule 13: it is in the environment, and in a ledger of mode 0600."""
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    (agent,) = rig.agents()
    assert TOKEN.encode() not in _proc(agent, "cmdline")
    assert TOKEN.encode() in _proc(agent, "environ")
    ledger = rig.folder / "ledger" / f"{order.group_id}.json"
    assert ledger.stat().st_mode & 0o077 == 0
    log = rig.folder / "nodes" / order.group_id / "agent.log"

    async def says_something() -> bool:
        return log.stat().st_size > 0

    await rig.until(says_something, "a line in the agent's log")
    await asyncio.sleep(0)
    assert TOKEN not in log.read_text()


async def test_the_log_of_an_agent_is_bounded(rig: LocalRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """PV3, rule 10: an agent writes for months into one file; the newest lines are kept, and it writes on."""
    monkeypatch.setattr(local, "MAX_LOG_BYTES", 20_000)
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    folder = rig.folder / "nodes" / order.group_id
    path = folder / local.AGENT_LOG
    with path.open("ab") as writer:  # as its agent does
        for line in range(10_000):
            writer.write(b"line %d\n" % line)
        writer.flush()
        await provider.list()
        assert path.stat().st_size < 20_000
        writer.write(b"after\n")
    said = path.read_text()
    assert "line 9999\n" in said
    assert said.splitlines()[0] == "[older lines were dropped]"
    assert "after\n" in said
    assert [found.name for found in folder.glob("*.log*")] == [local.AGENT_LOG]


async def test_devices_are_shared_out(tmp_path: Path) -> None:
    """PV3: each node gets GPUs of its own, and no more nodes than there are GPUs for."""
    folder = tmp_path / "provider"
    folder.mkdir()
    kinds = [{"name": "real", "max_nodes": 9, "gpus_per_node": 2, "devices": ["0", "1", "2", "3", "4"]}]
    provider = local.create({"sets": kinds}, ProviderContext("p1", folder, "127.0.0.1:1"))
    (found,) = await provider.capability_sets()
    assert found.max_nodes == 2


async def test_devices_that_another_set_has_are_not_given_again(tmp_path: Path) -> None:
    """PV3: two sets over the same GPUs: a node without a GPU of its own is refused, not started with simulated ones."""
    folder = tmp_path / "provider"
    folder.mkdir()
    kinds = [{"name": name, "gpus_per_node": 2, "devices": ["0", "1"]} for name in ("one", "other")]
    settings = {"sets": kinds, "python": str(tmp_path / "none")}
    provider = local.create(settings, ProviderContext("p1", folder, "127.0.0.1:1"))
    await provider.start(GroupOrder("g-1", "one", ("g-1",)))
    with pytest.raises(Refused, match="0 devices of other are free"):
        await provider.start(GroupOrder("g-2", "other", ("g-2",)))


async def test_an_agent_that_cannot_be_started_is_given_up_and_blocks_no_other(rig: LocalRig) -> None:
    """PV1: an interpreter that is not there: every look still answers, and the node ends with the cause."""
    kinds = [{"name": "std", "max_nodes": 2, "gpus_per_node": 1}]
    provider = local.create({"sets": kinds, "python": str(rig.folder / "no-python")}, rig.context)
    await provider.start(GroupOrder("g-1", "std", ("g-1",)))
    looks = [next(iter(await provider.list())) for _ in range(8)]
    assert looks[0].phase is Phase.RUNNING
    assert (looks[-1].phase, looks[-1].reason) == (Phase.ENDED, "NODE_FAIL")
    assert "no-python" in looks[-1].message


async def test_an_order_that_comes_in_the_middle_of_a_look_stands(rig: LocalRig) -> None:
    """PV3: a node that is given back while the nodes are looked at is not started again by that look."""
    provider = await rig.open()
    first, second = rig.order(), rig.order()
    await provider.start(first)
    await provider.start(second)
    agents = rig.agents()
    for agent in agents:
        processes.kill(agent)

    async def dead() -> bool:
        return not any(processes.lives(agent) for agent in agents)

    await rig.until(dead, "both agents dead")
    look = asyncio.create_task(provider.list())
    await asyncio.sleep(0)  # the first node was looked at
    await provider.stop(second.group_id, second.node_ids)
    phases = {node.group_id: node.phase for node in await look}
    assert phases == {first.group_id: Phase.RUNNING, second.group_id: Phase.ENDED}
