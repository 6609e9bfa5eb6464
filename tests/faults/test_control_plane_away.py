"""A router that knows only what was: it routes by the table that it had, and shims keep that safe.

F4 F13 CP14 RT9 and DESIGN rule 8: real processes; a drain of which it never heard; old incarnations and gone workers in
the table on disk; a damaged file.
"""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import uvloop

from router.last_table import decode
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.faults.blows import FaultStack, get, wait_for
from tests.faults.conftest import TIMING
from tests.faults.wire import Wire
from tests.system import load
from tests.system.load import Result
from tests.system.stack import Stack
from tests.system.trace import Arrival


def health(stack: Stack) -> dict[str, object]:
    found: dict[str, object] = json.loads(get(stack.http_port, "/health")[1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_router_that_starts_without_its_control_plane(stack: FaultStack) -> None:
    stack.pool(workers=3)
    table = stack.folder / "router" / "router.table"
    wait_for("the whole table on disk", lambda: table.exists() and len(decode(table.read_bytes()).workers) == 3)
    stack.kill("router")
    # While the router is away one worker is stopped for good and another one's engine is started anew.
    stack.pool(workers=2, most=2, wait=False)
    wait_for("two workers", lambda: len(stack.workers("ACTIVE")) == 2 and not stack.workers("DRAINING"))
    renewed = stack.workers("ACTIVE")[0]
    os.kill(stack.pid("engine", renewed.worker_id), signal.SIGKILL)
    wait_for(
        "a new incarnation",
        lambda: (
            len(active := stack.workers("ACTIVE")) == 2 and all(w.incarnation != renewed.incarnation for w in active)
        ),
    )
    stack.kill("controlplane")

    stack.start("router")
    wait_for("the router by its last table", lambda: get(stack.http_port, "/ready")[0] == 200)
    assert health(stack)["controlplane"] == "away"
    results = [stack.ask(number=number) for number in range(12)]
    assert all(result.exact for result in results), [r for r in results if not r.exact]

    stack.start("controlplane")
    wait_for("the control plane's own table", lambda: health(stack)["controlplane"] == "connected")
    assert stack.ask().exact

    stack.kill("router")
    stack.kill("controlplane")
    whole = table.read_bytes()
    table.write_bytes(whole[: len(whole) // 2])
    stack.start("router")
    wait_for("an answer", lambda: get(stack.http_port, "/ready")[0] == 503)
    assert "router.table is not used" in stack.log("router")
    assert stack.ask().status == 503
    stack.start("controlplane")
    stack.wait_routable("demo")
    assert stack.ask().exact
    wait_for("a whole file again", lambda: table.stat().st_size > len(whole) // 2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_router_that_does_not_know_of_a_drain(tmp_path: Path) -> None:
    """F4: its worker drains with a long stream, and the control plane dies before it can tell: the shim refuses, the
    request goes elsewhere, and no client sees anything of it."""
    stack = FaultStack(tmp_path, gpus=4, timing=TIMING)
    wire = Wire(stack.controlplane_port)
    command = stack.commands["router"]
    command[command.index("--controlplane") + 1] = f"127.0.0.1:{wire.port}"
    try:
        stack.start()
        stack.pool(workers=2, drain_timeout_s=60.0)
        wait_for("both in the table", lambda: '"active":2' in json.dumps(health(stack), separators=(",", ":")))
        results = uvloop.run(_drained(stack, wire))
        assert all(result.exact for result in results), next(r for r in results if not r.exact)
        assert stack.counted("router", "springtide_router_retries_total") >= 1, "the drained worker was never asked"
        wire.deaf.clear()
        stack.start("controlplane")
        stack.check_whole(active=2)
    finally:
        stack.stop()
        wire.close()
    assert stack.strays() == []


async def _drained(stack: FaultStack, wire: Wire) -> list[Result]:
    """Long streams on both workers; one drains unheard; then short requests, of which the router sends it some."""
    asking = [
        asyncio.ensure_future(load.ask(stack.http, "demo", Arrival(n, 0, 20, 1500), salt="old")) for n in range(4)
    ]
    await asyncio.to_thread(wait_for, "load on both", lambda: all(w.in_flight > 0 for w in stack.workers("ACTIVE")), 20)
    await asyncio.to_thread(_drain_unheard, stack, wire)
    for round_ in range(5):
        some = (load.ask(stack.http, "demo", Arrival(10 * round_ + n, 0, 20, 5), salt="new") for n in range(6))
        asking += [asyncio.ensure_future(one) for one in some]
        await asyncio.gather(*asking[4:])
    return await asyncio.gather(*asking)


def _drain_unheard(stack: FaultStack, wire: Wire) -> None:
    """A worker drains, and the router hears nothing of it: what the control plane says is lost on the way."""
    wire.deaf.set()
    worker_id = stack.workers("ACTIVE")[0].worker_id
    stack.operator.DrainWorker(cp.DrainWorkerRequest(worker_id=worker_id), timeout=10)
    wait_for("a shim that refuses", lambda: stack.by_id()[worker_id].phase == t.WORKER_PHASE_FINISHING)
    stack.kill("controlplane")
