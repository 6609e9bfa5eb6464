"""More than one of each: routers that share a pool, nodes of which one dies, stores that take turns.

CP12 CP16 RT4 RT6 SM8, F14 F15 F18, DESIGN rules 4, 8 and 10.
"""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest
import uvloop

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.faults.blows import FaultStack, check_outcome, wait_for
from tests.system import load
from tests.system.load import Report, Result
from tests.system.trace import Arrival


async def _through(ports: list[int], count: int, tokens: int) -> Report:
    """Requests spread over the routers."""

    def send(arrival: Arrival) -> "asyncio.Task[Result]":
        base = f"http://127.0.0.1:{ports[arrival.number % len(ports)]}"
        return asyncio.ensure_future(load.ask(base, "demo", arrival, salt="several", timeout_s=60))

    report = await load.replay([Arrival(n, n * 0.01, 20, tokens) for n in range(count)], send)
    for result in report.results:
        check_outcome(result)
    return report


def _second_router(stack: FaultStack) -> int:
    port = stack.add_router("router-2")
    stack.start("router-2")
    wait_for("two routers", lambda: len(stack.status().routers) == 2, 20)
    return port


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_two_routers_share_a_pool_that_is_full(stack: FaultStack) -> None:
    """Each sees only its own half; the shims' bound holds, what is refused waits, nothing fails. One router dies: the
    other's requests do not notice."""
    stack.pool(workers=2, max_in_flight=3)
    port = _second_router(stack)
    most = 0

    async def run() -> Report:
        nonlocal most
        storm = asyncio.ensure_future(_through([stack.http_port, port], 80, 30))
        while not storm.done():
            workers = await asyncio.to_thread(stack.workers, "ACTIVE")
            most = max([most, *(w.in_flight for w in workers)])
            await asyncio.sleep(0.1)
        return await storm

    report = uvloop.run(run())
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert 0 < most <= 3
    stack.check_whole(active=2)

    async def one_dies() -> Report:
        storm = asyncio.ensure_future(_through([stack.http_port, port], 40, 150))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(stack.kill, "router-2")
        return await storm

    report = uvloop.run(one_dies())
    survivors = [result for result in report.results if result.arrival.number % 2 == 0]
    assert all(result.exact for result in survivors), report.explain()
    stack.check_whole(active=2)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_router_that_never_acknowledges_holds_no_drain_up(stack: FaultStack) -> None:
    stack.pool(workers=2)
    _second_router(stack)
    victim = stack.workers("ACTIVE")[0].worker_id
    with stack.stopped(stack.processes["router-2"].pid):
        stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id=victim), timeout=5)
        wait_for("its end", lambda: "scale_down_complete" in stack.actions(victim), 15)
    stack.check_whole(active=2)
    assert stack.ask().exact


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_node_that_dies_for_good_and_comes_back(stack: FaultStack) -> None:
    """Its agent stands still for longer than the lease: replaced on the other node; when it comes back its engines are
    extra and stopped, never above the bound in what is routed."""
    stack.add_agent("node-b", gpus=2)
    stack.start("node-b")
    wait_for("two nodes", lambda: len(stack.status().nodes) == 2, 20)
    stack.pool(workers=2, most=2)
    placed = Counter(w.node_id for w in stack.workers("ACTIVE"))
    assert placed["node-a"] == 2, placed
    pid = stack.pid("nodeagent")
    with stack.stopped(pid):
        wait_for("the node lost", lambda: "node_lost" in stack.actions("node-a"), 20)
        wait_for("its replacement", lambda: _on(stack, "node-b") == 2, 30)
        result = stack.ask()
        assert result.exact, result
        lost = [w for w in stack.workers() if w.phase == t.WORKER_PHASE_LOST]
        assert len(lost) == 2
        assert all(w.gpu_ids for w in lost), "its GPUs stay reserved"
    wait_for("its engines stopped", lambda: len(stack.engines()) == 2, 30)
    stack.check_whole(active=2)
    assert _on(stack, "node-b") == 2
    assert stack.ask().exact


def _on(stack: FaultStack, node: str) -> int:
    return len([w for w in stack.workers("ACTIVE") if w.node_id == node])


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_second_agent_under_the_same_name(stack: FaultStack) -> None:
    """Refused while the first is heard, said on its side; the first goes on. When the first has gone it takes over."""
    stack.pool()
    worker = stack.workers("ACTIVE")[0]
    stack.add_agent("twin", node_id="node-a")
    stack.start("twin")
    wait_for("the refusal", lambda: "NODE_ID_TAKEN" in stack.log("twin"), 20)
    assert stack.processes["twin"].poll() is None
    stack.check_whole(active=1)
    assert stack.workers("ACTIVE")[0].incarnation == worker.incarnation
    assert stack.ask().exact


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_stores_that_take_turns(stack: FaultStack, tmp_path: Path) -> None:
    """A control plane with another data folder at the same address: foreign engines go on, their GPUs count as taken,
    and a pool of the same name does not stop them. The old one back: adopted as they were."""
    stack.pool(workers=2)
    before = {w.worker_id: w.incarnation for w in stack.workers("ACTIVE")}
    engines = {process.pid for process in stack.engines()}
    own = stack.commands["controlplane"]
    foreign = list(own)
    foreign[foreign.index("--data-dir") + 1] = str(tmp_path / "cp-2")
    stack.kill("controlplane")
    stack.commands["controlplane"] = foreign
    stack.start("controlplane")
    wait_for("foreign engines seen", lambda: [n for n in stack.status().nodes if n.foreign_workers == 2], 20)
    assert stack.ask().exact
    stack.apply(name="other", engine="sim", min_workers=3, max_workers=4)
    wait_for("two that fit", lambda: len(stack.workers("ACTIVE")) == 2, 20)
    wait_for("no room", lambda: "CANNOT_PLACE" in str(stack.status().pools[0].status.conditions), 20)
    assert engines <= {process.pid for process in stack.engines()}
    stack.kill("controlplane")
    stack.commands["controlplane"] = own
    stack.start("controlplane")
    wait_for("the old ones", lambda: {w.worker_id: w.incarnation for w in stack.workers("ACTIVE")} == before, 20)
    wait_for("the others foreign", lambda: [n for n in stack.status().nodes if n.foreign_workers == 2], 20)
    stack.wait_routable("demo")
    assert stack.ask().exact
    with pytest.raises(grpc.RpcError):
        stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id="other-1"), timeout=5)
    assert len(stack.engines()) == 4
