"""How an agent leaves: drained for good, or with its shims left alone; and what keeps it from starting."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from springtide.model.enums import ReportedPhase, Want
from tests.nodeagent.fake_controlplane import FakeControlPlane, launch
from tests.nodeagent.processes import RunningAgent, eventually, expected, marked, stream_words

P = ReportedPhase
SLOW = ("--decode-base-ms", "20")


async def _serving(cp: FakeControlPlane, agent: RunningAgent, *flags: str) -> Any:
    await agent.start(*flags).up()
    cp.want("w-1", Want.RUN, 1, launch(*SLOW))
    return await cp.until("w-1", P.READY)


async def test_drain_is_announced_and_the_control_plane_drains(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """CM9, NA10: SIGTERM announces, lets the control plane drain, says goodbye, exits 0; the stream finishes."""
    report = await _serving(controlplane, agent)
    stream = asyncio.create_task(stream_words(f"http://{report.endpoint}", "z", 100))
    await eventually(lambda: controlplane.reports["w-1"].in_flight == 1)
    agent.signal(signal.SIGTERM)
    assert 0 < await eventually(lambda: controlplane.stopping) <= 60
    controlplane.want("w-1", Want.DRAIN, 2)
    await controlplane.until("w-1", P.DRAINING, 2)
    words, errors, done = await stream
    assert ("".join(words), errors, done) == (expected("z", 100), [], True)
    controlplane.want("w-1", Want.STOP, 3)
    assert await agent.exited() == 0
    assert controlplane.goodbyes == ["stopped"]
    assert controlplane.reports["w-1"].phase is P.STOPPED
    assert not marked(agent.marker)
    assert not (agent.data_dir / "nodeagent.json").exists()


async def test_a_stop_without_a_control_plane_drains_by_itself(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """Nobody says how, so the agent does: the shim refuses, the stream finishes, everything ends, exit 0."""
    report = await _serving(controlplane, agent)
    stream = asyncio.create_task(stream_words(f"http://{report.endpoint}", "z", 200))
    await eventually(lambda: controlplane.reports["w-1"].in_flight == 1)
    await controlplane.stop()
    agent.signal(signal.SIGTERM)
    words, errors, done = await stream
    assert ("".join(words), errors, done) == (expected("z", 200), [], True)
    assert await agent.exited() == 0
    assert not marked(agent.marker)


async def test_a_stop_is_bounded(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A control plane that never drains does not keep the node; the stream is cut with an error, never silently."""
    report = await _serving(controlplane, agent, "--stop-timeout-s", "0.5")
    stream = asyncio.create_task(stream_words(f"http://{report.endpoint}", "z", 5000))
    await eventually(lambda: (controlplane.reports["w-1"].generation_tokens_total or 0) > 5)
    agent.signal(signal.SIGTERM)
    assert await agent.exited() == 0
    _, errors, done = await stream
    assert len(errors) == 1
    assert not done
    assert not marked(agent.marker)


async def test_leave_keeps_engines_and_sigusr1_drains(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """stop_action = leave: a restart of the unit leaves shims alone. SIGUSR1 is the stop for good."""
    before = await _serving(controlplane, agent, "--stop-action", "leave")
    agent.signal(signal.SIGTERM)
    assert await agent.exited() == 0
    assert marked(agent.marker)
    assert controlplane.goodbyes == []
    await agent.start("--stop-action", "leave").up()
    assert (await controlplane.until("w-1", P.READY)).incarnation == before.incarnation
    await controlplane.beats()
    agent.signal(signal.SIGUSR1)
    await eventually(lambda: controlplane.stopping)
    controlplane.want("w-1", Want.STOP, 2)
    assert await agent.exited() == 0
    assert not marked(agent.marker)


async def test_second_signal_leaves_at_once(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """An operator who does not want to wait; engines stay, and the next agent adopts them."""
    await _serving(controlplane, agent)
    agent.signal(signal.SIGTERM)
    await eventually(lambda: controlplane.stopping)
    agent.signal(signal.SIGINT)
    assert await agent.exited() == 0
    assert marked(agent.marker)
    assert controlplane.goodbyes == [], "a goodbye says that nothing is left"


async def test_one_signal_given_twice_is_one(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA10: a batch system signals every process, and its script passes the signal on: the drain goes on."""
    await _serving(controlplane, agent)
    agent.signal(signal.SIGTERM)
    await eventually(lambda: controlplane.stopping)
    agent.signal(signal.SIGTERM)
    controlplane.want("w-1", Want.STOP, 2)
    assert await agent.exited() == 0
    assert not marked(agent.marker)
    assert controlplane.goodbyes != []


async def test_one_agent_per_data_dir(controlplane: FakeControlPlane, agent: RunningAgent, tmp_path: Path) -> None:
    """A second agent on the folder ends with 2 and one line that names field, value and remedy."""
    await agent.start().up()
    second = RunningAgent(agent.folder, controlplane.address)
    first, agent.process = agent.process, None
    discovery = (agent.data_dir / "nodeagent.json").read_text()
    second.start()
    try:
        assert await second.exited() == 2
    finally:
        agent.process = first
    (agent.data_dir / "nodeagent.json").write_text(discovery)
    assert "data_dir" in agent.log
    assert "another agent" in agent.log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", "0.0.0.0", "--advertised-host", "gpu7"), ("host", "insecure")),
        (("--host", "0.0.0.0", "--insecure"), ("advertised_host", "0.0.0.0")),
        (("--port-first", "5000", "--port-last", "4000"), ("port_last", "4000")),
        (("--controlplane", "nonsense"), ("controlplane", "nonsense")),
        (("--parallel-starts", "0"), ("parallel_starts", "0")),
        (("--node-id", "not a name"), ("node_id", "not a name")),
        (("--stop-action", "explode"), ("stop_action", "explode")),
        (("--config", "/nowhere.toml"), ("config", "/nowhere.toml")),
    ],
)
async def test_bad_settings_are_named(agent: RunningAgent, flags: tuple[str, ...], words: tuple[str, str]) -> None:
    """Exit code 2 and one line that names the field and the value."""
    agent.start(*flags)
    assert await agent.exited() == 2
    last = agent.log.strip().splitlines()[-1]
    assert all(word in last for word in words), last


async def test_unknown_key_and_full_file(agent: RunningAgent, controlplane: FakeControlPlane) -> None:
    """Unknown keys are errors with a suggestion; a whole file is taken."""
    path = agent.folder / "agent.toml"
    path.write_text("paralel_starts = 2\n")
    agent.start("--config", str(path))
    assert await agent.exited() == 2
    assert "parallel_starts" in agent.log
    path.write_text(
        'node_id = "n-7"\nparallel_starts = 2\nlabels = { zone = "a" }\nresources = { fpga = 2 }\n'
        '[launch]\nallowed_interpreters = ["/opt/*/bin/python"]\ninterpreters = { vllm = "/opt/v/bin/python" }\n'
    )
    await agent.start("--config", str(path), "--labels", "rack=7").up()
    await eventually(lambda: controlplane.hellos)
    hello = controlplane.hellos[0]
    assert (hello.node_id, dict(hello.observed.labels)) == ("n-7", {"rack": "7"})
    assert hello.observed.resources["fpga"] == 2


async def test_node_id_is_kept(agent: RunningAgent, controlplane: FakeControlPlane) -> None:
    """A node without a configured name keeps the one that it made; each process has a session id of its own."""
    await agent.start().up()
    await eventually(lambda: len(controlplane.hellos) == 1)
    agent.kill()
    await agent.start().up()
    await eventually(lambda: len(controlplane.hellos) == 2)
    first, second = controlplane.hellos
    assert first.node_id == second.node_id
    assert first.session_id != second.session_id
