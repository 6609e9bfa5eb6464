"""Protobuf messages from plain TOML or JSON values, checked against the message's own description.

Stricter than protobuf's JSON: an unknown key or a value of the wrong type is an InvalidArgument with the dotted key,
the value and what to do, as in the configuration of a process.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from springtide.errors import InvalidArgument
from springtide.v1.types_pb2 import PoolSpec

M = TypeVar("M", bound=Message)

_PIPELINES = ("pipeline_parallelism", "pipeline_parallel_size")
_WHOLE = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32)
_NUMBER = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def pool_spec(plain: Mapping[str, Any], prefix: str = "") -> PoolSpec:
    """A pool's spec; `policy` and `routing` may be a name alone. Raises InvalidArgument; absent keys take defaults."""
    values = dict(plain)
    for key in _PIPELINES:
        _check_pipelines(values.pop(key, 1), prefix + key)
    for key in ("policy", "routing"):
        if isinstance(values.get(key), str):
            values[key] = {"name": values[key]}
    for key in ("name", "engine"):
        if not values.get(key):
            raise InvalidArgument(field=prefix + key, value=None, problem="is required", remedy=f"Set {prefix + key}.")
    return from_plain(PoolSpec, values, prefix)


def _check_pipelines(value: Any, dotted: str) -> None:
    """One is what every pool has; the simulator alone has more."""
    if value != 1 or isinstance(value, bool):
        raise InvalidArgument(
            field=dotted,
            value=value,
            problem="is not 1: a worker is one engine on the GPUs of one node, which no pipeline splits",
            remedy="Leave it out, and set tensor_parallel_size to the GPUs of one worker; only the simulator has more.",
            reason="PIPELINE_PARALLELISM",
        )


def from_plain(cls: type[M], plain: Mapping[str, Any], prefix: str = "") -> M:
    """A message of `cls`; keys are the field names of the proto, enum values their short names."""
    message = cls()
    fields = message.DESCRIPTOR.fields_by_name
    for key, value in plain.items():
        dotted = prefix + key
        if key not in fields:
            near = get_close_matches(key, list(fields), n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(fields))}."
            raise InvalidArgument(
                field=dotted, value=value, problem="is not a key", remedy=remedy, reason="UNKNOWN_KEY"
            )
        _fill(message, fields[key], value, dotted)
    return message


def _fill(message: Message, field: Any, value: Any, dotted: str) -> None:
    target: Any = getattr(message, field.name) if field.message_type or field.is_repeated else None
    if isinstance(target, Struct):
        _expect(isinstance(value, Mapping), dotted, value, "a table")
        target.update({str(k): _setting(v, f"{dotted}.{k}") for k, v in value.items()})
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _expect(isinstance(value, Mapping), dotted, value, "a table")
        entry = field.message_type.fields_by_name["value"]
        for k, v in value.items():
            target[str(k)] = _scalar(entry, v, f"{dotted}.{k}")
    elif field.is_repeated:
        _expect(isinstance(value, list | tuple), dotted, value, "a list")
        target.extend(_scalar(field, v, f"{dotted}[{i}]") for i, v in enumerate(value))
    elif field.message_type is not None:
        _expect(isinstance(value, Mapping), dotted, value, "a table")
        target.CopyFrom(from_plain(type(target), value, dotted + "."))
    else:
        setattr(message, field.name, _scalar(field, value, dotted))


def _scalar(field: Any, value: Any, dotted: str) -> Any:
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        names = {v.name.removeprefix(prefix): v.number for v in field.enum_type.values[1:]}
        _expect(str(value).upper() in names, dotted, value, "one of " + ", ".join(names))
        return names[str(value).upper()]
    kind = field.cpp_type
    if kind in _WHOLE:
        _expect(isinstance(value, int) and not isinstance(value, bool), dotted, value, "a whole number")
        limit = 31 if kind == FieldDescriptor.CPPTYPE_INT32 else 63
        _expect(-(2**limit) <= value < 2**limit, dotted, value, f"a number of at most {limit} bits")
    elif kind in _NUMBER:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), dotted, value, "a number")
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        _expect(isinstance(value, bool), dotted, value, "true or false")
    else:
        _expect(isinstance(value, str), dotted, value, "a string")
    return value


def _setting(value: Any, dotted: str) -> Any:
    simple = value is None or isinstance(value, str | int | float | bool)
    _expect(simple, dotted, value, "a string, a number, true or false")
    return value


def _expect(condition: bool, dotted: str, value: Any, wanted: str) -> None:
    if not condition:
        raise InvalidArgument(field=dotted, value=value, problem=f"must be {wanted}", remedy=f"Correct {dotted}.")
