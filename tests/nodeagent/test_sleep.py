"""A real agent, shim and engine: sleep, wake, weights, verbs, and what becomes of them when something dies (F42)."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nodeagent.changes import ChangeFailed, Changes
from nodeagent.core.converge import KnownWorker, Verdict, converge
from nodeagent.engines.registry import engine_adapter
from springtide.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import ReportedPhase, Want
from tests.nodeagent.fake_controlplane import FakeControlPlane, launch
from tests.nodeagent.processes import RunningAgent, eventually, expected, marked, stream_words, unix_call

P = ReportedPhase
MIB = 1024 * 1024
MEMORY = ("--memory-mb", "96")


def engine_pid(agent: RunningAgent) -> int:
    """The one engine process of this agent; its guard and shim are others."""
    found = [pid for pid, line in marked(agent.marker).items() if "nodeagent.engines.sim" in line]
    assert len(found) == 1, found
    return found[0]


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ledger(agent: RunningAgent, worker_id: str = "w-1") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((agent.data_dir / "workers" / worker_id / "ledger.json").read_text())
    return found


async def engine_says(agent: RunningAgent, path: str, method: str = "GET", body: Any = None) -> Any:
    endpoint = ledger(agent)["engine_endpoint"].removeprefix("unix:")
    return (await unix_call(Path(endpoint), method, path, body)).json()


async def asleep(controlplane: FakeControlPlane, agent: RunningAgent, *flags: str) -> Any:
    """A worker that is served from and put to sleep."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch(*MEMORY, *flags))
    await controlplane.until("w-1", P.READY)
    controlplane.want("w-1", Want.DRAIN, 2)
    await controlplane.until("w-1", P.DRAINING, 2)
    controlplane.want("w-1", Want.SLEEP, 3, sleep_level=1)
    return await controlplane.until("w-1", P.SLEEPING, 3)


async def test_sleep_gives_memory_back_and_wake_serves_again(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """NA8, NA16: bytes are measured and reported; nothing is generated and nothing probed while it sleeps; the same
    engine wakes and answers exactly."""
    report = await asleep(controlplane, agent, "--fault", "wake_slow,seconds=1")  # so that the phase is seen
    pid = engine_pid(agent)
    assert report.freed_bytes > 80 * MIB
    assert rss(pid) < 80 * MIB
    tokens = (await unix_call(Path(ledger(agent)["engine_endpoint"].removeprefix("unix:")), "GET", "/metrics")).text
    await controlplane.beats(5)
    later = (await unix_call(Path(ledger(agent)["engine_endpoint"].removeprefix("unix:")), "GET", "/metrics")).text
    generated = [line for line in tokens.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert generated == [line for line in later.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert controlplane.reports["w-1"].probe_failures in (None, 0)

    controlplane.want("w-1", Want.RUN, 4)
    ready = await controlplane.until("w-1", P.READY, 4)
    assert ready.incarnation == report.incarnation
    assert ready.reoccupied_bytes is not None
    assert ready.reoccupied_bytes > 80 * MIB
    assert engine_pid(agent) == pid
    assert (await engine_says(agent, "/server_info"))["sim"]["flushes"] == 1
    words, errors, done = await stream_words(f"http://{ready.endpoint}", "hello", 20)
    assert ("".join(words), errors, done) == (expected("hello", 20), [], True)
    seen = controlplane.phases["w-1"]
    assert seen[seen.index(P.SLEEPING) :][0:2] == [P.SLEEPING, P.LOADING]


async def test_the_agent_dies_while_its_worker_sleeps(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """F6: the ledger says that it sleeps; it is not woken by a probe, and wakes by order."""
    report = await asleep(controlplane, agent)
    pid = engine_pid(agent)
    agent.kill()
    controlplane.reports.clear()
    controlplane.phases.clear()
    await agent.start().up()
    again = await controlplane.until("w-1", P.SLEEPING, 3)
    assert set(controlplane.phases["w-1"]) <= {P.ADOPTING, P.SLEEPING}
    assert (again.incarnation, again.freed_bytes, engine_pid(agent)) == (report.incarnation, report.freed_bytes, pid)
    controlplane.want("w-1", Want.RUN, 4)
    await controlplane.until("w-1", P.READY, 4)


async def test_an_engine_killed_in_its_sleep_is_reported(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """F5: supervised by its process; the next order starts another."""
    await asleep(controlplane, agent)
    os.kill(engine_pid(agent), signal.SIGKILL)
    failed = await controlplane.until("w-1", P.FAILED)
    assert failed.exit is not None
    assert failed.exit.reason == "ENGINE_KILLED"
    await controlplane.beats(3)
    assert controlplane.reports["w-1"].phase is P.FAILED  # SLEEP is no order to start
    controlplane.want("w-1", Want.RUN, 4)
    await controlplane.until("w-1", P.READY, 4)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--fault", "release_nothing"), "RELEASE_FREED_NOTHING"),
        (("--no-sleep-mode",), "RELEASE_UNIMPLEMENTED"),
    ],
)
async def test_a_release_that_frees_nothing_is_a_failure(
    controlplane: FakeControlPlane, agent: RunningAgent, flags: tuple[str, ...], reason: str
) -> None:
    """NA8, NA9: the engine is stopped, and the reason says why."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch(*MEMORY, *flags))
    await controlplane.until("w-1", P.READY)
    controlplane.want("w-1", Want.SLEEP, 2, sleep_level=1)
    failed = await controlplane.until("w-1", P.FAILED, 2, bound_s=45)
    assert failed.exit is not None
    assert failed.exit.reason == reason
    assert not marked(agent.marker).keys() & {failed.incarnation}
    assert not any("nodeagent.engines.sim" in line for line in marked(agent.marker).values())


async def test_a_wake_that_fails_ends_the_engine(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA8: its memory is nobody's; the next order starts another."""
    await asleep(controlplane, agent, "--fault", "wake_fails,count=1")
    controlplane.want("w-1", Want.RUN, 4)
    failed = await controlplane.until("w-1", P.FAILED, 4)
    assert failed.exit is not None
    assert failed.exit.reason == "WAKE_FAILED"
    controlplane.want("w-1", Want.RUN, 5)
    await controlplane.until("w-1", P.READY, 5)


async def test_a_wake_that_the_agents_death_interrupts(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """F6: the engine is asked how far it came, and woken once more."""
    await asleep(controlplane, agent, "--fault", "wake_slow,seconds=1.5")
    controlplane.want("w-1", Want.RUN, 4)
    await controlplane.until("w-1", P.LOADING, 4)
    await eventually(lambda: ledger(agent)["changing"] == "restore")
    agent.kill()
    await agent.start().up()
    ready = await controlplane.until("w-1", P.READY, 4)
    words, _, done = await stream_words(f"http://{ready.endpoint}", "hello", 5)
    assert ("".join(words), done) == (expected("hello", 5), True)


async def test_a_start_that_ends_asleep_never_admits(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """A spare: started, warmed up, asleep; an order to run wakes it."""
    await agent.start().up()
    controlplane.want("w-1", Want.SLEEP, 1, launch(*MEMORY), sleep_level=1, start_asleep=True)
    report = await controlplane.until("w-1", P.SLEEPING, 1)
    assert report.freed_bytes is not None
    assert P.READY not in controlplane.phases["w-1"]
    controlplane.want("w-1", Want.RUN, 2)
    ready = await controlplane.until("w-1", P.READY, 2)
    assert ready.incarnation == report.incarnation


async def test_new_weights_while_it_is_paused(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """RL4: closed, what runs finishes, cache released, weights loaded, restored, one token, version reported."""
    await agent.start().up()
    slow = launch(*MEMORY, "--fault", "weights_slow,seconds=1")  # longer than several heartbeats: each phase is seen
    controlplane.want("w-1", Want.RUN, 1, slow, weight_version="v1", weight_source="/w/1")
    first = await controlplane.until("w-1", P.READY)
    assert first.weight_version == "v1"
    assert P.SYNCING_WEIGHTS in controlplane.phases["w-1"]
    controlplane.want("w-1", Want.RUN, 2, paused=True, weight_version="v2", weight_source="/w/2")

    def updated() -> bool:
        report = controlplane.reports["w-1"]
        return report.phase is P.PAUSED and report.weight_version == "v2"

    await eventually(updated)
    assert (await engine_says(agent, "/server_info"))["sim"]["weights_path"] == "/w/2"
    assert await engine_says(agent, "/is_paused") == {"is_paused": False}
    controlplane.want("w-1", Want.RUN, 3, weight_version="v2", weight_source="/w/2")
    ready = await controlplane.until("w-1", P.READY, 3)
    assert ready.incarnation == first.incarnation


async def test_weights_are_loaded_again_after_a_sleep_that_drops_them(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """NA8: level 2 keeps none; a sleeper wakes with the version that is wanted now."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch(*MEMORY), weight_version="v1", weight_source="/w/1")
    await controlplane.until("w-1", P.READY)
    controlplane.want("w-1", Want.SLEEP, 2, sleep_level=2)
    await controlplane.until("w-1", P.SLEEPING, 2)
    controlplane.want("w-1", Want.RUN, 3, weight_version="v2", weight_source="/w/2")
    ready = await controlplane.until("w-1", P.READY, 3)
    assert ready.weight_version == "v2"
    assert (await engine_says(agent, "/server_info"))["sim"]["weights_path"] == "/w/2"


async def test_weights_that_cannot_be_loaded(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """RL4: nobody serves from an engine whose weights are unknown."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--fault", "weights_fail"))
    await controlplane.until("w-1", P.READY)
    controlplane.want("w-1", Want.RUN, 2, paused=True, weight_version="v2", weight_source="/w/2")
    failed = await controlplane.until("w-1", P.FAILED, 2)
    assert failed.exit is not None
    assert failed.exit.reason == "WEIGHTS_FAILED"


async def test_verbs(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """NA9: done once, answered; refused for another engine, for a sleeper, for nonsense."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch())
    ready = await controlplane.until("w-1", P.READY)
    assert await controlplane.verb("w-1", "flush_cache", incarnation=ready.incarnation) == {}
    assert (await engine_says(agent, "/server_info"))["sim"]["flushes"] == 1
    assert (await controlplane.verb("w-1", "load"))["running"] == 0
    assert (await controlplane.verb("w-1", "capabilities"))["missing"] == {}
    await controlplane.verb("w-1", "profile", action="start")
    with pytest.raises(FailedPrecondition, match="no engine of incarnation 7"):
        await controlplane.verb("w-1", "flush_cache", incarnation=7)
    with pytest.raises(NotFound):
        await controlplane.verb("w-9", "flush_cache")
    with pytest.raises(InvalidArgument, match="no verb"):
        await controlplane.verb("w-1", "explode")

    controlplane.want("w-1", Want.RUN, 2, paused=True)
    await controlplane.until("w-1", P.PAUSED, 2)
    await controlplane.verb("w-1", "pause", mode="keep")
    assert await engine_says(agent, "/is_paused") == {"is_paused": True}
    agent.kill()
    await agent.start().up()
    await controlplane.until("w-1", P.PAUSED, 2)
    await controlplane.beats(5)
    assert controlplane.reports["w-1"].probe_failures == 0  # it was paused on purpose
    assert await engine_says(agent, "/is_paused") == {"is_paused": True}
    controlplane.want("w-1", Want.RUN, 3)
    await controlplane.until("w-1", P.READY, 3)
    assert await engine_says(agent, "/is_paused") == {"is_paused": False}

    controlplane.want("w-1", Want.SLEEP, 4)
    await controlplane.until("w-1", P.SLEEPING, 4)
    assert (await controlplane.verb("w-1", "ready"))["reason"] == "SLEEPING"
    with pytest.raises(FailedPrecondition, match="asleep"):
        await controlplane.verb("w-1", "warm_up")


async def test_a_verb_that_the_engine_lacks_names_the_variable(
    controlplane: FakeControlPlane, agent: RunningAgent
) -> None:
    """NA9."""
    await agent.start().up()
    controlplane.want("w-1", Want.RUN, 1, launch("--no-dev-mode"))
    await controlplane.until("w-1", P.READY)
    with pytest.raises(Unimplemented, match="VLLM_SERVER_DEV_MODE=1") as raised:
        await controlplane.verb("w-1", "flush_cache")
    assert raised.value.metadata["missing"] == "VLLM_SERVER_DEV_MODE=1"
    await eventually(lambda: controlplane.reports["w-1"].verbs_known)
    assert controlplane.reports["w-1"].missing_verbs["release"] == "VLLM_SERVER_DEV_MODE=1"


async def test_a_sleepers_gpu_is_lent_and_claimed_back(controlplane: FakeControlPlane, agent: RunningAgent) -> None:
    """RL8, NA2: another worker runs on it meanwhile; the sleeper wakes when that one is gone, and never before."""
    await asleep(controlplane, agent)
    controlplane.want("w-2", Want.RUN, 1, launch(gpu_ids=("sim0",)))
    await controlplane.until("w-2", P.READY)
    controlplane.want("w-1", Want.RUN, 4)
    await controlplane.beats(5)
    assert controlplane.reports["w-1"].phase is P.SLEEPING
    controlplane.want("w-2", Want.STOP, 2)
    await controlplane.until("w-2", P.STOPPED, 2)
    await controlplane.until("w-1", P.READY, 4)
    assert "lent to w-2" in agent.log


def known(worker_id: str, *, asleep: bool) -> KnownWorker:
    return KnownWorker(worker_id, "s", 1, Want.RUN, live=True, gpu_ids=("0",), asleep=asleep)


def wanted(worker_id: str, want: Want, generation: int, **more: Any) -> DesiredWorker:
    return DesiredWorker(worker_id, "p", generation, want, EngineLaunch("sim", gpu_ids=("0",)), **more)


def test_one_gpu_has_one_worker_that_is_awake() -> None:
    """NA2, RL8: in one message, a wake and a start on the same GPU: the first has it."""
    workers = {"a": known("a", asleep=True)}
    steps = converge("s", [wanted("a", Want.RUN, 2), wanted("b", Want.RUN, 1)], workers, ("0",))
    assert [(step.desired.worker_id, step.verdict) for step in steps] == [
        ("a", Verdict.FOLLOW),
        ("b", Verdict.REFUSE_START),
    ]
    workers["b"] = known("b", asleep=False)
    (step,) = converge("s", [wanted("a", Want.RUN, 2)], workers, ("0",))
    assert (step.verdict, step.reason) == (Verdict.IGNORE, "GPU_LENT")
    (step,) = converge("s", [wanted("a", Want.STOP, 2)], workers, ("0",))
    assert step.verdict is Verdict.FOLLOW
    (step,) = converge("s", [wanted("c", Want.SLEEP, 1, start_asleep=True)], {"a": known("a", asleep=False)}, ("0",))
    assert (step.verdict, step.reason) == (Verdict.REFUSE_START, "GPU_IN_USE")


async def test_an_engine_that_cannot_say_how_far_it_came_is_not_used() -> None:
    """NA8, F6: SGLang has no question for it; restoring what was not released would end it, and so would the guess."""

    class Interrupted:
        entry = type("Entry", (), {"changing": "restore", "worker_id": "w", "released": ("weights",)})()
        warm = False

    changes = Changes(None, Interrupted(), engine_adapter("sglang"), None)  # type: ignore[arg-type]
    with pytest.raises(ChangeFailed) as raised:
        await changes.recover()
    assert raised.value.exit_info.reason == "WAKE_INTERRUPTED"
