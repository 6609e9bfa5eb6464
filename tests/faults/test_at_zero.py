"""A pool at zero: the entry stays up, what asks is held and answered, and what loads for it is not taken away.

CP3 RT3 RT4, F37 F38: real processes, engines whose start takes longer than every window of the policy.
"""

import asyncio
import json

import pytest
import uvloop

from tests.faults.blows import FaultStack, get, wait_for
from tests.system import load
from tests.system.load import Result
from tests.system.trace import Arrival

ENGINE = ("--startup-s", "2.5", "--decode-base-ms", "5", "--max-num-seqs", "8")
POLICY = {"monitoring_interval": 0.25, "min_stable_period": 0.5, "scale_up_cooldown": 0.5, "scale_down_cooldown": 0.5}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_to_zero_and_back(stack: FaultStack) -> None:
    stack.pool(min_workers=0, workers=0, most=3, engine_args=ENGINE, policy=POLICY)

    async def burst(first: int) -> list[Result]:
        return await asyncio.gather(
            *(load.ask(stack.http, "demo", Arrival(first + n, 0, 10, 8), salt="zero") for n in range(20))
        )

    for round_ in range(2):
        wait_for("nothing there", lambda: not stack.workers("STARTING", "ACTIVE", "DRAINING"))
        assert get(stack.http_port, "/health")[0] == get(stack.http_port, "/ready")[0] == 200
        models = json.loads(get(stack.http_port, "/v1/models")[1])["data"]
        assert [model["id"] for model in models] == ["demo"]
        before = len(stack.actions())
        results = uvloop.run(burst(100 * round_))
        assert all(result.exact for result in results), next(r for r in results if not r.exact)
        first_up = stack.actions()[before:].index("scale_up_complete")
        cancelled = stack.actions()[before : before + first_up]
        assert "start_cancelled" not in cancelled, "what loads for those who wait was taken away"
