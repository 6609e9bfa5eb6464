"""The simulated engine's HTTP surface, over real sockets."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from nodeagent.engines.adapter import ReadyReason
from nodeagent.engines.sim.tokens import answer_ids, answer_text, answer_tokens, encode, render_chat
from springtide.errors import Unimplemented
from tests.engines.conftest import StartSim
from tests.engines.running import Engine, Stream, eventually, stream

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def body(prompt: Any = "hello", n: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": n, "stream": True, **more}


async def test_streams_are_exact_and_end_like_vllm(sim: StartSim) -> None:
    engine = await sim()
    got = await stream(engine.command.endpoint, COMPLETIONS, body(n=20, stream_options={"include_usage": True}))
    assert (got.status, got.ended, got.text, got.finish_reason) == (200, "done", answer_text("hello", 20), "length")
    assert len(got.events) == 21
    assert got.events[-1]["choices"] == []
    assert got.events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}


async def test_chat_streams_begin_with_the_role(sim: StartSim) -> None:
    engine = await sim()
    messages = [{"role": "user", "content": "hi"}]
    got = await stream(engine.command.endpoint, CHAT, {"messages": messages, "max_tokens": 4, "stream": True})
    assert got.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert got.text == answer_text(render_chat(messages), 4)
    assert got.events[0]["object"] == "chat.completion.chunk"


async def test_many_concurrent_streams_share_steps_and_stay_exact(sim: StartSim) -> None:
    engine = await sim("--max-num-seqs", "16")
    answers = await asyncio.gather(
        *(stream(engine.command.endpoint, COMPLETIONS, body(f"prompt {at}", 12)) for at in range(40))
    )
    assert [got.text for got in answers] == [answer_text(f"prompt {at}", 12) for at in range(40)]
    assert await engine.adapter.idle(engine.http) is True


async def test_continuation_by_token_ids(sim: StartSim) -> None:
    """The ids that a stream returns continue it exactly on any engine of the pool."""
    engine = await sim()
    first = await stream(engine.command.endpoint, COMPLETIONS, body(n=6, return_token_ids=True))
    prompt_ids = first.events[0]["choices"][0]["prompt_token_ids"]
    produced = [token for event in first.events for token in event["choices"][0]["token_ids"]]
    assert (prompt_ids, produced) == (encode("hello"), answer_ids("hello", 6))
    rest = await stream(engine.command.endpoint, COMPLETIONS, body([*prompt_ids, *produced], 6))
    assert first.text + rest.text == answer_text("hello", 12)


async def test_the_official_client_gets_chat_and_completions(sim: StartSim, free_port: int) -> None:
    engine = await sim(port=free_port)
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"http://{engine.command.endpoint}/v1", api_key="none") as client:
        chat = await client.chat.completions.create(model="demo", messages=messages, max_tokens=3)
        assert chat.choices[0].message.content == answer_text(render_chat(messages), 3)
        chunks = await client.completions.create(model="demo", prompt="x", max_tokens=3, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == answer_text("x", 3)
        assert [model.id async for model in client.models.list()] == ["demo"]
        vector = (await client.embeddings.create(model="demo", input="x", encoding_format="float")).data[0].embedding
        assert len(vector) == 16
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")


async def test_request_ids_come_back(sim: StartSim) -> None:
    engine = await sim()
    got = await stream(engine.command.endpoint, COMPLETIONS, body(n=1), {"x-request-id": "abc"})
    assert got.headers["x-request-id"] == "abc"
    assert got.events[0]["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind"),
    [
        (COMPLETIONS, {"model": "other", "prompt": "x"}, 404, "NotFoundError"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 100_000}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": "x" * 60_000}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "4"}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": ""}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": [1, 0x7000_0000]}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": "x", "n": 2}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, 400, "BadRequestError"),
        (COMPLETIONS, {}, 400, "BadRequestError"),
        (CHAT, {"messages": []}, 400, "BadRequestError"),
        ("/v1/embeddings", {}, 400, "BadRequestError"),
        ("/detokenize", {"tokens": ["a"]}, 400, "BadRequestError"),
        ("/sleep?level=7", {}, 400, "BadRequestError"),
    ],
)
async def test_bad_requests_are_refused_in_vllms_shape(
    sim: StartSim, path: str, fields: dict[str, Any], status: int, kind: str
) -> None:
    engine = await sim()
    response = await engine.http.post(path, fields)
    answer: Any = response.json()
    assert response.status == status
    assert answer["error"]["type"] == kind
    assert answer["error"]["code"] == status
    assert answer["error"]["message"]


async def test_broken_http_and_json_do_no_harm(sim: StartSim) -> None:
    engine = await sim()
    path = engine.launch.uds_path
    for raw, status in (
        (b'POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n{"a":', b"400"),
        (b"\x00\x01nonsense\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /v1/completions HTTP/1.1\r\n\r\n", b"405"),
    ):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(raw)
        assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
        writer.close()
    assert (await engine.adapter.ready(engine.http)).ready


async def test_one_connection_serves_pipelined_requests_in_order(sim: StartSim) -> None:
    engine = await sim()
    reader, writer = await asyncio.open_unix_connection(engine.launch.uds_path)
    one = b'{"prompt":"%b","max_tokens":2}'
    for raw in (one % b"a", one % b"b"):
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
    for prompt in ("a", "b"):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert answer_text(prompt, 2).encode() in await reader.readexactly(size)
    writer.close()


async def test_stop_strings_cut_the_text_before_them(sim: StartSim) -> None:
    engine = await sim()
    words = answer_tokens("hello", 8)
    stop = words[3][2:] + words[4][:2]  # over a token boundary
    got = await stream(engine.command.endpoint, COMPLETIONS, body(n=8, stop=[stop]))
    whole = answer_text("hello", 8)
    assert got.text == whole[: whole.find(stop)]
    assert got.finish_reason == "stop"
    assert got.events[-1]["choices"][0]["stop_reason"] == stop
    kept = await stream(
        engine.command.endpoint, COMPLETIONS, body(n=8, stop=stop, include_stop_str_in_output=True, stream=False)
    )
    assert f'"text":"{whole[: whole.find(stop) + len(stop)]}"'.encode() in kept.body


async def test_answers_end_by_themselves_when_asked_to(sim: StartSim) -> None:
    engine = await sim("--natural-length", "5")
    send = engine.command.endpoint
    assert (await stream(send, COMPLETIONS, body(n=9))).finish_reason == "stop"
    assert (await stream(send, COMPLETIONS, body(n=9))).text == answer_text("hello", 5)
    assert (await stream(send, COMPLETIONS, body(n=9, ignore_eos=True))).text == answer_text("hello", 9)
    assert (await stream(send, COMPLETIONS, body(n=9, min_tokens=7))).text == answer_text("hello", 7)
    continued = [*encode("hello"), *answer_ids("hello", 3)]
    assert (await stream(send, COMPLETIONS, body(continued, 9))).text == answer_text("hello", 2, start=3)


async def test_tokenize_and_detokenize_agree(sim: StartSim) -> None:
    engine = await sim()
    tokens: Any = (await engine.http.post("/tokenize", {"prompt": "hello"})).json()
    assert (tokens["count"], tokens["tokens"], tokens["max_model_len"]) == (2, encode("hello"), 16384)
    text: Any = (await engine.http.post("/detokenize", {"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "hello"}


async def test_metrics_show_running_waiting_and_tokens(sim: StartSim) -> None:
    """NA6: running, waiting, KV use, totals."""
    engine = await sim("--max-num-seqs", "2", "--decode-base-ms", "200")
    streams = [await Stream(engine.command.endpoint, COMPLETIONS, body(f"p{at}", 5000)).open() for at in range(6)]

    async def full() -> bool:
        load = await engine.adapter.load(engine.http)
        return (load.running, load.waiting) == (2, 4)

    await eventually(full)
    load = await engine.adapter.load(engine.http)
    assert load.idle is False
    assert load.kv_use is not None
    assert 0 < load.kv_use < 1
    server_load: Any = (await engine.http.get("/load")).json()
    assert server_load == {"server_load": 6}
    for one in streams:
        one.close()
    await eventually(lambda: engine.adapter.idle(engine.http))
    await stream(engine.command.endpoint, COMPLETIONS, body(n=3))
    text = (await engine.http.get("/metrics")).text()
    for name in (
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="demo",reason="capacity"} 0.0',
        'vllm:engine_sleep_state{engine="0",model_name="demo",sleep_state="awake"} 1.0',
        'vllm:request_success_total{engine="0",model_name="demo",finished_reason="abort"} 6.0',
        'vllm:request_success_total{engine="0",model_name="demo",finished_reason="length"} 1.0',
        "vllm:time_to_first_token_seconds_count",
        'kv_cache_size_tokens="65536"',
    ):
        assert name in text


async def test_a_client_that_leaves_frees_its_place(sim: StartSim) -> None:
    """DESIGN rule 7."""
    engine = await sim("--max-num-seqs", "1")
    leaving = await Stream(engine.command.endpoint, COMPLETIONS, body("a", 16000)).open()
    await leaving.next()
    leaving.close()
    got = await stream(engine.command.endpoint, COMPLETIONS, body("b", 3))
    assert got.text == answer_text("b", 3)


async def test_a_slow_reader_gets_everything_and_holds_up_nobody(sim: StartSim) -> None:
    engine = await sim("--decode-base-ms", "0.1", "--decode-per-request-ms", "0")
    slow = await Stream(engine.command.endpoint, COMPLETIONS, body("slow", 9000)).open()
    quick = await stream(engine.command.endpoint, COMPLETIONS, body("quick", 50))
    assert quick.text == answer_text("quick", 50)
    await eventually(lambda: _generated(engine, 9050), 30)
    got = await asyncio.wait_for(slow.finish(), 30)
    assert (got.ended, got.text) == ("done", answer_text("slow", 9000))


async def _generated(engine: Engine, n: int) -> bool:
    return ((await engine.adapter.load(engine.http)).generation_tokens_total or 0) >= n


async def test_pause_and_sleep_follow_vllm(sim: StartSim) -> None:
    """NA16: 200 on /health never counts as ready while asleep or paused."""
    engine = await sim("--decode-base-ms", "100")
    adapter, http, send = engine.adapter, engine.http, engine.command.endpoint
    running = await Stream(send, COMPLETIONS, body("a", 5000)).open()
    await running.next()
    await adapter.pause(http, "abort")
    assert (await running.finish()).finish_reason == "abort"
    assert (await http.get("/health")).status == 200
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await adapter.ready(http)).reason is ReadyReason.PAUSED
    assert (await http.post(COMPLETIONS, body("b"))).status == 503
    await adapter.resume(http)
    assert (await adapter.ready(http)).ready

    await adapter.release(http, 1)
    await adapter.release(http, 1)
    assert (await adapter.ready(http)).reason is ReadyReason.SLEEPING
    asleep = asyncio.create_task(stream(send, COMPLETIONS, body("c", 2)))
    await eventually(lambda: _server_load(engine, 1))
    assert (await adapter.load(http)).waiting == 0
    half = await http.post("/wake_up?tags=weights")
    assert (half.json(), asleep.done()) == ({"status": "sleeping"}, False)
    await adapter.restore(http)
    assert (await asleep).text == answer_text("c", 2)
    assert (await adapter.ready(http)).ready


async def _server_load(engine: Engine, n: int) -> bool:
    return (await engine.http.get("/load")).json() == {"server_load": n}


async def test_pause_modes_keep_and_wait(sim: StartSim) -> None:
    engine = await sim("--decode-base-ms", "100")
    adapter, http, send = engine.adapter, engine.http, engine.command.endpoint
    frozen = await Stream(send, COMPLETIONS, body("a", 20)).open()
    await frozen.next()
    await adapter.pause(http, "keep")
    queued = asyncio.create_task(stream(send, COMPLETIONS, body("b", 2)))
    await eventually(lambda: _server_load(engine, 2))
    before = (await adapter.load(http)).generation_tokens_total
    assert before is not None
    assert before < 20
    await adapter.resume(http)
    assert (await frozen.finish()).text == answer_text("a", 20)
    assert (await queued).text == answer_text("b", 2)

    last = await Stream(send, COMPLETIONS, body("d", 20)).open()
    waiting = asyncio.create_task(adapter.pause(http, "wait"))
    assert (await last.finish()).text == answer_text("d", 20)
    await asyncio.wait_for(waiting, 10)
    assert await adapter.idle(http) is True


async def test_abort_by_request_id_and_all(sim: StartSim) -> None:
    engine = await sim("--decode-base-ms", "50")
    send = engine.command.endpoint
    streams = [
        await Stream(send, COMPLETIONS, body(f"p{at}", 9000), {"x-request-id": f"r{at}"}).open() for at in range(3)
    ]
    assert (await engine.http.post("/abort_requests", {"request_ids": ["r1", "nobody"]})).json() == {"aborted": 1}
    assert (await streams[1].finish()).finish_reason == "abort"
    await engine.adapter.abort_all(engine.http)
    for one in (streams[0], streams[2]):
        got = await one.finish()
        assert (got.finish_reason, got.ended) == ("abort", "done")


async def test_without_dev_mode_control_routes_do_not_exist(sim: StartSim) -> None:
    """NA9: a verb that the engine cannot do names the missing flag."""
    engine = await sim("--no-dev-mode")
    assert (await engine.http.post("/sleep")).status == 404
    with pytest.raises(Unimplemented, match="VLLM_SERVER_DEV_MODE"):
        await engine.adapter.abort_all(engine.http)
    assert (await engine.adapter.ready(engine.http)).ready


def test_options_that_make_no_sense_end_with_2(launch_sim: Callable[..., Engine]) -> None:
    for flags in (["--max-model-len", "999999"], ["--timing-scale", "0"], ["--fault", "nonsense"], ["--unknown"]):
        engine = launch_sim(*flags)
        assert engine.process.wait(20) == 2, engine.log.read_text()
        assert flags[0].lstrip("-") in engine.log.read_text() or "fault" in engine.log.read_text()


async def test_a_taken_port_ends_with_2_and_one_line(sim: StartSim, launch_sim: Any, free_port: int) -> None:
    await sim(port=free_port)
    second = launch_sim(port=free_port)
    assert second.process.wait(20) == 2
    assert f"127.0.0.1:{free_port}" in second.log.read_text()
    assert len(second.log.read_text().splitlines()) == 1
