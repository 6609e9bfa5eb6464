"""Ports of engines on TCP are held by a socket from their choice to their end (F36)."""

import dataclasses
import errno
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent.engines import adapter as engines
from nodeagent.engines.adapter import EngineCommand
from nodeagent.engines.simulated import SimAdapter
from nodeagent.ledger import Ledger
from nodeagent.node import Node
from nodeagent.setup import reserve_loopback_port
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from tests.nodeagent.fake_controlplane import launch
from tests.nodeagent.processes import eventually, kill_marked
from tests.nodeagent.setups import node_setup

P = ReportedPhase


class TcpSim(SimAdapter):
    """The simulated engine as if it had no unix sockets."""

    def command(self, launch: engines.EngineLaunch) -> EngineCommand:
        return super().command(dataclasses.replace(launch, uds_path=""))


@pytest.fixture
async def node(short_dir: Path, marker: str) -> AsyncIterator[Node]:
    made = Node(node_setup(short_dir, marker, adapter=lambda name: TcpSim()))
    yield made
    await made.close()
    kill_marked(marker)


def _is_taken(port: int) -> bool:
    """For a program that does not say SO_REUSEADDR, as one that picks a port at random."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def test_a_held_port_is_nobody_elses_and_still_free_to_a_server() -> None:
    with reserve_loopback_port() as held:
        port = held.getsockname()[1]
        assert _is_taken(port)
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            assert server.getsockname()[1] == port
        assert _is_taken(port), "after the server's end too"
    assert not _is_taken(port)


async def test_an_engines_port_is_held_while_it_starts(node: Node, short_dir: Path) -> None:
    """From the spawn on, long before the engine listens; the engine itself can listen on it."""
    order = launch("--startup-s", "1.5")
    node.apply("s", [DesiredWorker("w-1", "p", 1, Want.RUN, launch=order)])
    ledger = Ledger(short_dir / "workers")

    def endpoint() -> str:
        return next((entry.engine_endpoint for entry in ledger.read_all() if entry.shim is not None), "")

    await eventually(endpoint)
    port = int(endpoint().rpartition(":")[2])
    assert _is_taken(port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 2).close()
    await eventually(lambda: node.reports()[0].phase in (P.READY, P.WARMING))
    node.apply("s", [DesiredWorker("w-1", "p", 2, Want.STOP, launch=order)])
    await eventually(lambda: node.reports()[0].phase is P.STOPPED)
