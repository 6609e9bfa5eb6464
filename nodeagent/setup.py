"""What all workers of one node share: folders, ports, adapters, rules, the start slots."""

import errno
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
from springtide.errors import Exhausted, InvalidArgument
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


def reserve_loopback_port() -> socket.socket:
    """A TCP port for an engine that cannot listen on a unix socket, held by a socket that is bound and never listens.

    While it is open nobody is given this port by chance, neither as a listener nor for an outgoing connection. Servers
    set SO_REUSEADDR, and so can listen on it all the same.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
    except OSError:
        sock.close()
        raise
    return sock


def reserve_side_channel(setup: NodeSetup) -> socket.socket:
    """A TCP port on the address where shims listen, held like `reserve_loopback_port`, for an engine to listen on.

    The last free port of the agent's range: shims take the first, and one of them would take a port that is only held.
    Raises Exhausted (PORTS_EXHAUSTED), InvalidArgument when the address is none of this host's, OSError.
    """
    wildcard = setup.host in ("", "0.0.0.0", "::")
    host = setup.advertised_host if wildcard else setup.host
    for port in range(max(setup.port_first, setup.port_last), setup.port_first - 1, -1):
        try:
            return _hold(host, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise InvalidArgument(
                    field="advertised_host" if wildcard else "host",
                    value=host,
                    problem=f"is no address that engines can listen on: {error}",
                    remedy="Name an address of this host: engines on other nodes read KV caches there.",
                ) from None
            if error.errno != errno.EADDRINUSE:
                raise
    raise Exhausted(
        f"every port of {setup.port_first}-{setup.port_last} on {host} is in use.",
        reason="PORTS_EXHAUSTED",
        remedy="Widen the agent's port range: a worker with a side channel takes two ports.",
    )


def _hold(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    try:
        sock.bind(address)
        # Only now: two sockets that are bound with it may hold the same port as long as nobody listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        sock.close()
        raise
    return sock
