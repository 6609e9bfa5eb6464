"""Configuration of a process: one TOML file, flags that override only when given, environment for secrets.

A process declares a frozen dataclass whose fields are made by `setting(...)`; nested dataclasses are TOML tables.
Unknown keys, wrong types and values out of bounds are InvalidArgument with the dotted key, the value and the remedy.
The reference in docs/configuration.md is generated from the same dataclasses by `reference(...)`.
"""

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from springtide.errors import InvalidArgument

T = TypeVar("T")


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    unit: str = "",
    env: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """One field of a configuration: meaning, unit, bounds, and the environment variable that may set it."""
    metadata = {"doc": doc, "unit": unit, "env": env, "minimum": minimum, "maximum": maximum, "choices": tuple(choices)}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(
    cls: type[T],
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """File, then environment, then `overrides` (dotted keys; None means not given). Raises InvalidArgument."""
    plain: dict[str, Any] = _read(path) if path is not None else {}
    _apply_environment(cls, plain, os.environ if environ is None else environ)
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(plain, key, value)
    return parse(cls, plain)


def parse(cls: type[T], plain: Mapping[str, Any], prefix: str = "") -> T:
    """Builds `cls` from plain TOML/JSON values. Raises InvalidArgument naming the dotted key."""
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in plain.items():
        dotted = prefix + key
        if key not in fields:
            raise _unknown(dotted, value, key, list(fields))
        values[key] = _convert(hints[key], value, dotted, fields[key].metadata)
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            dotted = prefix + name
            raise InvalidArgument(field=dotted, value=None, problem="is required", remedy=f"Set {dotted}.")
    return cls(**values)


def reference(cls: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Rows (key, default, unit, meaning) for the generated reference, tables flattened to dotted keys."""
    rows: list[tuple[str, str, str, str]] = []
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            rows.extend(reference(hint, f"{prefix}{f.name}."))
            continue
        default = f.default if f.default is not dataclasses.MISSING else None
        if f.default is dataclasses.MISSING and f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        rows.append((prefix + f.name, _shown(default), f.metadata.get("unit", ""), f.metadata.get("doc", "")))
    return rows


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _read(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidArgument(
            field="config", value=str(path), problem=error.strerror or str(error), remedy="Name a readable TOML file."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(field="config", value=str(path), problem=str(error), remedy="Correct the TOML.") from None


def _put(plain: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, last = dotted.split(".")
    for table in tables:
        plain = plain.setdefault(table, {})
    plain[last] = value


def _apply_environment(cls: type, plain: dict[str, Any], environ: Mapping[str, str]) -> None:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            _apply_environment(hint, plain.setdefault(f.name, {}), environ)
            continue
        text = environ.get(f.metadata.get("env") or "", "")
        if text:
            plain[f.name] = _from_text(hint, text, f.metadata["env"])


def _from_text(hint: Any, text: str, name: str) -> Any:
    target = _without_none(hint)
    try:
        if target is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return target(text) if target in (int, float) else text
    except (KeyError, ValueError):
        problem = f"is not a {target.__name__}"
        raise InvalidArgument(field=name, value=text, problem=problem, remedy="Correct the variable.") from None


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(option for option in typing.get_args(hint) if option is not type(None))
    return hint


def _convert(hint: Any, value: Any, dotted: str, metadata: Mapping[str, Any]) -> Any:
    target = _without_none(hint)
    if value is None and target is not hint:
        return None
    origin = typing.get_origin(target)
    if isinstance(target, type) and dataclasses.is_dataclass(target):
        _expect(isinstance(value, Mapping), dotted, value, "a table")
        return parse(target, value, dotted + ".")
    if origin is tuple:
        _expect(isinstance(value, list | tuple), dotted, value, "a list")
        item = typing.get_args(target)[0]
        return tuple(_convert(item, entry, f"{dotted}[{i}]", {}) for i, entry in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), dotted, value, "a table")
        item = typing.get_args(target)[1]
        return {str(key): _convert(item, entry, f"{dotted}.{key}", {}) for key, entry in value.items()}
    return _scalar(target, value, dotted, metadata)


def _scalar(target: Any, value: Any, dotted: str, metadata: Mapping[str, Any]) -> Any:
    if isinstance(target, type) and issubclass(target, Enum):
        names = [str(member.value) for member in target]
        _expect(str(value).upper() in names, dotted, value, "one of " + ", ".join(names))
        return target(str(value).upper())
    if target is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), dotted, value, "a number")
        value = float(value)
    elif target is int:
        _expect(isinstance(value, int) and not isinstance(value, bool), dotted, value, "a whole number")
    elif target is bool:
        _expect(isinstance(value, bool), dotted, value, "true or false")
    elif target is str:
        _expect(isinstance(value, str), dotted, value, "a string")
    minimum, maximum, choices = metadata.get("minimum"), metadata.get("maximum"), metadata.get("choices")
    if minimum is not None:
        _expect(value >= minimum, dotted, value, f"at least {minimum:g}")
    if maximum is not None:
        _expect(value <= maximum, dotted, value, f"at most {maximum:g}")
    if choices:
        _expect(value in choices, dotted, value, "one of " + ", ".join(choices))
    return value


def _expect(condition: bool, dotted: str, value: Any, wanted: str) -> None:
    if not condition:
        remedy = f"Set {dotted} to {wanted}."
        raise InvalidArgument(field=dotted, value=value, problem=f"must be {wanted}", remedy=remedy)


def _unknown(dotted: str, value: Any, key: str, known: list[str]) -> InvalidArgument:
    near = get_close_matches(key, known, n=1)
    remedy = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(known))}."
    return InvalidArgument(field=dotted, value=value, problem="is not a key", remedy=remedy, reason="UNKNOWN_KEY")
