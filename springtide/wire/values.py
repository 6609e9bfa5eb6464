"""Timestamps, structs, enums and counts as they cross the wire."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from springtide.errors import InvalidArgument
from springtide.model.pool import Setting

E = TypeVar("E", bound=StrEnum)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def timestamp(seconds: float | None) -> Timestamp | None:
    """Seconds since the epoch as a Timestamp; None stays absent."""
    if seconds is None:
        return None
    nanos = round(seconds * 1e9)
    return Timestamp(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def seconds(stamp: Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9


def enum_to_proto(wrapper: Any, prefix: str, value: StrEnum | None) -> Any:
    """The number of `PREFIX_VALUE` in the generated enum `wrapper`; None is UNSPECIFIED."""
    return 0 if value is None else wrapper.Value(f"{prefix}_{value.value}")


def enum_from_proto(cls: type[E], wrapper: Any, prefix: str, number: int) -> E | None:
    """None for UNSPECIFIED and for a number of a later version."""
    try:
        return cls(wrapper.Name(number).removeprefix(f"{prefix}_"))
    except ValueError:
        return None


def struct(values: Mapping[str, Any]) -> Struct:
    """Plain values as a Struct; whole numbers become doubles as JSON's do."""
    made = Struct()
    made.update({key: list(item) if isinstance(item, tuple) else item for key, item in values.items()})
    return made


def settings_from_struct(message: Struct, field: str) -> dict[str, Setting]:
    """Scalars only. A double without a fraction becomes an int. Raises InvalidArgument for lists and structs."""
    found: dict[str, Setting] = {}
    for key, value in message.fields.items():
        kind = value.WhichOneof("kind")
        if kind in ("list_value", "struct_value"):
            remedy = "Give a number, a string, true, false or null."
            raise InvalidArgument(field=f"{field}.{key}", value=kind, problem="is not a scalar", remedy=remedy)
        if kind == "number_value":
            number = value.number_value
            found[key] = int(number) if number.is_integer() else number
        elif kind == "string_value":
            found[key] = value.string_value
        elif kind == "bool_value":
            found[key] = value.bool_value
        else:
            found[key] = None
    return found


def identifier(text: str, field: str) -> str:
    """Raises InvalidArgument unless `text` is 1 to 128 letters, digits, dots, dashes, underscores."""
    if not _ID.fullmatch(text):
        problem = "is not 1 to 128 letters, digits, dots, dashes or underscores"
        raise InvalidArgument(field=field, value=text, problem=problem, remedy=f"Correct {field}.")
    return text


def count(number: int, field: str) -> int:
    """Raises InvalidArgument for a negative number."""
    if number < 0:
        raise InvalidArgument(field=field, value=number, problem="is negative", remedy=f"Send {field} >= 0.")
    return number
