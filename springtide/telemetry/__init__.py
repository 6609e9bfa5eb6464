"""Logs, traces and metrics of a process: `setup` once at the start, `shutdown` once at the end.

    telemetry.setup("springtide-router", level="info", instance_id=router_id)
    ...
    telemetry.emit_span("springtide.route.first_token", traceparent=parent, start_s=t0, end_s=now)
    ...
    telemetry.shutdown()

Traces leave the process only when a standard OTEL_* variable names an endpoint; ids are made all the same, so that logs
and records can be joined without a collector.
"""

from springtide.telemetry.logs import bind_traceparent, configure_logging
from springtide.telemetry.prometheus import PrometheusServer, prometheus_server
from springtide.telemetry.redaction import redact
from springtide.telemetry.spans import SpanKind, emit_span, shutdown, start_tracing, tracing_enabled
from springtide.telemetry.traceparent import (
    TraceContext,
    child_traceparent,
    new_traceparent,
    parse_traceparent,
    trace_id_of,
)

__all__ = [
    "PrometheusServer",
    "SpanKind",
    "TraceContext",
    "bind_traceparent",
    "child_traceparent",
    "configure_logging",
    "emit_span",
    "new_traceparent",
    "parse_traceparent",
    "prometheus_server",
    "redact",
    "setup",
    "shutdown",
    "trace_id_of",
    "tracing_enabled",
]


def setup(service_name: str, *, level: str | int = "INFO", instance_id: str = "") -> None:
    """Configures the process's logging and, where OTEL_* variables ask for it, its trace export.

    `level`: a level name, optionally followed by levels of single loggers: "info,controlplane.loops=debug".
    Raises InvalidArgument for a level that does not exist.
    """
    configure_logging(service_name, level=level)
    start_tracing(service_name, instance_id=instance_id)
