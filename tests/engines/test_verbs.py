"""The neutral verbs: the simulated engine does all of them and really frees memory; SGLang's by what it is asked."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from nodeagent.engines.adapter import EngineAdapter, ReadyReason
from nodeagent.engines.openai_engine import CONTROL_VERBS
from nodeagent.engines.registry import engine_adapter
from nodeagent.engines.verbs import VERBS, perform
from springtide.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from tests.engines.conftest import StartSim
from tests.engines.running import Engine, Stream, eventually
from tests.engines.test_probes import canned

MIB = 1024 * 1024


def rss(engine: Engine) -> int:
    found: int = psutil.Process(engine.process.pid).memory_info().rss
    return found


async def held(engine: Engine) -> dict[str, Any]:
    answer: Any = (await engine.http.get("/server_info")).json()
    found: dict[str, Any] = answer["sim"]
    return found


async def test_a_sleep_gives_memory_back_and_a_wake_takes_it_again(sim: StartSim) -> None:
    """NA8: measured at the process; repeated calls are no-ops."""
    engine = await sim("--memory-mb", "96")
    adapter, http = engine.adapter, engine.http
    awake = rss(engine)
    assert await adapter.release(http, 1) == ("weights", "kv_cache")
    asleep = rss(engine)
    assert awake - asleep > 80 * MIB
    assert await adapter.release(http, 1) == ("weights", "kv_cache")
    assert await adapter.released(http) is True
    await adapter.restore(http, ("weights",))
    assert await adapter.released(http) is True
    await adapter.restore(http, ("kv_cache",))
    await adapter.restore(http)
    assert await adapter.released(http) is False
    assert rss(engine) - asleep > 80 * MIB
    assert (await adapter.ready(http)).ready
    await adapter.warm_up(http, "demo")


async def test_only_the_cache_is_released(sim: StartSim) -> None:
    engine = await sim("--memory-mb", "64")
    adapter, http = engine.adapter, engine.http
    assert await adapter.release(http, 1, ("kv_cache",)) == ("kv_cache",)
    assert (await held(engine))["held_bytes"] == 32 * MIB
    await adapter.update_weights(http, "v2", "/weights/2")
    await adapter.restore(http)
    await adapter.resume(http)
    assert (await adapter.ready(http)).ready
    assert await adapter.weight_version(http) == "v2"
    assert (await held(engine))["weights_path"] == "/weights/2"
    with pytest.raises(InvalidArgument, match="no memory tag"):
        await adapter.release(http, 1, ("graphs",))


async def test_a_busy_engine_is_not_released(sim: StartSim) -> None:
    """NA8: refused unless the engine itself is idle."""
    engine = await sim("--decode-base-ms", "100")
    body = {"model": "demo", "prompt": "a", "max_tokens": 5000, "stream": True}
    running = await Stream(engine.command.endpoint, "/v1/completions", body, {"x-request-id": "r1"}).open()
    await running.next()
    with pytest.raises(FailedPrecondition, match="not idle"):
        await engine.adapter.release(engine.http, 1)
    with pytest.raises(FailedPrecondition, match="not idle"):
        await engine.adapter.wait_idle(engine.http, 0.1)
    await engine.adapter.abort(engine.http, "r1")
    assert (await running.finish()).finish_reason == "abort"
    await engine.adapter.wait_idle(engine.http, 10)
    await engine.adapter.release(engine.http, 1)


async def test_capabilities_are_asked_of_the_engine(sim: StartSim) -> None:
    """NA9: UNIMPLEMENTED names the flag or variable that is missing."""
    whole = await sim()
    assert (await whole.adapter.capabilities(whole.http)).missing == {}
    plain = await sim("--no-sleep-mode")
    missing = (await plain.adapter.capabilities(plain.http)).missing
    assert missing == dict.fromkeys(("release", "restore"), "--enable-sleep-mode")
    with pytest.raises(Unimplemented, match="--enable-sleep-mode"):
        await plain.adapter.release(plain.http, 1)
    bare = await sim("--no-dev-mode")
    missing = (await bare.adapter.capabilities(bare.http)).missing
    assert set(missing) == set(CONTROL_VERBS)
    assert missing["pause"] == "VLLM_SERVER_DEV_MODE=1"
    for verb in ("pause", "abort_all", "flush_cache", "resume", "weight_version"):
        with pytest.raises(Unimplemented, match="VLLM_SERVER_DEV_MODE=1"):
            await perform(bare.adapter, bare.http, verb, {}, 10)


async def test_every_verb_by_name(sim: StartSim) -> None:
    """NA9: as orders from afar name them."""
    engine = await sim()
    orders: dict[str, dict[str, str]] = {"warm_up": {"model": "demo"}, "abort": {"id": "x"}, "pause": {"mode": "wait"}}
    for verb in VERBS:
        if verb != "profile":
            await perform(engine.adapter, engine.http, verb, orders.get(verb, {}), 10)
    await perform(engine.adapter, engine.http, "profile", {"action": "start"}, 10)
    assert (await held(engine))["profiling"] is True
    assert (await held(engine))["flushes"] == 1
    load = await perform(engine.adapter, engine.http, "load", {}, 10)
    assert load["idle"] is True
    for verb, args in (("explode", {}), ("resume", {"mode": "x"}), ("profile", {"action": "x"})):
        with pytest.raises(InvalidArgument):
            await perform(engine.adapter, engine.http, verb, args, 10)


@pytest.mark.parametrize("fault", ["release_nothing", "wake_fails", "weights_fail"])
async def test_faults_of_memory_and_weights(sim: StartSim, fault: str) -> None:
    engine = await sim("--memory-mb", "64", "--fault", fault)
    adapter, http = engine.adapter, engine.http
    if fault == "weights_fail":
        with pytest.raises(Unavailable, match="injected"):
            await adapter.update_weights(http, "v2", "/w")
        assert await adapter.weight_version(http) is None
        return
    before = rss(engine)
    await adapter.release(http, 1)
    assert (await adapter.ready(http)).reason is ReadyReason.SLEEPING
    if fault == "release_nothing":
        assert before - rss(engine) < 4 * MIB
        return
    with pytest.raises(Unavailable, match="injected"):
        await adapter.restore(http)
    assert await adapter.released(http) is True


LOADS = json.dumps({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.25}]}).encode()
IDLE = json.dumps({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}] * 2}).encode()
OLD = json.dumps([{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1}]).encode()


async def test_sglang_asks_its_scheduler_and_not_its_metrics(folder: Path) -> None:
    """NA6, NA8: /v1/loads, or /get_load of older versions; the metrics lag behind."""
    adapter = engine_adapter("sglang")
    async with canned(folder, {"GET /v1/loads?include=core": (200, LOADS)}) as (http, _):
        load = await adapter.load(http)
        assert (load.running, load.waiting, load.kv_use) == (2, 1, 0.25)
    async with canned(folder, {"GET /get_load": (200, OLD)}) as (http, _):
        load = await adapter.load(http)
        assert (load.running, load.waiting) == (2, 1)
    async with canned(folder, {"GET /v1/loads?include=core": (200, b"[1]")}) as (http, _):
        assert await adapter.idle(http) is None


async def test_sglang_releases_and_restores_the_same_tags(folder: Path) -> None:
    """NA8: only when idle; only what was released; weights are loaded again."""
    adapter: EngineAdapter = engine_adapter("sglang")
    answers = {
        "GET /v1/loads?include=core": (200, IDLE),
        "GET /server_info": (200, b'{"enable_memory_saver": false}'),
        "GET /model_info": (200, b'{"weight_version": "v7"}'),
        "POST /release_memory_occupation": (200, b""),
        "POST /resume_memory_occupation": (200, b""),
        "POST /update_weights_from_disk": (200, b'{"success": true}'),
        "POST /abort_request": (200, b""),
    }
    async with canned(folder, answers) as (http, asked):
        assert (await adapter.capabilities(http)).missing["release"] == "--enable-memory-saver"
        assert await adapter.release(http, 1, ("kv_cache",)) == ("kv_cache",)
        await adapter.restore(http, ("kv_cache",))
        await adapter.update_weights(http, "v8", "/weights/8")
        await adapter.abort(http, "r1")
        assert await adapter.weight_version(http) == "v7"
        assert await adapter.released(http) is None
        assert [line for line in asked if line.startswith("POST")] == [
            'POST /release_memory_occupation {"tags":["kv_cache"]}',
            'POST /resume_memory_occupation {"tags":["kv_cache"]}',
            'POST /update_weights_from_disk {"model_path":"/weights/8","flush_cache":true,"weight_version":"v8"}',
            'POST /abort_request {"rid":"r1","abort_all":false}',
        ]
    assert not adapter.keeps_weights(1, ())
    assert adapter.keeps_weights(1, ("--enable-weights-cpu-backup",))
    refused = {"POST /update_weights_from_disk": (200, b'{"success": false, "message": "no such folder"}')}
    async with canned(folder, refused) as (http, _):
        with pytest.raises(Unavailable, match="no such folder"):
            await adapter.update_weights(http, "v8", "/weights/8")


async def test_a_slow_wake_is_waited_for(sim: StartSim) -> None:
    engine = await sim("--fault", "wake_slow,seconds=0.2")
    await engine.adapter.release(engine.http, 1)
    await engine.adapter.restore(engine.http)
    await eventually(lambda: engine.adapter.idle(engine.http))
