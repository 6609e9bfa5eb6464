"""A node with simulated GPUs for what runs in the test's own process."""

from pathlib import Path
from typing import Any

from nodeagent.engines.registry import engine_adapter
from nodeagent.ledger import Ledger
from nodeagent.metrics import AgentMetrics
from nodeagent.setup import NodeSetup
from nodeagent.start_slots import StartSlots
from springtide.clock import SystemClock
from springtide.model.node import Gpu


class NoMemory:
    """GPUs whose memory nobody can tell."""

    def memory_used_bytes(self, gpu_id: str) -> int | None:
        return None


def node_setup(folder: Path, marker: str = "none", *, gpus: int = 1, starts: int = 1, **fields: Any) -> NodeSetup:
    """`starts`: at a time. `fields`: of NodeSetup, in place of what stands here."""
    usual: dict[str, Any] = {
        "node_id": "n-1",
        "marker": marker,
        "runtime_dir": folder,
        "ledger": Ledger(folder / "workers"),
        "gpus": tuple(Gpu(f"sim{number}", simulated=True) for number in range(gpus)),
        "memory": NoMemory(),
        "adapter": engine_adapter,
        "clock": SystemClock(),
        "start_slots": StartSlots(starts, 60.0),
        "metrics": AgentMetrics(),
        "probe_interval_s": 0.1,
    }
    return NodeSetup(**usual | fields)
