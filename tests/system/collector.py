"""A real OTLP receiver over gRPC: what the processes export, kept for a test to look at."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, object]


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps every span."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.endpoint = ""

    def Export(self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext) -> object:
        for resource in request.resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}.get("service.name", "")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._keep(service, span)
        return pb.ExportTraceServiceResponse()

    def _keep(self, service: str, span: object) -> None:
        values = {
            a.key: a.value.string_value or a.value.int_value or a.value.double_value
            for a in span.attributes  # type: ignore[attr-defined]
        }
        found = Span(
            service,
            span.name,  # type: ignore[attr-defined]
            span.trace_id.hex(),  # type: ignore[attr-defined]
            span.span_id.hex(),  # type: ignore[attr-defined]
            span.parent_span_id.hex(),  # type: ignore[attr-defined]
            span.start_time_unix_nano / 1e9,  # type: ignore[attr-defined]
            span.end_time_unix_nano / 1e9,  # type: ignore[attr-defined]
            values,
        )
        with self._lock:
            self._spans.append(found)

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans() if span.trace_id == trace_id]


@contextmanager
def collecting() -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector and the environment that makes a process export to it."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    try:
        yield collector, environ
    finally:
        server.stop(0)
