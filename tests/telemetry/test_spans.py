"""Explicit spans: identity, parentage and times, in memory and over OTLP to a real gRPC receiver."""

import random
import subprocess
import sys

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from springtide import telemetry
from springtide.telemetry import spans


@pytest.fixture
def exported():
    exporter = InMemorySpanExporter()
    spans.attach(SimpleSpanProcessor(exporter), Resource.create({"service.name": "test"}))
    yield exporter.get_finished_spans
    telemetry.shutdown()


def test_traceparent_round_trip_and_rubbish():
    made = telemetry.new_traceparent(random.Random(1))
    assert made == telemetry.new_traceparent(random.Random(1))
    context = telemetry.parse_traceparent(made)
    assert str(context) == made
    assert context is not None
    assert context.sampled
    for text in (None, "", "nonsense", "ff" + made[2:], f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"):
        assert telemetry.parse_traceparent(text) is None
    child = telemetry.child_traceparent(made)
    assert telemetry.trace_id_of(child) == telemetry.trace_id_of(made)
    assert child != made


def test_one_trace_from_root_to_leaf(exported):
    """CM7: the root is emitted last, as the context that everybody already used as parent."""
    root = telemetry.new_traceparent()
    child = telemetry.emit_span(
        "worker.start", traceparent=root, start_s=10.0, end_s=12.5, attributes={"pool": "demo", "n": None}
    )
    leaf = telemetry.emit_span("engine.load", traceparent=child, start_s=10.5, end_s=12.0, kind="CLIENT", error="slow")
    same = telemetry.emit_span("scale", traceparent=root, start_s=9.0, end_s=13.0, as_root=True)
    assert same == root
    by_name = {span.name: span for span in exported()}
    ids = {name: f"{span.context.span_id:016x}" for name, span in by_name.items()}
    assert by_name["scale"].parent is None
    assert f"{by_name['worker.start'].parent.span_id:016x}" == ids["scale"] == root.split("-")[2]
    assert f"{by_name['engine.load'].parent.span_id:016x}" == ids["worker.start"] == child.split("-")[2]
    assert leaf.split("-")[2] == ids["engine.load"]
    assert len({span.context.trace_id for span in by_name.values()}) == 1
    assert by_name["worker.start"].start_time == 10_000_000_000
    assert by_name["worker.start"].end_time == 12_500_000_000
    assert dict(by_name["worker.start"].attributes) == {"pool": "demo"}
    assert by_name["engine.load"].status.description == "slow"
    assert by_name["engine.load"].kind.name == "CLIENT"


def test_given_span_id_clamped_times_and_secrets(exported):
    own = telemetry.emit_span(
        "x",
        traceparent=None,
        start_s=5.0,
        end_s=4.0,
        span_id="00f067aa0ba902b7",
        attributes={"api_key": "k", "m": "token=abc"},
    )
    (span,) = exported()
    assert own.split("-")[2] == "00f067aa0ba902b7"
    assert span.start_time == span.end_time
    assert dict(span.attributes) == {"m": "token=[redacted]"}


def test_unsampled_is_not_exported_and_ids_exist_without_export(exported):
    telemetry.emit_span("x", traceparent=f"00-{'1' * 32}-{'2' * 16}-00", start_s=1, end_s=2)
    assert exported() == ()
    telemetry.shutdown()
    assert not telemetry.tracing_enabled()
    assert telemetry.parse_traceparent(telemetry.emit_span("x", traceparent=None, start_s=1, end_s=2)) is not None


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = []

    async def Export(self, request, context):
        for resource in request.resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


PROGRAM = """
from springtide import telemetry
telemetry.setup("springtide-test", instance_id="node-1")
telemetry.emit_span("worker.drain", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", start_s=1.0, end_s=2.0)
telemetry.shutdown()
"""


async def _run(environ):
    import asyncio

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", **environ},
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, stderr.decode()


async def test_otlp_export_by_the_standard_variables():
    """CM7: OTLP over gRPC, switched on by OTEL_EXPORTER_OTLP_ENDPOINT alone."""
    server, receiver = grpc.aio.server(), Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        code, stderr = await _run({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
    finally:
        await server.stop(0)
    assert code == 0, stderr
    ((service, span),) = receiver.spans
    assert service["service.name"] == "springtide-test"
    assert service["service.instance.id"] == "node-1"
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("worker.drain", "a" * 32, "b" * 16)


async def test_a_dead_collector_does_not_hold_up_the_exit():
    code, _ = await _run({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert code == 0


async def test_an_unknown_protocol_is_said_and_not_fatal():
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    code, stderr = await _run(environ)
    assert code == 0
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" in stderr


def test_setup_imports_no_sdk_without_an_endpoint():
    """Start-up stays fast: the SDK is loaded only when something is exported."""
    program = (
        "import sys; from springtide import telemetry; telemetry.setup('x'); print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env={"PYTHONPATH": "."}, check=True
    )
    assert done.stdout.strip() == "False"
