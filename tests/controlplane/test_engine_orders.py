"""Verbs from the operator's call to the agent and back, and the calls for sleep, loans and weights."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from springtide import errors
from springtide.errors import SpringtideError
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from springtide.rpc import channel, decoded_errors
from springtide.v1 import agent_pb2, types_pb2
from springtide.v1 import controlplane_pb2 as pb
from springtide.wire import agent as agent_wire
from springtide.wire import verbs as wire
from tests.controlplane.harness import FakeAgent, FakeRouter, operator, start_control, until


class VerbAgent(FakeAgent):
    """Answers verbs with `answer`, or not at all while `deaf`; knows sleep and pauses."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.answer: dict[str, object] | SpringtideError = {}
        self.deaf = False
        self.seen: list[agent_pb2.VerbOrder] = []
        self.outbox: list[agent_pb2.VerbResult] = []

    def _take(self, response: agent_pb2.SessionResponse) -> None:
        for order in response.verbs:
            self.seen.append(order)
            if not self.deaf:
                result = (
                    wire.failed(order.order_id, self.answer)
                    if isinstance(self.answer, SpringtideError)
                    else wire.done(order.order_id, self.answer)
                )
                self.outbox.append(result)
                self.say()
        super()._take(response)
        for worker_id, desired in self.desired.items():
            report = self.reports.get(worker_id)
            if report is None or report.phase in (ReportedPhase.STOPPED, ReportedPhase.FAILED):
                continue
            phase = report.phase
            if desired.want is Want.SLEEP:
                phase = ReportedPhase.SLEEPING
            elif desired.want is Want.RUN:
                phase = ReportedPhase.PAUSED if desired.paused else ReportedPhase.READY
            version = desired.weight_version or report.weight_version
            self.reports[worker_id] = dataclasses.replace(report, phase=phase, weight_version=version)
            self.say()

    async def _requests(self) -> Any:
        async for request in super()._requests():
            yield request
            while self.outbox:
                yield agent_pb2.SessionRequest(verb_result=self.outbox.pop(0))


@pytest.fixture
async def served() -> AsyncIterator[Any]:
    """A control plane, its stub, an agent that knows verbs, and the ACTIVE worker chat-1."""
    control, address = await start_control()
    async with channel(address) as ch, VerbAgent(address) as agent, FakeRouter(address) as router:
        ops = operator(ch)
        spec = types_pb2.PoolSpec(name="chat", engine="sim", min_workers=1, max_workers=3)
        spec.policy.name = "static"
        await ops.ApplyPool(pb.ApplyPoolRequest(spec=spec))
        await until(lambda: "chat-1" in router.table.workers)
        yield ops, agent, router
    await control.stop()


async def verb(ops: Any, name: str, timeout_s: int = 10, worker_id: str = "chat-1", **args: str) -> dict[str, Any]:
    request = pb.WorkerVerbRequest(worker_id=worker_id, verb=name, args=args, timeout=Duration(seconds=timeout_s))
    with decoded_errors():
        answer = await ops.WorkerVerb(request)
    return dict(answer.result)


async def test_an_answer_comes_back(served: Any) -> None:
    """NA9: order, arguments and incarnation go down; values come up; it is sent no more after its answer."""
    ops, agent, _ = served
    agent.answer = {"running": 3, "idle": False, "missing": {"release": "--enable-sleep-mode"}}
    answer = await verb(ops, "abort", id="r1")
    assert (answer["running"], answer["idle"]) == (3, False)
    order = agent.seen[0]
    assert (order.worker_id, order.verb, dict(order.args), order.timeout_s) == ("chat-1", "abort", {"id": "r1"}, 10)
    assert order.incarnation == agent.reports["chat-1"].incarnation
    answers = agent.answers
    await until(lambda: agent.answers > answers + 3)
    told = len(agent.seen)  # it may have been sent again before its answer was read
    await until(lambda: agent.answers > answers + 6)
    assert len(agent.seen) == told
    assert {order.order_id for order in agent.seen} == {agent.seen[0].order_id}


async def test_an_error_keeps_its_class_and_its_remedy(served: Any) -> None:
    """NA9: UNIMPLEMENTED with the flag that is missing."""
    ops, agent, _ = served
    agent.answer = errors.Unimplemented(
        "engine vllm cannot release.",
        field="engine",
        remedy="Start it so.",
        metadata={"missing": "--enable-sleep-mode"},
    )
    with pytest.raises(errors.Unimplemented, match="cannot release") as raised:
        await verb(ops, "flush_cache")
    assert raised.value.remedy == "Start it so."
    assert raised.value.metadata["missing"] == "--enable-sleep-mode"


async def test_an_agent_that_does_not_answer(served: Any) -> None:
    """F6: an order without an answer goes to the agent's next session; the call ends; a node that is away is told."""
    ops, agent, _ = served
    agent.deaf = True
    call = asyncio.create_task(verb(ops, "flush_cache", timeout_s=20))
    await until(lambda: agent.seen)
    first = agent.seen[0].order_id
    await agent.die()
    agent.deaf = False
    await agent.__aenter__()
    assert await call == {}
    assert agent.seen[-1].order_id == first

    agent.deaf = True
    with pytest.raises(errors.Unavailable) as raised:
        await verb(ops, "flush_cache", timeout_s=1)
    assert raised.value.reason == "VERB_TIMEOUT"
    await agent.die()

    async def refused() -> bool:
        try:
            await verb(ops, "flush_cache", timeout_s=1)
        except errors.Unavailable as error:
            return error.reason == "NODE_NOT_CONNECTED"
        return False

    await until(refused)


async def test_what_is_asked_wrongly(served: Any) -> None:
    ops, _, _ = served
    with pytest.raises(errors.NotFound):
        await verb(ops, "flush_cache", worker_id="nope-1")
    with pytest.raises(errors.InvalidArgument, match="no time for a verb"):
        await verb(ops, "flush_cache", timeout_s=0)
    with pytest.raises(errors.FailedPrecondition), decoded_errors():
        await ops.LendWorker(pb.LendWorkerRequest(worker_id="chat-1", to="x"))
    with pytest.raises(errors.InvalidArgument), decoded_errors():
        await ops.SetWeights(pb.SetWeightsRequest(pool="chat", version="v1"))


async def test_a_pause_is_recorded_and_taken_back_when_the_engine_cannot(served: Any) -> None:
    """NA9: the shim is closed before the engine hears of it; the record opens again only by resume."""
    ops, agent, router = served
    await verb(ops, "pause", mode="keep")
    assert agent.seen[-1].verb == "pause"
    await until(lambda: "chat-1" not in router.table.workers)
    worker = (await ops.GetWorker(pb.GetWorkerRequest(worker_id="chat-1"))).worker
    assert worker.admission == types_pb2.WORKER_ADMISSION_PAUSED
    await verb(ops, "resume")
    await until(lambda: "chat-1" in router.table.workers)
    agent.answer = errors.Unimplemented("no such control.")
    with pytest.raises(errors.Unimplemented):
        await verb(ops, "pause")
    await until(lambda: "chat-1" in router.table.workers)


async def test_sleep_loan_and_wake_by_call(served: Any) -> None:
    """NA8, RL8."""
    ops, agent, _ = served
    await ops.SleepWorker(pb.SleepWorkerRequest(worker_id="chat-1", reason="for the night"))

    async def phase() -> int:
        return int((await ops.GetWorker(pb.GetWorkerRequest(worker_id="chat-1"))).worker.phase)

    async def asleep() -> bool:
        return await phase() == types_pb2.WORKER_PHASE_SLEEPING

    await until(asleep)
    assert (await ops.GetPool(pb.GetPoolRequest(name="chat"))).pool.status.sleeping == 1
    lent = (await ops.LendWorker(pb.LendWorkerRequest(worker_id="chat-1", to="training"))).worker
    assert (lent.lent_to, list(lent.gpu_ids)) == ("training", list(agent.reports["chat-1"].gpu_ids))
    with pytest.raises(errors.FailedPrecondition, match="lent to training"), decoded_errors():
        await ops.ActivateWorker(pb.ActivateWorkerRequest(worker_id="chat-1"))
    await ops.ReclaimWorker(pb.ReclaimWorkerRequest(worker_id="chat-1"))
    await ops.ActivateWorker(pb.ActivateWorkerRequest(worker_id="chat-1"))
    await until(lambda: agent.desired["chat-1"].want is Want.RUN)


async def test_weights_by_call(served: Any) -> None:
    """RL4, CP19."""
    ops, agent, router = served
    await ops.SetWeights(pb.SetWeightsRequest(pool="chat", version="v2", source="/weights/2"))
    await until(lambda: agent.reports["chat-1"].weight_version == "v2")
    await until(lambda: router.table.workers.get("chat-1") and router.table.workers["chat-1"].weight_version == "v2")
    status = (await ops.GetPool(pb.GetPoolRequest(name="chat"))).pool.status
    assert (status.weight_version, status.weight_source, status.weights_behind) == ("v2", "/weights/2", 0)
    assert agent.desired["chat-1"].weight_source == "/weights/2"


def test_results_survive_the_wire() -> None:
    """Each class of error comes back as itself."""
    for cls in (errors.Unavailable, errors.Exhausted, errors.Internal, errors.Conflict, errors.FailedPrecondition):
        result = wire.failed("o1", cls("it went wrong.", reason="WHY", retry_after_s=1.0))
        again = agent_pb2.VerbResult.FromString(result.SerializeToString())
        with pytest.raises(cls, match="it went wrong") as raised:
            wire.outcome(again)
        assert raised.value.reason == "WHY"
    assert wire.outcome(wire.done("o1", {"a": [1, None, "x"]})) == {"a": [1, None, "x"]}


def test_desired_and_report_keep_what_sleep_needs() -> None:
    desired = DesiredWorker(
        "w-1", "p", 3, Want.SLEEP, sleep_level=2, start_asleep=True, weight_version="v", weight_source="/w"
    )
    assert agent_wire.desired_from_proto(agent_wire.desired_to_proto(desired)) == desired
