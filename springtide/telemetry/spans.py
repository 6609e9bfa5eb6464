"""Finished spans with explicit times, sent by the OpenTelemetry SDK when an OTEL_* variable asks for it.

A scaling event lives for minutes in several processes, so nobody holds an open span: each process emits its part when
that part is over, as a child of the traceparent that the records carry.
"""

import logging
import os
import threading
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from springtide.telemetry.redaction import is_secret_name, redact
from springtide.telemetry.traceparent import TraceContext, child_traceparent, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor

log = logging.getLogger(__name__)

AttributeValue = str | bool | int | float | tuple[str, ...] | None
SCOPE = "springtide"


class SpanKind(StrEnum):
    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


class _Exporting:
    """The SDK's parts that explicit spans need."""

    def __init__(self, processor: "SpanProcessor", resource: "Resource") -> None:
        self.processor = processor
        self.resource = resource


_exporting: _Exporting | None = None


def tracing_enabled() -> bool:
    """Whether spans leave this process."""
    return _exporting is not None


def start_tracing(service_name: str, *, instance_id: str = "") -> None:
    """Starts export if OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT or OTEL_TRACES_EXPORTER asks for it; else does nothing."""
    exporter = _exporter_from_environment()
    if exporter is None:
        return
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    shutdown(timeout_s=0.5)
    resource = Resource.create(_resource_attributes(service_name, instance_id))
    processor = BatchSpanProcessor(exporter)
    # Libraries that are instrumented by the OpenTelemetry API find a provider too.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    attach(processor, resource)


def attach(processor: "SpanProcessor", resource: "Resource") -> None:
    """Sends explicit spans to `processor`: what `start_tracing` does, open to tests and to embedders."""
    global _exporting
    _exporting = _Exporting(processor, resource)


def emit_span(
    name: str,
    *,
    traceparent: str | None,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, AttributeValue] | None = None,
    kind: SpanKind | str = SpanKind.INTERNAL,
    span_id: str | None = None,
    as_root: bool = False,
    error: str | None = None,
) -> str:
    """Emits a finished span and returns its own traceparent, also when nothing is exported.

    The span is a child of `traceparent` with a fresh id, or with `span_id` (16 hex digits) where children were made
    before it. `as_root`: the span is exactly the one that `traceparent` names, without a parent. Without a usable
    `traceparent` it starts a trace. Times are seconds since the epoch; an end before the start is moved to it.
    Attributes that are None are left out. `error` sets the status and its sentence.
    """
    parent = parse_traceparent(traceparent)
    if as_root and parent is not None:
        own, parent = parent, None
    else:
        own = parse_traceparent(child_traceparent(traceparent)) or _unreachable()
        if span_id:
            own = parse_traceparent(str(own._replace(span_id=span_id.lower()))) or own
    if _exporting is not None and own.sampled:
        _emit(_exporting, name, own, parent, start_s, max(start_s, end_s), attributes or {}, SpanKind(kind), error)
    return str(own)


def shutdown(timeout_s: float = 3.0) -> None:
    """Sends what is left, for at most `timeout_s`: a collector that is away never holds up an exit."""
    global _exporting
    ending, _exporting = _exporting, None
    if ending is None:
        return
    worker = threading.Thread(target=ending.processor.shutdown, name="telemetry-flush", daemon=True)
    worker.start()
    worker.join(timeout_s)
    if worker.is_alive():
        log.warning("spans were still being sent after %.1f s: the rest is dropped", timeout_s)


def _emit(
    exporting: _Exporting,
    name: str,
    own: TraceContext,
    parent: TraceContext | None,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, AttributeValue],
    kind: SpanKind,
    error: str | None,
) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    def context(ids: TraceContext, remote: bool) -> trace.SpanContext:
        flags = trace.TraceFlags(ids.flags)
        return trace.SpanContext(int(ids.trace_id, 16), int(ids.span_id, 16), is_remote=remote, trace_flags=flags)

    code = trace.StatusCode.ERROR if error else trace.StatusCode.UNSET
    span = ReadableSpan(
        name=name,
        context=context(own, remote=False),
        parent=context(parent, remote=True) if parent else None,
        resource=exporting.resource,
        attributes={k: _clean(v) for k, v in attributes.items() if v is not None and not is_secret_name(k)},
        kind=trace.SpanKind[kind.value],
        status=trace.Status(code, redact(error) if error else None),
        start_time=int(start_s * 1e9),
        end_time=int(end_s * 1e9),
        instrumentation_scope=InstrumentationScope(SCOPE),
    )
    exporting.processor.on_end(span)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return tuple(redact(str(item)) for item in value)
    return value


def _exporter_from_environment() -> Any:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "").lower()
    endpoint = _variable("ENDPOINT")
    if wanted == "console":
        return _console_exporter()
    if wanted == "none" or (not endpoint and wanted != "otlp"):
        return None
    protocol = _variable("PROTOCOL") or "grpc"
    if protocol != "grpc":
        log.warning(
            "OTEL_EXPORTER_OTLP_PROTOCOL = %r: only grpc is sent. Point the endpoint at the collector's gRPC port "
            "(usually 4317) and unset the variable; no trace is exported until then.",
            protocol,
        )
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(insecure=_insecure(endpoint))


def _variable(name: str) -> str:
    """The variable for traces, else the one for all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _insecure(endpoint: str) -> bool | None:
    """Plain text for an endpoint without a scheme unless ..._INSECURE says otherwise; None: the SDK decides."""
    return None if _variable("INSECURE") or "://" in endpoint or not endpoint else True


def _console_exporter() -> Any:
    import sys

    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n")


def _resource_attributes(service_name: str, instance_id: str) -> dict[str, str]:
    from springtide import __version__

    found = {"service.version": __version__, "service.namespace": "springtide"}
    if "OTEL_SERVICE_NAME" not in os.environ:
        found["service.name"] = service_name
    if instance_id:
        found["service.instance.id"] = instance_id
    return found


def _unreachable() -> TraceContext:
    raise AssertionError("child_traceparent always gives a valid context")
