"""Standard logging: lines for people on a terminal, one JSON object per line otherwise, with the trace id if any."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from springtide.errors import InvalidArgument
from springtide.telemetry.redaction import MASK, is_secret_name, learn_secrets, redact
from springtide.telemetry.traceparent import trace_id_of

MAX_MESSAGE_CHARS = 16_384

_traceparent: ContextVar[str] = ContextVar("springtide_traceparent", default="")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "traceparent",
    "trace_id",
}
_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}


@contextlib.contextmanager
def bind_traceparent(traceparent: str | None) -> Iterator[None]:
    """Log lines of this task (and of tasks that it starts) carry the trace id of `traceparent` inside the block."""
    token = _traceparent.set(traceparent or "")
    try:
        yield
    finally:
        _traceparent.reset(token)


def configure_logging(service_name: str, *, level: str | int = "INFO", stream: TextIO | None = None) -> None:
    """Replaces the root logger's handlers. `extra={...}` of a call becomes fields of its line.

    `extra` may hold `traceparent` (or `trace_id`) for one line; `bind_traceparent` does it for a block.
    """
    root_level, single_levels = parse_levels(level)
    learn_secrets()
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    terminal = target.isatty()
    if terminal:
        handler.setFormatter(HumanFormatter(colour="NO_COLOR" not in os.environ))
    else:
        handler.setFormatter(JsonFormatter(service_name))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(root_level)
    for name, single in single_levels.items():
        logging.getLogger(name).setLevel(single)
    logging.captureWarnings(True)


def parse_levels(level: str | int) -> tuple[int, dict[str, int]]:
    """ "info,router.core=debug" -> (20, {"router.core": 10})."""
    if isinstance(level, int):
        return level, {}
    root_level, single_levels = logging.INFO, {}
    for part in filter(None, (piece.strip() for piece in level.split(","))):
        name, equals, value = part.rpartition("=")
        number = logging.getLevelNamesMapping().get(value.strip().upper())
        if number is None:
            raise InvalidArgument(
                field="log_level",
                value=level,
                problem=f"{value!r} is not a level",
                remedy="Use debug, info, warning or error, e.g. info or info,router=debug.",
                reason="UNKNOWN_LOG_LEVEL",
            )
        if equals:
            single_levels[name.strip()] = number
        else:
            root_level = number
    return root_level, single_levels


class JsonFormatter(logging.Formatter):
    """Keys: time (RFC 3339, UTC), level, logger, service, pid, message, trace_id, error, and the call's own fields."""

    def __init__(self, service_name: str) -> None:
        super().__init__()
        self._service_name = service_name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "service": self._service_name,
            "pid": record.process,
            "message": _message(record),
        }
        if trace_id := _trace_id(record):
            line["trace_id"] = trace_id
        for key, value in _fields(record):
            line.setdefault(key, value)
        if error := _error(self, record):
            line["error"] = error
        return json.dumps(line, ensure_ascii=False, default=_as_text)


class HumanFormatter(logging.Formatter):
    """`12:00:01.250 INFO    router.watch  message  key=value  trace=4bf92f35`."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname:<7}"
        if self._colour and record.levelname in _COLOURS:
            level = f"\x1b[{_COLOURS[record.levelname]}m{level}\x1b[0m"
        parts = [f"{at} {level} {record.name}", _message(record), *(f"{key}={value}" for key, value in _fields(record))]
        if trace_id := _trace_id(record):
            parts.append(f"trace={trace_id[:8]}")
        error = _error(self, record)
        return "  ".join(parts) + (f"\n{error}" if error else "")


def _message(record: logging.LogRecord) -> str:
    text = redact(record.getMessage())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."


def _error(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return redact(formatter.formatException(record.exc_info))[-MAX_MESSAGE_CHARS:]


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    for key, value in record.__dict__.items():
        if key not in _STANDARD and not key.startswith("_"):
            yield key, MASK if is_secret_name(key) else _as_field(value)


def _as_field(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return _as_text(value)


def _as_text(value: object) -> str:
    return redact(str(value))[:MAX_MESSAGE_CHARS]


def _trace_id(record: logging.LogRecord) -> str:
    explicit = getattr(record, "trace_id", "") or trace_id_of(getattr(record, "traceparent", ""))
    return str(explicit or trace_id_of(_traceparent.get()))
