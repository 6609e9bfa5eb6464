"""What an operator sees from outside while parts are away: the age of the table, and what links carry.

F4 F13 RT9 CM7: real processes; a killed control plane, a router that starts without one, a killed shim.
"""

import os
import signal

import pytest

from tests.faults.blows import FaultStack, get, wait_for


def shown(stack: FaultStack, process: str) -> dict[str, float]:
    """Samples of a process by name and labels as they stand in its text."""
    address = stack.metrics_address(process)
    lines = get(int(address.rpartition(":")[2]), "/metrics")[1].decode().splitlines()
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x and x[0] != "#")}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_age_of_the_table(stack: FaultStack) -> None:
    """F13 RT9: small while the control plane says so, growing while it is away, unknown in a life without it."""
    stack.pool(workers=1)
    age, connected = "springtide_router_table_age_seconds", "springtide_router_connected"
    wait_for("a confirmed table", lambda: age in (found := shown(stack, "router")) and found[connected] == 1)
    stack.kill("controlplane")
    wait_for("that it is away", lambda: shown(stack, "router")[connected] == 0)
    first = shown(stack, "router")[age]
    wait_for("a table that grows old", lambda: shown(stack, "router")[age] > first + 3)
    assert stack.ask().exact
    stack.start("controlplane")
    wait_for("a confirmed table", lambda: (found := shown(stack, "router"))[connected] == 1 and found[age] < first + 3)

    stack.kill("controlplane")
    stack.kill("router")
    stack.start("router")
    wait_for("the router by its last table", lambda: get(stack.http_port, "/ready")[0] == 200)
    found = shown(stack, "router")
    assert found[connected] == 0
    assert age not in found
    assert stack.ask().exact


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_links_carry(stack: FaultStack) -> None:
    """CM7 F1: both sides of a link show the same; a killed shim is a link that was lost."""
    stack.pool(workers=1)
    for number in range(4):
        assert stack.ask(number=number).exact
    (worker,) = stack.workers("ACTIVE")
    router = shown(stack, "router")
    assert router["springtide_router_links"] == 1
    assert router["springtide_router_link_streams_opened_total"] >= 1
    of = f'pool="demo",worker="{worker.worker_id}"'

    def agree() -> bool:
        here, there = shown(stack, "router"), shown(stack, "nodeagent")
        return there.get(f"springtide_agent_links{{{of}}}") == 1 and all(
            here[f'springtide_router_link_{what}_total{{direction="{one}"}}']
            == there[f'springtide_agent_link_{what}_total{{direction="{other}",{of}}}']
            > 0
            for what in ("bytes", "frames")
            for one, other in (("in", "out"), ("out", "in"))
        )

    wait_for("the same figures at both ends", agree)
    os.kill(stack.pid("shim", worker.worker_id), signal.SIGKILL)
    wait_for(
        "a lost link", lambda: shown(stack, "router").get('springtide_router_links_ended_total{reason="lost"}') == 1
    )
