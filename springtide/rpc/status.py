"""Errors as google.rpc.Status and back: ErrorInfo always, BadRequest for a field, RetryInfo for a retry."""

import math

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from springtide import errors
from springtide.errors import DOMAIN, SpringtideError

_BY_CODE: dict[str, type[SpringtideError]] = {
    cls.grpc_code: cls
    for cls in (
        errors.InvalidArgument,
        errors.NotFound,
        errors.AlreadyExists,
        errors.FailedPrecondition,
        errors.Conflict,
        errors.Unavailable,
        errors.Exhausted,
        errors.Unimplemented,
        errors.Unauthenticated,
        errors.Internal,
    )
}
_LOST_CALL = "Internal error from Core"  # grpc.aio, when a stream ends under a write: its status is lost
_KNOWN_METADATA = ("field", "value", "remedy")


def to_status(error: SpringtideError) -> status_pb2.Status:
    """The error as a google.rpc.Status that loses nothing but the traceback."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.details())
    details = [info]
    if error.field is not None and isinstance(error, errors.InvalidArgument):
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=str(error))
        details.append(bad)
    if error.retry_after_s is not None:
        details.append(_retry_info(error.retry_after_s))
    packed = []
    for detail in details:
        entry = AnyMessage()
        entry.Pack(detail)
        packed.append(entry)
    code = grpc.StatusCode[error.grpc_code].value[0]
    return status_pb2.Status(code=code, message=str(error), details=packed)


def decode_error(error: grpc.aio.AioRpcError, what: str = "server", address: str = "") -> SpringtideError:
    """The error that the other side raised; an error without ErrorInfo becomes the class of its code.

    `what` and `address` name the callee in the message for one that cannot be reached.
    """
    status = _status_of(error)
    details = _unpack(status) if status is not None else {}
    info = details.get("ErrorInfo")
    if info is None:
        return _undocumented(error, what, address)
    cls = _BY_CODE.get(error.code().name, errors.Internal)
    decoded = cls.__new__(cls)
    remedy = info.metadata.get("remedy")
    message = (error.details() or "").removesuffix(f" {remedy}") if remedy else error.details() or ""
    retry = details.get("RetryInfo")
    SpringtideError.__init__(
        decoded,
        message,
        reason=info.reason,
        field=info.metadata.get("field"),
        value=info.metadata.get("value"),
        remedy=remedy,
        retry_after_s=None if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9,
        metadata={key: text for key, text in info.metadata.items() if key not in _KNOWN_METADATA},
    )
    return decoded


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    whole = math.floor(max(0.0, seconds))
    info.retry_delay.seconds = whole
    info.retry_delay.nanos = int((max(0.0, seconds) - whole) * 1e9)
    return info


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except ValueError:
                return None
    return None


def _unpack(status: status_pb2.Status) -> dict[str, error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo]:
    found: dict[str, error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo] = {}
    for entry in status.details:
        for cls in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if entry.Is(cls.DESCRIPTOR):
                message = cls()
                entry.Unpack(message)
                found[cls.DESCRIPTOR.name] = message
    return found


def _undocumented(error: grpc.aio.AioRpcError, what: str, address: str) -> SpringtideError:
    """An error that gRPC made itself: no connection, a deadline, a method that is not there."""
    code, text = error.code(), error.details() or error.code().name
    at = f" at {address}" if address else ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.Unavailable(
            f"No {what} answers{at}: {text}.",
            reason=f"{what.upper().replace(' ', '_')}_UNREACHABLE",
            remedy=f"Start the {what}, or correct the address.",
            retry_after_s=1.0,
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.Unavailable(f"The {what}{at} did not answer in time.", reason="DEADLINE_EXCEEDED")
    if code is grpc.StatusCode.INTERNAL and text == _LOST_CALL:
        return errors.Unavailable(
            f"The connection to the {what}{at} broke.", reason="CONNECTION_LOST", retry_after_s=1.0
        )
    cls = _BY_CODE.get(code.name, errors.Internal)
    made = cls.__new__(cls)
    SpringtideError.__init__(made, text, reason=code.name)
    return made
