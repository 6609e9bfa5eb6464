"""Trace contexts of scaling events, derived and not drawn: the same plan gives the same ids."""

import hashlib


def traceparent_for(store_id: str, revision: int, worker_id: str, generation: int) -> str:
    """A W3C traceparent for the scaling event that gives `worker_id` its `generation`, sampled."""
    digest = hashlib.sha256(f"{store_id}/{revision}/{worker_id}/{generation}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def trace_id_of(traceparent: str) -> str:
    """The 32 hex digits in the middle; empty when there is no context."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) == 4 else ""


def in_trace_of(traceparent: str, span: str) -> str:
    """The span of the context `span` as a part of the trace of `traceparent`."""
    trace_id, parts = trace_id_of(traceparent), span.split("-")
    return "-".join((parts[0], trace_id, *parts[2:])) if trace_id and len(parts) == 4 else span
