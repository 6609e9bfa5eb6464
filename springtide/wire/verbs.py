"""Verbs on the wire: orders for one engine, and what came of them. Errors keep their class, reason and remedy."""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct

from springtide import errors
from springtide.errors import SpringtideError
from springtide.v1 import agent_pb2 as pb

_CLASSES: Mapping[int, type[SpringtideError]] = {
    grpc.StatusCode[cls.grpc_code].value[0]: cls
    for cls in (
        errors.InvalidArgument,
        errors.NotFound,
        errors.FailedPrecondition,
        errors.Conflict,
        errors.Unavailable,
        errors.Exhausted,
        errors.Unimplemented,
        errors.Internal,
    )
}
_FIELDS = ("field", "value", "remedy")


def done(order_id: str, result: Mapping[str, object]) -> pb.VerbResult:
    """A verb that was done; numbers of `result` become doubles."""
    return pb.VerbResult(order_id=order_id, result=ParseDict(dict(result), Struct()))


def failed(order_id: str, error: SpringtideError) -> pb.VerbResult:
    """A verb that was not."""
    code: int = grpc.StatusCode[error.grpc_code].value[0]
    return pb.VerbResult(
        order_id=order_id, code=code, reason=error.reason, message=error.message, metadata=error.details()
    )


def outcome(result: pb.VerbResult) -> dict[str, Any]:
    """What a done verb answered. Raises the error of one that was not."""
    if result.code == 0:
        return MessageToDict(result.result)
    cls = _CLASSES.get(result.code, errors.Internal)
    error = cls.__new__(cls)
    SpringtideError.__init__(
        error,
        result.message,
        reason=result.reason,
        field=result.metadata.get("field"),
        value=result.metadata.get("value"),
        remedy=result.metadata.get("remedy"),
        metadata={key: text for key, text in result.metadata.items() if key not in _FIELDS},
    )
    raise error
