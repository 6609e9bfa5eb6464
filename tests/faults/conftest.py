"""What the fault tests share: a small stack with short times, and pools of simulated engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.blows import FaultStack

TIMING = {
    "heartbeat_interval_s": 0.2,
    "sample_interval_s": 0.2,
    "monitoring_interval_s": 1.0,
    "signal_max_age_s": 2.0,
    "suspect_after_s": 1.5,
    "unhealthy_after_s": 2.0,
    "lease_s": 4.0,
    "grace_s": 3.0,
    "ack_timeout_s": 1.0,
    "router_lease_s": 2.0,
    "start_backoff_s": 0.3,
    "start_backoff_max_s": 2.0,
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[FaultStack]:
    """Four simulated GPUs; nothing of it is left at the end."""
    found = FaultStack(tmp_path, gpus=4, timing=TIMING)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        assert found.strays() == []
