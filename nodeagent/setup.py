"""What all workers of one node share: folders, ports, adapters, rules, the start slots."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nodeagent.engines.adapter import EngineAdapter
from nodeagent.engines.rules import LaunchRules
from nodeagent.ledger import Ledger
from nodeagent.metrics import AgentMetrics
from nodeagent.start_slots import StartSlots
from springtide.clock import Clock
from springtide.model.node import Gpu


class GpuMemory(Protocol):
    """Asks the driver; see `nodeagent.gpus.Inventory`."""

    def memory_used_bytes(self, gpu_id: str) -> int | None:
        """None: nobody knows (simulated GPUs, no driver)."""
        ...


@dataclass(slots=True)
class NodeSetup:
    """Made once by `__main__`. `port_first` 0: any data port. `changed` is called at every change worth a heartbeat."""

    node_id: str
    marker: str
    runtime_dir: Path
    ledger: Ledger
    gpus: tuple[Gpu, ...]
    memory: GpuMemory
    adapter: Callable[[str], EngineAdapter]
    clock: Clock
    start_slots: StartSlots
    metrics: AgentMetrics
    rules: LaunchRules = field(default_factory=LaunchRules)
    interpreters: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    advertised_host: str = "127.0.0.1"
    port_first: int = 0
    port_last: int = 0
    probe_interval_s: float = 1.0
    stall_timeout_s: float = 60.0  # 0: never
    adopt_timeout_s: float = 10.0
    changed: Callable[[], None] = lambda: None
    used_by_others: Callable[[str, str], bool] = lambda gpu_id, worker_id: False
    """Whether another worker than `worker_id` may have a process on the GPU that is awake. Set by `Node`."""

    @property
    def gpu_ids(self) -> frozenset[str]:
        """Ids of the node's GPUs."""
        return frozenset(gpu.id for gpu in self.gpus)

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are only counted."""
        return all(gpu.simulated for gpu in self.gpus)


def free_loopback_port() -> int:
    """A TCP port that was free a moment ago, for engines that cannot listen on a unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
