"""The relay that router and shim share: HTTP/1.1 in, HTTP/1.1 out, tokens untouched in between.

server = RelayServer(director, Limits())
port = await server.start("127.0.0.1", 0)
...
await server.close(drain_s=30)
"""

from springtide.dataplane.heads import FAULT_HEADER, INCARNATION_HEADER, REFUSAL_HEADER, REQUEST_ID_HEADER
from springtide.dataplane.messages import (
    Address,
    Answer,
    Director,
    InvalidJson,
    Limits,
    Outcome,
    OutcomeKind,
    Reply,
    Request,
    Retry,
    Route,
    ShapeError,
    Shaper,
    TcpAddress,
    UnixAddress,
    error_body,
    error_reply,
    parse_address,
)
from springtide.dataplane.server import RelayServer
from springtide.dataplane.upstream import UpstreamPool

__all__ = [
    "FAULT_HEADER",
    "INCARNATION_HEADER",
    "REFUSAL_HEADER",
    "REQUEST_ID_HEADER",
    "Address",
    "Answer",
    "Director",
    "InvalidJson",
    "Limits",
    "Outcome",
    "OutcomeKind",
    "RelayServer",
    "Reply",
    "Request",
    "Retry",
    "Route",
    "ShapeError",
    "Shaper",
    "TcpAddress",
    "UnixAddress",
    "UpstreamPool",
    "error_body",
    "error_reply",
    "parse_address",
]
