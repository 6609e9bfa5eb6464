"""A router that starts while the control plane is away: it routes by the table that it had, and shims keep that safe.

F13 CP14 and DESIGN rule 8: real processes; old incarnations and gone workers in the table on disk; a damaged file.
"""

import json
import os
import signal

import pytest

from router.last_table import decode
from tests.faults.blows import FaultStack, get, wait_for
from tests.system.stack import Stack


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
    assert all(result.exact for result in results), results

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
