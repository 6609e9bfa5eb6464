"""What the system tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.stack import Stack, wait_for

# Times of a small world: windows and cooldowns shrink with the compressed trace, the order of things does not.
TIMING = {
    "heartbeat_interval_s": 0.25,
    "sample_interval_s": 0.2,
    "monitoring_interval_s": 1.0,
    "signal_max_age_s": 2.0,
    "suspect_after_s": 2.0,
    "lease_s": 20.0,
    "grace_s": 5.0,
}
POLICY = {
    "monitoring_interval": 0.5,
    "min_stable_period": 1.0,
    "scale_up_cooldown": 1.0,
    "scale_down_cooldown": 2.0,
    "requests_per_worker_capacity": 8,
}
ENGINE = (
    *("--startup-s", "0.5", "--decode-base-ms", "10", "--decode-per-request-ms", "0.3"),
    *("--max-num-seqs", "16", "--prefill-tokens-per-s", "20000"),
)


@pytest.fixture
def small_stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of four simulated GPUs with short times; nothing of it is left at the end."""
    stack = Stack(tmp_path, gpus=4, timing=TIMING)
    try:
        yield stack.start()
    finally:
        stack.stop()
        assert stack.strays() == []


def apply_demo(stack: Stack, *, min_workers: int = 1, max_workers: int = 4, **spec: object) -> None:
    """The pool `demo` on the simulated engine, ready to route."""
    spec = {"engine_args": ENGINE, "policy": POLICY, **spec}
    stack.apply(name="demo", engine="sim", min_workers=min_workers, max_workers=max_workers, **spec)
    stack.wait_workers("ACTIVE", min_workers)
    stack.wait_routable("demo")


@pytest.fixture(scope="module")
def orders_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for orders that must change nothing: one for all of them."""
    stack = Stack(tmp_path_factory.mktemp("orders"), gpus=4, timing=TIMING)
    try:
        stack.start()
        wait_for("the node", lambda: stack.status().nodes)
        yield stack
    finally:
        stack.stop()
