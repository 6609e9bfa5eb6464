"""Each worker that hands over KV caches gets a TCP port of its own, held from its choice to its end (F36, F40)."""

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent.node import Node
from nodeagent.setup import reserve_side_channel
from springtide.errors import Exhausted, InvalidArgument
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from tests.nodeagent.fake_controlplane import launch
from tests.nodeagent.processes import eventually, kill_marked
from tests.nodeagent.setups import node_setup
from tests.ports import free_port

NIXL = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')


@pytest.fixture
async def node(short_dir: Path, marker: str) -> AsyncIterator[Node]:
    made = Node(node_setup(short_dir, marker, gpus=2, starts=2))
    yield made
    await made.close()
    kill_marked(marker)


def two_free_ports() -> int:
    """The first of two neighbours that are free."""
    while True:
        first = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
        return first


def test_it_is_the_last_free_port_of_the_range_and_never_given_twice(short_dir: Path) -> None:
    first = two_free_ports()
    setup = node_setup(short_dir, port_first=first, port_last=first + 1)
    with reserve_side_channel(setup) as one, reserve_side_channel(setup) as other:
        assert one.getsockname() == ("127.0.0.1", first + 1)
        assert other.getsockname() == ("127.0.0.1", first)
        with socket.create_server(("127.0.0.1", first)) as server:  # it says SO_REUSEADDR, as ZeroMQ does
            with pytest.raises(Exhausted, match="takes two ports") as refusal:
                reserve_side_channel(setup)
            assert refusal.value.reason == "PORTS_EXHAUSTED"
            assert server.getsockname()[1] == first


def test_any_port_without_a_range(short_dir: Path) -> None:
    setup = node_setup(short_dir)
    with reserve_side_channel(setup) as one, reserve_side_channel(setup) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def test_it_listens_where_shims_listen_and_never_on_all_addresses(short_dir: Path) -> None:
    """Others are told this address; 0.0.0.0 is none that they could use."""
    with reserve_side_channel(node_setup(short_dir, host="0.0.0.0", advertised_host="127.0.0.2")) as sock:
        assert sock.getsockname()[0] == "127.0.0.2"
    with reserve_side_channel(node_setup(short_dir, host="127.0.0.1", advertised_host="node-7.example")) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_host_is_named(short_dir: Path) -> None:
    setup = node_setup(short_dir, host="0.0.0.0", advertised_host="203.0.113.7")
    with pytest.raises(InvalidArgument, match=r"advertised_host = '203\.0\.113\.7': is no address that engines can"):
        reserve_side_channel(setup)


def _engine_env(folder: Path, worker_id: str) -> dict[str, str]:
    try:
        env: dict[str, str] = json.loads((folder / "workers" / worker_id / "launch.json").read_text())["env"]
    except FileNotFoundError:
        return {}
    return env


async def test_two_workers_of_one_pool_on_one_node(node: Node, short_dir: Path) -> None:
    """The pool sets the connector only. Both engines are up at once, and a restart gives a port that is free."""
    orders = {f"w-{at}": launch(*NIXL, gpu_ids=(f"sim{at}",)) for at in (0, 1)}
    node.apply("s", [DesiredWorker(name, "p", 1, Want.RUN, launch=order) for name, order in orders.items()])
    await eventually(lambda: [report.phase for report in node.reports()] == [ReportedPhase.READY] * 2)
    ports = [int(_engine_env(short_dir, name)["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for name in orders]
    hosts = {_engine_env(short_dir, name)["VLLM_NIXL_SIDE_CHANNEL_HOST"] for name in orders}
    assert len(set(ports)) == 2
    assert hosts == {"127.0.0.1"}
    for port in ports:
        socket.create_connection(("127.0.0.1", port), 5).close()  # the engine listens there
    stop = [DesiredWorker(name, "p", 2, Want.STOP, launch=order) for name, order in orders.items()]
    node.apply("s", stop)
    await eventually(lambda: [report.phase for report in node.reports()] == [ReportedPhase.STOPPED] * 2)
    for port in ports:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen()  # nothing holds it any more


async def test_no_port_left_is_the_nodes_trouble(short_dir: Path, marker: str) -> None:
    """Not a refusal of the launch: the start is tried again once there is a port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = Node(node_setup(short_dir, marker, gpus=2, starts=2, port_first=port, port_last=port))
        try:
            node.apply("s", [DesiredWorker("w-1", "p", 1, Want.RUN, launch=launch(*NIXL))])
            await eventually(lambda: node.reports()[0].phase is ReportedPhase.FAILED)
            ending = node.reports()[0].exit
            assert ending is not None
            assert ending.reason == "PORTS_EXHAUSTED"
            assert str(port) in ending.message
        finally:
            await node.close()
            kill_marked(marker)
