"""Frozen dataclasses to plain JSON values and back.

Unknown keys are ignored and missing ones take defaults: old and new records live together.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Dataclasses become dicts, enums their values, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], plain: Mapping[str, Any]) -> T:
    """The opposite of `to_plain` for a dataclass. Raises TypeError or ValueError for values that do not fit."""
    hints = _hints(cast(Any, cls))
    names = {f.name for f in dataclasses.fields(cast(Any, cls))}
    return cls(**{key: _build(hints[key], item) for key, item in plain.items() if key in names})


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return _build(options[0], value) if len(options) == 1 else value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{value!r} is no list")
        item = typing.get_args(hint)[0]
        return tuple(_build(item, entry) for entry in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        item = typing.get_args(hint)[1]
        return {key: _build(item, entry) for key, entry in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_plain(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float:
        return float(value)
    if hint in (int, str, bool) and type(value) is not hint:
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value
