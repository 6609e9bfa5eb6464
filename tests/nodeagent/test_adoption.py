"""Agent and control plane killed and started again: engines stay, streams finish, strays end."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

from springtide.model.enums import ReportedPhase, Want
from tests.nodeagent.fake_controlplane import FakeControlPlane, launch
from tests.nodeagent.processes import RunningAgent, alive, eventually, expected, marked, stream_words

P = ReportedPhase
SLOW = ("--decode-base-ms", "20")


async def test_killed_agent_adopts_and_the_stream_finishes(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """The shim outlives the agent: same incarnation, the running stream is exact, its count is still there."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch(*SLOW))
    before = await controlplane.until("w-1", P.READY)
    stream = asyncio.create_task(stream_words(f"http://{before.endpoint}", "long", 200))
    await eventually(lambda: controlplane.reports["w-1"].in_flight == 1)
    agent.kill()
    controlplane.reports.clear()
    controlplane.phases.clear()
    await agent.start().up()
    after = await controlplane.until("w-1", P.READY)
    assert (after.incarnation, after.endpoint, after.in_flight) == (before.incarnation, before.endpoint, 1)
    assert not {P.BOOTING, P.LOADING, P.WARMING, P.FAILED, P.STOPPED} & set(controlplane.phases["w-1"])
    words, errors, done = await stream
    assert ("".join(words), errors, done) == (expected("long", 200), [], True)
    controlplane.want("w-1", Want.STOP, 2)
    await controlplane.until("w-1", P.STOPPED, 2)
    assert not marked(agent.marker)


async def test_adoption_while_the_engine_loads(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A start that the agent's death interrupted goes on; nothing is started twice."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--startup-s", "2"))
    before = await controlplane.until("w-1", P.LOADING)
    agent.kill()
    await agent.start().up()
    after = await controlplane.until("w-1", P.READY)
    assert after.incarnation == before.incarnation
    assert sum("nodeagent.engines.sim" in line for line in marked(agent.marker).values()) == 1


async def test_adoption_without_a_control_plane(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """Last known good: an agent that finds no control plane opens what was wanted, and keeps on trying (NA13, F13)."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--startup-s", "1.5"))
    await controlplane.until("w-1", P.LOADING)
    agent.kill()
    await controlplane.stop()
    await agent.start().up()

    async def open_() -> bool:
        status = json.loads((agent.data_dir / "workers" / "w-1" / "shim.json").read_text())
        try:
            words, _, done = await stream_words(f"http://127.0.0.1:{status['port']}", "x", 3)
        except AssertionError:
            return False
        return done and "".join(words) == expected("x", 3)

    await eventually(open_)
    await controlplane.start()
    assert (await controlplane.until("w-1", P.READY)).generation == 1


async def test_control_plane_restart_changes_nothing(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA13: the session comes back by itself; a stream that was running is not touched."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch(*SLOW))
    before = await controlplane.until("w-1", P.READY)
    stream = asyncio.create_task(stream_words(f"http://{before.endpoint}", "y", 100))
    await controlplane.stop()
    words, errors, done = await stream
    assert ("".join(words), errors, done) == (expected("y", 100), [], True)
    controlplane.reports.clear()
    await controlplane.start()
    after = await controlplane.until("w-1", P.READY)
    assert after.incarnation == before.incarnation
    assert controlplane.hellos[0].session_id == controlplane.hellos[-1].session_id


async def test_shim_killed_while_the_agent_is_away(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """FAILED with SHIM_DIED, and never started again without an order."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1)
    await controlplane.until("w-1", P.READY)
    agent.kill()
    shim = next(pid for pid, line in marked(agent.marker).items() if "nodeagent.shim" in line)
    os.kill(shim, signal.SIGKILL)
    await eventually(lambda: not marked(agent.marker))
    await agent.start().up()
    failed = await controlplane.until("w-1", P.FAILED)
    assert failed.exit is not None
    assert failed.exit.reason == "SHIM_DIED"


async def test_engine_killed_while_the_agent_is_away(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """The shim keeps the status until somebody takes it."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1)
    await controlplane.until("w-1", P.READY)
    agent.kill()
    engine = next(pid for pid, line in marked(agent.marker).items() if "nodeagent.engines.sim" in line)
    os.kill(engine, signal.SIGKILL)
    await agent.start().up()
    failed = await controlplane.until("w-1", P.FAILED)
    assert failed.exit is not None
    assert (failed.exit.reason, failed.exit.signal) == ("ENGINE_KILLED", 9)
    assert not marked(agent.marker)


async def test_interrupted_stop_is_finished(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """An agent that dies during a stop stops the worker after its restart, even without a control plane."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--fault", "ignore_sigterm", stop_grace_s=3.0))
    await controlplane.until("w-1", P.READY)
    controlplane.want("w-1", Want.STOP, 2)
    await controlplane.until("w-1", P.STOPPING)
    agent.kill()
    await controlplane.stop()
    await agent.start().up()
    await eventually(lambda: not marked(agent.marker))


async def test_strays_end_and_others_are_left_alone(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """Whatever carries this node's mark and is in no ledger is ended; what carries another mark, or none, is not."""

    def sleeper(marker: str) -> "subprocess.Popen[bytes]":
        code = "import time; time.sleep(600)"
        return subprocess.Popen([sys.executable, "-c", code], env={"SPRINGTIDE_NODE": marker}, start_new_session=True)

    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1)
    before = await controlplane.until("w-1", P.READY)
    agent.kill()
    ours, foreign = sleeper(agent.marker), sleeper("another-node")
    try:
        await eventually(lambda: ours.pid in marked(agent.marker) and foreign.pid in marked("another-node"))
        await agent.start().up()
        await eventually(lambda: ours.poll() is not None)
        assert alive(foreign.pid)
        assert (await controlplane.until("w-1", P.READY)).incarnation == before.incarnation
    finally:
        for process in (ours, foreign):
            process.kill()
            process.wait()


async def test_corrupt_and_lost_ledgers(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A half-written ledger is put aside with a clear line; its engine is a stray; the agent starts it anew."""
    await agent.start().up()
    for i in (1, 2):
        controlplane.want(f"w-{i}", Want.RUN, 1, launch(gpu_ids=(f"sim{i}",)))
        await controlplane.until(f"w-{i}", P.READY)
    agent.kill()
    ledger = agent.data_dir / "workers" / "w-1" / "ledger.json"
    ledger.write_bytes(ledger.read_bytes()[:100])
    shutil.rmtree(agent.data_dir / "workers" / "w-2")
    controlplane.reports.clear()
    old = set(marked(agent.marker))
    await agent.start().up()
    assert not old & set(marked(agent.marker))
    assert "the ledger of worker w-1 cannot be read" in agent.log
    assert ledger.with_name("ledger.json.corrupt").exists()
    for i in (1, 2):
        await controlplane.until(f"w-{i}", P.READY)


async def test_full_disk_refuses_the_start_only(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A ledger that cannot be written means that nothing is started; the agent and the other workers live on."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1)
    await controlplane.until("w-1", P.READY)
    # A file where the worker's folder should be: writing fails for root too, unlike with permissions.
    (agent.data_dir / "workers" / "w-2").write_text("in the way")
    controlplane.want("w-2", Want.RUN, 1, launch(gpu_ids=("sim1",)))
    failed = await controlplane.until("w-2", P.FAILED)
    assert failed.exit is not None
    assert failed.exit.reason == "LEDGER_WRITE_FAILED"
    assert controlplane.reports["w-1"].phase is P.READY
    (agent.data_dir / "workers" / "w-2").unlink()
    controlplane.want("w-2", Want.RUN, 2, launch(gpu_ids=("sim1",)))
    await controlplane.until("w-2", P.READY, 2)
