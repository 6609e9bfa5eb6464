"""The whole system on the simulated engine under the bursty code trace: the pool breathes, nothing is lost.

CP1 CP2 CP3 NA6 RT1 RT2 RT4 RT5 RT6 CM6 CM7 SM7: zero failed requests, every answer exact, every scaling event one
trace, and events and decisions that agree with it.
"""

import asyncio
from pathlib import Path

import grpc
import openai
import pytest
import uvloop

from springtide.v1 import generation_pb2 as g
from springtide.v1 import types_pb2 as t
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from tests.system import load, trace
from tests.system.collector import Collector, Span, collecting
from tests.system.conftest import TIMING, apply_demo
from tests.system.load import Report, Result
from tests.system.stack import Stack, wait_for
from tests.system.trace import Arrival

SALT = "replay"


async def _ask_grpc(stub: GenerationServiceStub, arrival: Arrival) -> Result:
    result = Result(arrival)
    request = g.GenerateRequest(pool="demo", sampling=g.Sampling(max_tokens=arrival.output_tokens))
    for message in load.messages(arrival, SALT):
        request.chat.messages.add(**message)
    finished = 0
    try:
        async for response in stub.Generate(request, timeout=60):
            result.text += response.tokens.text
            finished += response.HasField("finished")
        result.status, result.done = 200, finished == 1
    except grpc.aio.AioRpcError as error:
        result.error = f"{error.code()}: {error.details()}"
    result.exact = result.ok and result.text == load.expected(arrival, SALT)
    return result


async def _ask_openai(client: openai.AsyncOpenAI, arrival: Arrival) -> Result:
    result = Result(arrival)
    try:
        stream = await client.chat.completions.create(
            model="demo",
            messages=load.messages(arrival, SALT),  # type: ignore[arg-type]
            max_tokens=arrival.output_tokens,
            stream=True,
        )
        async for chunk in stream:  # type: ignore[union-attr]
            result.text += "".join(choice.delta.content or "" for choice in chunk.choices)
        result.status, result.done = 200, True
    except openai.OpenAIError as error:
        result.error = repr(error)
    result.exact = result.ok and result.text == load.expected(arrival, SALT)
    return result


async def _replay(stack: Stack, arrivals: list[Arrival]) -> Report:
    """Mostly HTTP streams; of sixteen requests two are not streamed, one is gRPC and one the official client's."""
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.router_port}") as channel,
        openai.AsyncOpenAI(base_url=stack.http + "/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        stub = GenerationServiceStub(channel)

        def send(arrival: Arrival) -> "asyncio.Task[Result]":
            kind = arrival.number % 16
            if kind == 3:
                return asyncio.ensure_future(_ask_grpc(stub, arrival))
            if kind == 7:
                return asyncio.ensure_future(_ask_openai(client, arrival))
            ask = load.ask(stack.http, "demo", arrival, salt=SALT, stream=kind not in (5, 11))
            return asyncio.ensure_future(ask)

        return await load.replay(arrivals, send)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_code_trace_scales_the_pool_up_and_down_and_loses_nothing(tmp_path: Path) -> None:
    arrivals = trace.read("code", start_s=0, length_s=1200, compress=20)
    assert len(arrivals) > 3000
    with collecting() as (collector, environ):
        stack = Stack(tmp_path, gpus=4, timing=TIMING, environ=environ)
        try:
            stack.start()
            apply_demo(stack)
            report = uvloop.run(_replay(stack, arrivals))
            assert not report.failed, report.explain()
            assert not report.inexact, report.explain()
            wait_for("the pool's return to one worker", lambda: _settled(stack), 60)
            events, decisions = stack.events(), stack.decisions()
            served = sum(worker.total_served for worker in stack.workers("ACTIVE"))
            assert served > 0  # RT6
            _check_events(events)
            _check_decisions(events, decisions)
            wait_for("the last spans", lambda: not _missing(collector, events), 10)
            _check_traces(collector, events)
        finally:
            stack.stop()
        assert stack.strays() == []


def _settled(stack: Stack) -> bool:
    return [t.WorkerState.Name(w.state) for w in stack.workers("STARTING", "ACTIVE", "DRAINING")] == [
        "WORKER_STATE_ACTIVE"
    ]


def _check_events(events: list[t.Event]) -> None:
    """At least two ups and two downs beyond the first worker; each start completes, each drain completes, in order."""
    ups = [e for e in events if e.action == "scale_up_complete"]
    downs = [e for e in events if e.action == "scale_down_complete"]
    assert len(ups) >= 3
    assert len(downs) >= 2
    assert len(ups) - len(downs) == 1
    assert [e.event_id for e in events] == sorted(e.event_id for e in events)
    bad = {"worker_failed", "worker_lost", "drain_aborted"}
    assert not [e for e in events if e.action in bad]
    life: dict[str, str] = {}
    legal = {
        "scale_up_start": {"", "scale_down_complete"},
        "scale_up_complete": {"scale_up_start"},
        "scale_down_start": {"scale_up_complete", "drain_cancelled"},
        "scale_down_complete": {"scale_down_start"},
        "drain_cancelled": {"scale_down_start"},
        "start_cancelled": {"scale_up_start"},
    }
    for event in events:
        if event.action in legal:
            before = life.get(event.target, "")
            if before == "start_cancelled":
                before = ""
            assert before in legal[event.action], (before, event)
            life[event.target] = event.action


def _check_decisions(events: list[t.Event], decisions: list[t.Decision]) -> None:
    """Each event that began something belongs to a decision that names its worker, and the other way round."""
    began = sorted(e.target for e in events if e.action in ("scale_up_start", "scale_down_start", "drain_cancelled"))
    decided = sorted(w for d in decisions if d.result != t.DECISION_RESULT_HOLD for w in d.workers)
    cancelled = sorted(e.target for e in events if e.action == "start_cancelled")
    assert sorted(began + cancelled) == decided
    for decision in decisions:
        assert decision.reason
        assert decision.message


def _wanted_spans(event: t.Event) -> set[str]:
    if event.action == "scale_up_complete":
        return {
            *("springtide.scale_up", "springtide.worker.boot", "springtide.worker.load"),
            "springtide.worker.warm_up",
        }
    return {"springtide.scale_down", "springtide.worker.drain", "springtide.worker.release"}


def _missing(collector: Collector, events: list[t.Event]) -> list[str]:
    """What the traces still lack."""
    lacking = []
    for event in events:
        if event.action in ("scale_up_complete", "scale_down_complete"):
            names = {span.name for span in collector.trace(event.trace_id)}
            lacking += [f"{event.action} {event.target}: {name}" for name in _wanted_spans(event) - names]
    return lacking


def _check_traces(collector: Collector, events: list[t.Event]) -> None:
    """One trace per scaling event, one root in it, all else its children, from three processes up to a routed token."""
    finished = [e for e in events if e.action in ("scale_up_complete", "scale_down_complete")]
    assert len({e.trace_id for e in finished}) == len(finished)
    routed = 0
    for event in finished:
        spans = collector.trace(event.trace_id)
        roots = [span for span in spans if not span.parent_id]
        assert [span.name for span in roots] == [_root_name(event)], (event, [s.name for s in spans])
        ids = {span.span_id for span in spans}
        assert all(span.parent_id in ids for span in spans if span.parent_id), [s.name for s in spans]
        assert {span.attributes.get("springtide.worker") for span in spans} == {event.target}
        routed += _routed_first_token(roots[0], spans)
    assert routed >= 3  # every worker that came up and was needed


def _root_name(event: t.Event) -> str:
    return "springtide.scale_up" if event.action == "scale_up_complete" else "springtide.scale_down"


def _routed_first_token(root: Span, spans: list[Span]) -> bool:
    tokens = [span for span in spans if span.name == "springtide.route.first_token"]
    assert len(tokens) <= 1
    return bool(tokens) and tokens[0].service == "springtide-router" and tokens[0].end_s >= root.start_s
