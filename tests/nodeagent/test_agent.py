"""The agent as a real process with real shims and simulated engines, told what to do by a control plane in the test."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx2 as httpx

from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import ExitInfo, WorkerReport
from tests.nodeagent.fake_controlplane import FakeControlPlane, launch
from tests.nodeagent.processes import RunningAgent, alive, eventually, expected, marked, stream_words

P = ReportedPhase
SLOW = ("--decode-base-ms", "20")


async def _ready(cp: FakeControlPlane, agent: RunningAgent, *engine_args: str, **more: Any) -> Any:
    await agent.start().up()
    cp.want("w-1", Want.RUN, 1, launch(*engine_args, **more))
    return await cp.until("w-1", P.READY)


def _exit(report: WorkerReport) -> ExitInfo:
    assert report.exit is not None
    return report.exit


def _in_flight(cp: FakeControlPlane, n: int) -> Any:
    return lambda: cp.reports["w-1"].in_flight == n


async def test_start_serve_and_stop(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA3, NA6, NA7, NA12, NA17: hello, boot, load, warm-up, ready, load reports; a stop leaves nothing."""
    report = await _ready(controlplane, agent)
    hello = controlplane.hellos[0]
    assert [gpu.id for gpu in hello.observed.gpus] == ["sim0", "sim1", "sim2", "sim3"]
    assert hello.observed.resources["cpus"] >= 1
    words, errors, done = await stream_words(
        f"http://{report.endpoint}", "hi", 10, {"x-springtide-incarnation": str(report.incarnation)}
    )
    assert ("".join(words), errors, done) == (expected("hi", 10), [], True)
    served = await eventually(lambda: controlplane.reports["w-1"].total_served == 1 and controlplane.reports["w-1"])
    assert (served.in_flight, served.gpu_ids, served.probe_failures, served.max_in_flight) == (0, ("sim0",), 0, 256)
    await eventually(lambda: (controlplane.reports["w-1"].generation_tokens_total or 0) >= 11)
    assert (agent.data_dir / "workers" / "w-1" / "engine.log").exists()
    assert served.log_path == str(agent.data_dir / "workers" / "w-1" / "engine.log")
    assert served.launch_fingerprint
    controlplane.want("w-1", Want.STOP, 2)
    stopped = await controlplane.until("w-1", P.STOPPED, 2)
    assert (stopped.endpoint, stopped.in_flight, stopped.exit) == ("", None, None)
    assert not marked(agent.marker)
    order = [P.BOOTING, P.LOADING, P.WARMING, P.READY, P.STOPPING, P.STOPPED]
    seen = controlplane.phases["w-1"]
    assert [phase for phase in order if phase in seen] == seen


async def test_a_stopped_worker_starts_again_with_a_new_incarnation(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """The incarnation grows with each start; a STOP while it starts cancels the start."""
    first = await _ready(controlplane, agent)
    controlplane.want("w-1", Want.STOP, 2)
    await controlplane.until("w-1", P.STOPPED, 2)
    controlplane.want("w-1", Want.RUN, 3)
    second = await controlplane.until("w-1", P.READY, 3)
    assert second.incarnation > first.incarnation
    controlplane.want("w-2", Want.RUN, 1, launch("--startup-s", "60", gpu_ids=("sim1",)))
    await controlplane.until("w-2", P.LOADING)
    controlplane.want("w-2", Want.STOP, 2, kill=True)
    await controlplane.until("w-2", P.STOPPED, 2)


async def test_drain_undrain_and_pause(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A drain lets what runs finish and says when the engine is idle; it can be cancelled; pause is reported."""
    report = await _ready(controlplane, agent, *SLOW)
    stream = asyncio.create_task(stream_words(f"http://{report.endpoint}", "long", 60))
    await eventually(_in_flight(controlplane, 1))
    controlplane.want("w-1", Want.DRAIN, 2)
    draining = await controlplane.until("w-1", P.DRAINING, 2)
    assert draining.in_flight == 1
    words, errors, done = await stream
    assert ("".join(words), errors, done) == (expected("long", 60), [], True)
    await eventually(lambda: controlplane.reports["w-1"].in_flight == 0 and controlplane.reports["w-1"].engine_idle)
    controlplane.want("w-1", Want.RUN, 3)
    await controlplane.until("w-1", P.READY, 3)
    controlplane.change("w-1", paused=True, generation=4)
    await controlplane.until("w-1", P.PAUSED, 4)
    controlplane.change("w-1", paused=False, generation=5)
    assert (await controlplane.until("w-1", P.READY, 5)).incarnation == report.incarnation


async def test_drain_with_abort(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """What still runs at the deadline is cut with an explicit error."""
    report = await _ready(controlplane, agent, *SLOW)
    stream = asyncio.create_task(stream_words(f"http://{report.endpoint}", "long", 5000))
    await eventually(_in_flight(controlplane, 1))
    await eventually(lambda: (controlplane.reports["w-1"].generation_tokens_total or 0) > 5)
    controlplane.want("w-1", Want.DRAIN, 2)
    await controlplane.until("w-1", P.DRAINING, 2)
    controlplane.change("w-1", abort_in_flight=True, generation=3)
    words, errors, done = await stream
    assert "".join(words) == expected("long", len(words))
    assert ([error["type"] for error in errors], done) == (["worker_drained"], False)
    await eventually(_in_flight(controlplane, 0))


async def test_engine_killed(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA11: reported at once with signal and log; not started again until a newer generation says so."""
    report = await _ready(controlplane, agent)
    engine = next(pid for pid, line in marked(agent.marker).items() if "nodeagent.engines.sim" in line)
    os.kill(engine, signal.SIGKILL)
    failed = await controlplane.until("w-1", P.FAILED)
    assert (_exit(failed).signal, _exit(failed).reason, _exit(failed).code) == (9, "ENGINE_KILLED", None)
    assert len(_exit(failed).log_tail.encode()) <= 4096
    assert not marked(agent.marker)
    await controlplane.beats()
    assert controlplane.reports["w-1"].phase is P.FAILED
    controlplane.want("w-1", Want.RUN, 2)
    again = await controlplane.until("w-1", P.READY, 2)
    assert again.incarnation > report.incarnation


async def test_exit_code_and_log_tail(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA11: an engine that leaves during its start is FAILED with its code; the others are not touched (F30, NA5)."""
    await _ready(controlplane, agent)
    controlplane.want("w-2", Want.RUN, 1, launch("--fault", "fail_start,exit_code=42", gpu_ids=("sim1",)))
    failed = await controlplane.until("w-2", P.FAILED)
    assert (_exit(failed).code, _exit(failed).reason) == (42, "ENGINE_EXITED")
    assert controlplane.reports["w-1"].phase is P.READY
    controlplane.want("w-3", Want.RUN, 1, launch("--no-such-flag", gpu_ids=("sim2",)))
    failed = await controlplane.until("w-3", P.FAILED)
    assert "no-such-flag" in _exit(failed).log_tail


async def test_a_crash_during_warm_up_is_the_engines(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """F28, NA7: the exit code is the reason that counts, not the broken connection of the warm-up."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--fault", "crash,after_tokens=1,exit_code=3"))
    failed = await controlplane.until("w-1", P.FAILED)
    assert (_exit(failed).code, _exit(failed).reason) == (3, "ENGINE_EXITED")


async def test_a_silent_shim_has_no_known_load(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """DESIGN rule 1: what a stopped shim said long ago is unknown, not zero; it is known again when it goes on."""
    await _ready(controlplane, agent)
    shim = next(pid for pid, line in marked(agent.marker).items() if "nodeagent.shim" in line)
    os.kill(shim, signal.SIGSTOP)
    await eventually(lambda: controlplane.reports["w-1"].in_flight is None)
    assert controlplane.reports["w-1"].phase is P.READY
    os.kill(shim, signal.SIGCONT)
    await eventually(lambda: controlplane.reports["w-1"].in_flight == 0)


async def test_shim_killed(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A killed shim takes its engine with it; the worker is FAILED and its GPUs are free."""
    await _ready(controlplane, agent)
    shim = next(pid for pid, line in marked(agent.marker).items() if "nodeagent.shim" in line)
    os.kill(shim, signal.SIGKILL)
    failed = await controlplane.until("w-1", P.FAILED)
    assert _exit(failed).reason == "SHIM_DIED"
    assert not marked(agent.marker)


async def test_start_timeout(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA7: an engine that is not ready in time is ended, with whatever it started."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--startup-s", "60", "--fault", "orphans", start_timeout_s=0.5))
    failed = await controlplane.until("w-1", P.FAILED)
    assert _exit(failed).reason == "START_TIMEOUT"
    assert not marked(agent.marker)


async def test_starts_are_serialized_and_waiting_is_no_failure(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """NA5: one start at a time; the time in the queue does not count against start_timeout_s."""
    await agent.start().up()
    for i in range(3):
        controlplane.want(
            f"w-{i}", Want.RUN, 1, launch("--startup-s", "0.7", gpu_ids=(f"sim{i}",), start_timeout_s=3.0)
        )
    running = []
    while not all(report.phase is P.READY for report in controlplane.reports.values()) or len(controlplane.reports) < 3:
        phases = [report.phase for report in controlplane.reports.values()]
        assert P.FAILED not in phases
        running.append(sum(phase in (P.LOADING, P.WARMING) for phase in phases))
        await controlplane.beats(1)
    assert max(running) == 1


async def test_refused_launches(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA1, NA14, F35: what cannot run is FAILED with field, value and remedy; nothing was started."""
    await _ready(controlplane, agent)
    cases = {
        "bad-interpreter": (launch(interpreter="/opt/evil/python", gpu_ids=("sim1",)), "interpreter", "allowed"),
        "bad-engine": (_engine("nope"), "engine", "nope"),
        "bad-flag": (launch("--port", "80", gpu_ids=("sim1",)), "engine_args", "--port"),
        "absent-gpu": (launch(gpu_ids=("sim9",)), "gpu_ids", "sim9"),
        "taken-gpu": (launch(gpu_ids=("sim0",)), "gpu_ids", "w-1"),
        "wrong-size": (launch(gpu_ids=("sim1", "sim2"), tensor_parallel_size=4), "gpu_ids", "4"),
        "denied-env": (launch(gpu_ids=("sim1",), engine_env={"LD_PRELOAD": "x"}), "engine_env", "LD_PRELOAD"),
    }
    for worker_id, (of, field, value) in cases.items():
        controlplane.want(worker_id, Want.RUN, 1, of)
        failed = await controlplane.until(worker_id, P.FAILED, 1)
        assert _exit(failed).reason == "LAUNCH_REFUSED", worker_id
        assert field in _exit(failed).message, worker_id
        assert value in _exit(failed).message, worker_id
    assert controlplane.reports["w-1"].phase is P.READY
    assert sum("nodeagent.shim" in line for line in marked(agent.marker).values()) == 1


def _engine(name: str) -> Any:
    import dataclasses

    return dataclasses.replace(launch(gpu_ids=("sim1",)), engine=name)


async def test_port_range_exhausted(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA3: a clear reason, and the next attempt works when a port is free."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await agent.start("--port-first", str(port), "--port-last", str(port)).up()
        controlplane.want("w-1", Want.RUN, 1)
        failed = await controlplane.until("w-1", P.FAILED)
        assert _exit(failed).reason == "PORTS_EXHAUSTED"
        assert str(port) in _exit(failed).message
    controlplane.want("w-1", Want.RUN, 2)
    assert (await controlplane.until("w-1", P.READY, 2)).endpoint == f"127.0.0.1:{port}"


async def test_older_generations_and_foreign_stores(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """CP12, F13: an older order, an empty store, another store's STOP stop nothing; another store's RUN takes over."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 5)
    report = await controlplane.until("w-1", P.READY)
    controlplane.want("w-1", Want.STOP, 4)
    await controlplane.beats()
    controlplane.wanted.clear()
    controlplane.store_id = "store-2"
    await controlplane.beats()
    controlplane.want("w-1", Want.STOP, 9)
    await controlplane.beats()
    standing = controlplane.reports["w-1"]
    assert (standing.phase, standing.store_id, standing.generation) == (P.READY, "store-1", 5)
    controlplane.want("w-1", Want.RUN, 1)
    taken = await eventually(lambda: controlplane.reports["w-1"].store_id == "store-2" and controlplane.reports["w-1"])
    assert (taken.phase, taken.incarnation, taken.generation) == (P.READY, report.incarnation, 1)
    controlplane.want("w-1", Want.STOP, 2)
    await controlplane.until("w-1", P.STOPPED, 2)


async def test_unhealthy_engine_shows_in_reports(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """Three probes failed in a row make a worker SUSPECT: the agent counts, and does not kill."""
    await _ready(controlplane, agent)
    engine = agent.folder / "run" / "w-1.eng"
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(engine))) as client:
        await client.post("http://local/fault", json={"kind": "refuse_health"})
        await eventually(lambda: (controlplane.reports["w-1"].probe_failures or 0) >= 3)
        assert controlplane.reports["w-1"].phase is P.READY
        await client.delete("http://local/fault")
    await eventually(lambda: controlplane.reports["w-1"].probe_failures == 0)


async def test_register_again(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """CP11: an agent that is asked to register again says hello in the same session."""
    await _ready(controlplane, agent)
    controlplane.ask_again = True
    controlplane.tell()
    await eventually(lambda: len(controlplane.hellos) == 2)
    assert controlplane.hellos[0].session_id == controlplane.hellos[1].session_id


async def test_forgets_dead_workers_that_are_no_longer_wanted(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """A record without a process goes when its store no longer speaks of it; its log stays."""
    await _ready(controlplane, agent)
    controlplane.want("w-1", Want.STOP, 2)
    await controlplane.until("w-1", P.STOPPED, 2)
    controlplane.wanted.clear()
    await eventually(lambda: "w-1" not in controlplane.reports)
    folder = agent.data_dir / "workers" / "w-1"
    assert (folder / "engine.log").exists()
    assert not (folder / "ledger.json").exists()


async def test_unknown_worker_stopped(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A STOP of what the node never had is answered with STOPPED."""
    await agent.start().up()
    controlplane.want("ghost", Want.STOP, 7)
    await controlplane.until("ghost", P.STOPPED, 7)


async def test_metrics_endpoint(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """Prometheus sees workers by phase, in-flight, starts and heartbeats."""
    await agent.start("--metrics-port", "0").up()
    controlplane.want("w-1", Want.RUN, 1)
    await controlplane.until("w-1", P.READY)
    await controlplane.beats(1)
    address = json.loads((agent.data_dir / "nodeagent.json").read_text())["metrics"]
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{address}/metrics")).text
    for line in (
        'springtide_agent_workers{phase="ready",pool="pool-1"} 1.0',
        'springtide_agent_in_flight{pool="pool-1",worker="w-1"} 0.0',
        'springtide_agent_engine_starts_total{pool="pool-1"} 1.0',
        "springtide_agent_connected 1.0",
    ):
        assert line in text
    assert alive(json.loads((agent.data_dir / "nodeagent.json").read_text())["pid"])
