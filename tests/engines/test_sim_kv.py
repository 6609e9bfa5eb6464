"""The simulated engine's KV transfer: prompts computed by one process, decoded by another (F40)."""

from typing import Any

import orjson
import pytest

from nodeagent.engines.sim.kv import KvConfig, kv_of, parse_config
from nodeagent.engines.sim.tokens import answer_text
from tests.engines.conftest import StartSim
from tests.engines.running import Engine, Stream, eventually, stream

COMPLETIONS = "/v1/completions"
PROMPT = "the load follows the tide " * 40
CONFIG = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
RECOMPUTE = CONFIG[:-1] + ',"kv_load_failure_policy":"recompute"}'
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


async def prefill(engine: Engine, prompt: str = PROMPT) -> dict[str, Any]:
    """What its answer says of where the KV is."""
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASKED}
    params: dict[str, Any] = orjson.loads((await engine.http.post(COMPLETIONS, body)).body)["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    return params


async def counts(engine: Engine) -> dict[str, float]:
    text = (await engine.http.get("/metrics")).text()
    return {
        line.split()[0].removeprefix("sim_kv_"): float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("sim_kv_")
    }


def decode(params: dict[str, Any], prompt: str = PROMPT, n: int = 20) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": n, "stream": True, "kv_transfer_params": params}


async def test_a_prompt_is_computed_here_and_decoded_there(sim: StartSim) -> None:
    """F40: the bytes go from one process to the other, once; what was computed there is not computed here."""
    one = await sim("--kv-transfer-config", CONFIG)
    other = await sim("--kv-transfer-config", CONFIG, "--prefill-tokens-per-s", "1")  # would take many minutes
    params = await prefill(one)
    assert (await counts(one))["held"] == 1
    got = await stream(other.command.endpoint, COMPLETIONS, decode(params))
    assert (got.ended, got.text) == ("done", answer_text(PROMPT, 20))
    assert (await counts(other))["received_total"] == 1
    sent = await counts(one)
    assert (sent["sent_total"], sent["held"]) == (1, 0)


async def test_kv_that_cannot_be_loaded_fails_or_is_computed(sim: StartSim) -> None:
    """F40: vLLM's failure policy. Gone, dropped, of another prompt, and of a process that is no more."""
    one, strict = await sim("--kv-transfer-config", CONFIG), await sim("--kv-transfer-config", CONFIG)
    lenient = await sim("--kv-transfer-config", RECOMPUTE)
    params = await prefill(one)
    other_prompt = decode(params, "something else")
    got = await stream(strict.command.endpoint, COMPLETIONS, other_prompt)
    assert [event["error"]["code"] for event in got.events] == [500]
    got = await stream(strict.command.endpoint, COMPLETIONS, decode(params))  # it was given already
    assert [event["error"]["code"] for event in got.events] == [500]
    await one.http.post("/fault", {"kind": "kv_dropped", "count": 1})
    answer = await strict.http.post(COMPLETIONS, {**decode(await prefill(one)), "stream": False})
    assert answer.status == 500
    params = await prefill(one)
    one.stop()
    got = await stream(strict.command.endpoint, COMPLETIONS, decode(params))
    assert [event["error"]["code"] for event in got.events] == [500]
    got = await stream(lenient.command.endpoint, COMPLETIONS, decode(params))
    assert (got.ended, got.text) == ("done", answer_text(PROMPT, 20))
    assert (await counts(lenient))["recomputed_total"] == 1
    assert (await counts(strict))["failed_total"] == 4


async def test_held_kv_expires_and_a_pull_that_hangs_ends_with_its_client(sim: StartSim) -> None:
    """F40: nothing is held for ever."""
    short = CONFIG[:-1] + ',"kv_connector_extra_config":{"kv_lease_duration":0.2}}'
    one, other = await sim("--kv-transfer-config", short), await sim("--kv-transfer-config", CONFIG)
    params = await prefill(one)

    async def expired() -> bool:
        return (await counts(one))["expired_total"] == 1

    await eventually(expired)
    await other.http.post("/fault", {"kind": "pull_hangs"})
    asking = await Stream(other.command.endpoint, COMPLETIONS, decode(params)).open()

    async def running() -> int:
        load: int = orjson.loads((await other.http.get("/load")).body)["server_load"]
        return load

    async def one_runs() -> bool:
        return await running() == 1

    async def none_runs() -> bool:
        return await running() == 0

    await eventually(one_runs)
    asking.close()
    await eventually(none_runs)


async def test_without_a_connector_nothing_is_held(sim: StartSim) -> None:
    engine = await sim()
    answer = await engine.http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "kv_transfer_params": ASKED})
    assert "kv_transfer_params" not in orjson.loads(answer.body)


@pytest.mark.parametrize("text", ["{", "[]", "{}", CONFIG[:-1] + ',"kv_load_failure_policy":"never"}'])
def test_a_wrong_config_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="kv"):
        parse_config(text)


def test_config_and_digests() -> None:
    assert parse_config(RECOMPUTE) == KvConfig(recompute=True)
    kv = kv_of(range(33), 16)
    assert len(kv) == 3 * 32
    assert kv_of(range(32), 16) == kv[:64]
    assert kv_of([*range(31), 99], 16) != kv[:64]
