"""A load test that is not ours, unchanged: `vllm bench serve` through the router while the pool goes from 1 to 4 to 1.

RT1 RT2 RT4 RT6 CP11, F1 F3 F4: 32 requests at a time; three of four workers drain under them; none fails.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import POLICY, apply_demo
from tests.system.stack import ROOT, Stack, wait_for

VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
TOKENIZER = "import pathlib, sys; from tiny_model import save_tokenizer; save_tokenizer(pathlib.Path(sys.argv[1]))"
REQUESTS, CONCURRENCY, PROMPT, TOKENS = 400, 32, 50, 24
ENGINE = (
    *("--startup-s", "0.5", "--decode-base-ms", "80", "--decode-per-request-ms", "0.1"),
    *("--max-num-seqs", "16", "--prefill-tokens-per-s", "20000"),
)
QUICK = {**POLICY, "monitoring_interval": 0.25, "min_stable_period": 0.5, "scale_up_cooldown": 0.25}

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


@contextmanager
def _bench(stack: Stack, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The load, on its way; killed with the block if it is not through."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "STACK_UNDER_TEST": str(folder)}
    subprocess.run(
        [VLLM.with_name("python"), "-c", TOKENIZER, folder / "tokenizer"],
        check=True,
        capture_output=True,
        timeout=120,
        env={**environ, "PYTHONPATH": str(ROOT / "tests" / "engines_real")},
    )
    (folder / "tokenizer" / "config.json").write_text('{"model_type": "llama"}')
    command: list[Any] = [
        *(VLLM, "bench", "serve", "--base-url", stack.http, "--model", "demo", "--tokenizer", folder / "tokenizer"),
        *("--dataset-name", "random", "--random-input-len", PROMPT, "--random-output-len", TOKENS, "--ignore-eos"),
        *("--num-prompts", REQUESTS, "--max-concurrency", CONCURRENCY, "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "bench.json"),
    ]
    with (folder / "bench.log").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environ, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def _workers(stack: Stack, bench: "subprocess.Popen[bytes]", state: str, count: int) -> None:
    """Waits for so many workers; the load must not be over before."""

    def there() -> bool:
        assert bench.poll() is None, "the load ended before the pool had scaled"
        return len(stack.workers(state)) == count

    wait_for(f"{count} workers {state} under load", there, 90)


def test_the_benchmark_of_vllm_while_the_pool_scales(small_stack: Stack) -> None:
    stack = small_stack
    spec: dict[str, Any] = {"engine_args": ENGINE, "drain_timeout_s": 60.0}
    apply_demo(stack, max_workers=4, policy=QUICK, **spec)
    spec |= {"name": "demo", "engine": "sim", "min_workers": 1, "policy": QUICK}
    with _bench(stack, stack.folder) as bench:
        wait_for("the load", lambda: any(w.in_flight for w in stack.workers("ACTIVE")), 180)  # it imports a lot first
        _workers(stack, bench, "ACTIVE", 4)  # the policy's doing
        stack.apply(**spec, max_workers=1)
        _workers(stack, bench, "DRAINING", 0)
        _workers(stack, bench, "ACTIVE", 1)
        assert bench.wait(120) == 0, (stack.folder / "bench.log").read_text(errors="replace")[-3000:]
    result = json.loads((stack.folder / "bench.json").read_text())
    assert (result["failed"], result["completed"]) == (0, REQUESTS), set(result["errors"])
    assert result["max_concurrency"] == CONCURRENCY
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    assert set(result["output_lens"]) == {TOKENS}
    actions = [event.action for event in stack.events()]
    assert actions.count("scale_up_complete") == 4
    assert actions.count("scale_down_complete") == 3
    assert not {"worker_failed", "worker_lost", "drain_aborted"} & set(actions)
    assert stack.counted("router", "springtide_router_continuations_total") == 0
