"""The errors of every process, each with field, value and remedy, and their places in gRPC and HTTP.

SpringtideError
├── InvalidArgument       field, value, remedy           INVALID_ARGUMENT    400
├── NotFound              kind, name, known               NOT_FOUND           404
├── AlreadyExists                                         ALREADY_EXISTS      409
├── FailedPrecondition    what state forbids it           FAILED_PRECONDITION 409
├── Conflict              another writer was first        ABORTED             409
├── Unavailable           nobody can serve it now; retry  UNAVAILABLE         503
├── Exhausted             a bound is reached; retry       RESOURCE_EXHAUSTED  429
├── Unimplemented         names the missing flag          UNIMPLEMENTED       501
├── Unauthenticated       no token, or a wrong one        UNAUTHENTICATED     401
└── Internal              a fault of ours                 INTERNAL            500

`reason` is a stable UPPER_SNAKE code: it is what programs match on. The sentence is for people.
"""

from collections.abc import Iterable, Mapping

DOMAIN = "springtide"
MAX_SHOWN = 200


def shown(value: object) -> str:
    """A value as a message shows it: bounded, since it may be a caller's whole request, and headers carry messages."""
    text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


class SpringtideError(Exception):
    """Base. `grpc_code` is the name of the grpc.StatusCode, `http_status` the HTTP status."""

    grpc_code = "INTERNAL"
    http_status = 500
    openai_type = "internal_error"
    default_reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        value: object = None,
        remedy: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.value = value
        self.remedy = remedy
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    def details(self) -> dict[str, str]:
        """The metadata of google.rpc.ErrorInfo: field, value and remedy as text, where known."""
        known = {"field": self.field, "remedy": self.remedy}
        found = {key: text for key, text in known.items() if text is not None}
        if self.value is not None:
            found["value"] = str(self.value)[:200]
        return {**found, **self.metadata}

    def openai_body(self) -> dict[str, object]:
        """The body of an OpenAI-shaped HTTP error."""
        return {
            "error": {
                "message": str(self),
                "type": self.openai_type,
                "param": self.field,
                "code": self.reason.lower(),
            }
        }

    def __str__(self) -> str:
        return self.message if not self.remedy else f"{self.message} {self.remedy}"


class InvalidArgument(SpringtideError):
    """A field of the caller's has a value that cannot be used."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"
    default_reason = "INVALID_ARGUMENT"

    def __init__(self, *, field: str, value: object, problem: str, remedy: str, reason: str | None = None) -> None:
        message = f"{field} = {shown(value)}: {problem}."
        super().__init__(message, field=field, value=value, remedy=remedy, reason=reason)


class NotFound(SpringtideError):
    """No such pool, worker, node or model."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    openai_type = "invalid_request_error"
    default_reason = "NOT_FOUND"

    def __init__(self, *, kind: str, name: str, known: Iterable[str] = (), reason: str | None = None) -> None:
        listed = sorted(known)[:20]
        remedy = f"Known: {', '.join(listed)}." if listed else f"There is no {kind} yet."
        super().__init__(
            f"{kind} {shown(name)} does not exist.",
            field=kind,
            value=name,
            remedy=remedy,
            reason=reason or f"{kind.upper().replace(' ', '_')}_NOT_FOUND",
        )


class AlreadyExists(SpringtideError):
    grpc_code = "ALREADY_EXISTS"
    http_status = 409
    openai_type = "invalid_request_error"
    default_reason = "ALREADY_EXISTS"


class FailedPrecondition(SpringtideError):
    """The state of the thing forbids it now."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    openai_type = "invalid_request_error"
    default_reason = "FAILED_PRECONDITION"


class Conflict(SpringtideError):
    """Another writer changed a record that this write was based on."""

    grpc_code = "ABORTED"
    http_status = 409
    openai_type = "conflict_error"
    default_reason = "CONFLICT"


class Unavailable(SpringtideError):
    """Nobody can serve it now; the same call may succeed after `retry_after_s`."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    openai_type = "service_unavailable_error"
    default_reason = "UNAVAILABLE"


class Exhausted(SpringtideError):
    """A bound is reached; the same call may succeed after `retry_after_s`."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"
    default_reason = "RESOURCE_EXHAUSTED"


class Unimplemented(SpringtideError):
    grpc_code = "UNIMPLEMENTED"
    http_status = 501
    openai_type = "invalid_request_error"
    default_reason = "UNIMPLEMENTED"


class Unauthenticated(SpringtideError):
    """The caller showed no token or certificate that this listener accepts."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"
    default_reason = "UNAUTHENTICATED"


class Internal(SpringtideError):
    """A fault of ours."""
